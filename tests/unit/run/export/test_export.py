"""An export has exactly the checkpoint's weights, or fails with a reason."""

import json
import pickle
import shutil
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from rich.filesize import decimal
from safetensors import SafetensorError
from safetensors.torch import load_file

from megadapo.cli import main
from megadapo.errors import CheckpointError, ConfigError, DataError, InfraError, WeightError
from megadapo.models.folder import copy_small_files, resolve_model_folder
from megadapo.observe.run_records import MODEL_FOLDER
from megadapo.run.export.export import export_checkpoint, find_source, set_padding
from megadapo.run.state.checkpoint import CheckpointStore
from megadapo.weights.disk import export
from megadapo.weights.disk.torch_checkpoint import read_metadata
from tests.support.models.tiny_models import TEXT, write_tokenizer
from tests.support.runs.checkpoints import save_checkpoint, written_by
from tests.support.runs.exported_runs import trainer_tensors, write_run


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", tiny_model, 2, 3)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def is_times(folder: Path, model: Path, factor: float) -> bool:
    found, base = weights_of(folder), weights_of(model)
    assert found.keys() == base.keys()
    return all(torch.equal(found[name], base[name] * factor) for name in base)


def test_newest_checkpoint_is_exported_for_servers(finished, tiny_model, tmp_path, capsys):
    destination = tmp_path / "out"
    assert main(["export", str(finished), str(destination)]) == 0
    said = capsys.readouterr().out
    assert f"vllm serve {destination}" in said and "from_pretrained" in said
    assert is_times(destination, tiny_model, 3)
    for path in tiny_model.glob("*.json"):
        assert json.loads((destination / path.name).read_text()) == json.loads(path.read_text())
    assert list(tmp_path.iterdir()) == [destination]


def test_transformers_computes_the_trained_weights(finished, tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export_checkpoint(find_source(finished, 2), tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    expected = AutoModelForCausalLM.from_pretrained(tiny_model, dtype="auto")
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.mul_(2)
        tokens = torch.arange(2, 40)[None]
        assert torch.equal(exported(tokens).logits, expected(tokens).logits)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == exported.config.vocab_size


def test_moved_run_is_exported_without_the_models_folder(run, tiny_model, tmp_path):
    """Its path is relative to the folder in which the run was started."""
    config = json.loads((run / "config.json").read_text())
    config["model"]["path"] = "elsewhere/model"
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="relative to the current folder"):
        export_checkpoint(find_source(run), tmp_path / "out")
    shutil.copytree(tiny_model, model := run.parent / "model")
    # some models have a folder of licences
    (model / "LICENSES").mkdir()
    copy_small_files(model, run / MODEL_FOLDER)
    assert not list((run / MODEL_FOLDER).glob("*.safetensors"))
    export_checkpoint(find_source(run), tmp_path / "out")
    assert is_times(tmp_path / "out", tiny_model, 3)


@pytest.mark.parametrize("name", ["run", "run/checkpoints/step-2"])
def test_step_is_chosen_by_number_or_folder(finished, tiny_model, tmp_path, name, capsys):
    chosen = ["--step", "2"] if name == "run" else []
    assert main(["export", str(finished.parent / name), str(tmp_path / "out"), *chosen]) == 0
    size = decimal(sum(p.stat().st_size for p in (tmp_path / "out").iterdir()))
    assert f"step 2: {size} in 1 weight file, {tmp_path}" in capsys.readouterr().out
    assert is_times(tmp_path / "out", tiny_model, 2)


def test_missing_generation_config_is_written(finished, tiny_model, tmp_path):
    base = Path(shutil.copytree(tiny_model, tmp_path / "base"))
    (base / "generation_config.json").unlink(missing_ok=True)
    export_checkpoint(find_source(finished), tmp_path / "out", model=str(base))
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == {"eos_token_id": 1, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"eos_token_id": 1}, [1, "turn"]),
        ({"eos_token_id": [1, 5]}, [1, 5, "turn"]),
        ({"eos_token_id": None}, ["turn", 1]),
        ({}, ["turn", 1]),
    ],
)
def test_exported_model_stops_at_the_end_of_a_turn(finished, tiny_model, tmp_path, known, expected):
    """Plain transformers and vLLM read the stop tokens of generation_config.json alone."""
    from transformers import AutoTokenizer, GenerationConfig

    base = Path(shutil.copytree(tiny_model, tmp_path / "base"))
    template = "{% for m in messages %}{{ m.content + '<turn>' }}{% endfor %}"
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(base)
    end = tokenizer.convert_tokens_to_ids("<turn>")
    (base / "generation_config.json").write_text(json.dumps({"do_sample": True, **known}))
    export_checkpoint(find_source(finished), tmp_path / "out", model=str(base))
    written = GenerationConfig.from_pretrained(tmp_path / "out")
    assert written.eos_token_id == [end if one == "turn" else one for one in expected]
    assert written.do_sample


def test_card_has_origin_and_accuracy(finished, tmp_path):
    export_checkpoint(find_source(finished, 2), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "step 2 of 9" in card
    assert "avg@8 on 64 held-out problems of `arithmetic:held_out:64`" in card
    assert "| this model | 0.2000 ± 0.0123 | 22.0 |" in card
    assert "| before training | 0.0000 ± 0.0123 | 20.0 |" in card
    assert "temperature 1.0, top-p 0.7" in card
    for line in ("algorithm.objective.clip_high = 0.28", "trainer.optimizer.lr = 1e-06"):
        assert line in card.splitlines()
    assert "dual_clip" not in card and str(finished) not in card


def test_checkpoint_without_run_needs_the_model(run, tiny_model, tmp_path):
    alone = Path(shutil.copytree(run / "checkpoints" / "step-3", tmp_path / "alone" / "step-3"))
    with pytest.raises(ConfigError, match="--model"):
        export_checkpoint(find_source(alone), tmp_path / "out")
    export_checkpoint(find_source(alone), tmp_path / "out", model=str(tiny_model))
    assert is_times(tmp_path / "out", tiny_model, 3)
    assert "Not evaluated" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["run", "out", "--step", "5"], CheckpointError.exit_code, "those of 2, 3"),
        (["run/checkpoints/step-5", "out"], CheckpointError.exit_code, "step-2, step-3"),
        (["run/checkpoints/step-2", "out", "--step", "2"], ConfigError.exit_code, "run's folder"),
        (["nowhere", "out"], CheckpointError.exit_code, "neither a checkpoint nor a run"),
        (["run", "run"], WeightError.exit_code, "exists already"),
        (["run", "out", "--model", "./none"], DataError.exit_code, "no such folder"),
    ],
)
def test_impossible_export_is_one_message(
    finished, tmp_path, monkeypatch, capsys, arguments, code, says
):
    (tmp_path / "run").symlink_to(finished)
    monkeypatch.chdir(tmp_path)
    assert main(["export", *arguments]) == code
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_model_of_the_hub_has_all_files_of_an_export(monkeypatch):
    """The export of a model with chat_template.jinja had no chat template."""
    carried = ["chat_template.jinja", "tokenizer.model", "LICENSE", "merges.txt", "config.json"]
    asked = Mock(return_value="folder")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", asked)
    resolve_model_folder("organisation/model", with_weights=False)
    patterns = asked.call_args.kwargs["allow_patterns"]
    found = filter_repo_objects([*carried, "model.safetensors"], allow_patterns=patterns)
    assert list(found) == carried


def test_failed_export_leaves_nothing(run, tiny_model, tmp_path, monkeypatch):
    """A folder of half a model on a full disk kept the run from saving."""
    monkeypatch.setattr(export, "save_file", Mock(side_effect=SafetensorError("No space left")))
    with pytest.raises(InfraError, match="No space left.*make room"):
        export_checkpoint(find_source(run), tmp_path / "out", model=str(tiny_model))
    assert list(tmp_path.glob("out*")) == []


def test_export_is_on_the_disk_before_it_has_its_name(run, tiny_model, tmp_path, monkeypatch):
    """After a power loss, exports/step-N had empty files and was not written again."""
    synced, rename = set[str](), Path.rename
    monkeypatch.setattr(export, "sync_path", lambda path: synced.add(path.name))

    def checked(path: Path, target: Path) -> Path:
        if target == tmp_path / "out":
            assert {one.name for one in path.iterdir()} <= synced
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", checked)
    export_checkpoint(find_source(run), tmp_path / "out", model=str(tiny_model))
    assert "model.safetensors" in synced


def test_damaged_checkpoint_is_skipped_or_refused(run, tiny_model, tmp_path, capsys):
    shard = next((run / "checkpoints" / "step-3" / "trainer").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="SHA-256"):
        find_source(run, 3)
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert "skipped" in capsys.readouterr().err
    assert is_times(tmp_path / "out", tiny_model, 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"decoder.final_layernorm.weight": None}, "final_layernorm.weight is missing"),
        ({"decoder.layers.mlp.router.weight": torch.ones(2, 4)}, "router.weight is not in"),
        ({"decoder.layers.mlp.linear_fc2.weight": torch.ones(2, 64, 96)}, r"\[2, 64, 96\]"),
        ({"decoder.layers.mlp.linear_fc2.weight": torch.ones(3, 64, 128)}, r"\[3, 64, 128\]"),
        ({"decoder.final_layernorm.weight": torch.ones(64).bfloat16()}, "different types"),
    ],
    ids=["missing", "unknown", "misshapen", "layers", "type"],
)
def test_checkpoint_of_another_model_is_refused(tiny_model, tmp_path, change, says):
    changed = trainer_tensors(tiny_model, 1.0) | change
    tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    run = write_run(tmp_path / "run", tiny_model, 1, tensors=tensors)
    with pytest.raises(WeightError, match=says):
        export_checkpoint(find_source(run), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class _RunsACommand:
    def __init__(self, witness: Path) -> None:
        self._witness = witness

    def __reduce__(self) -> tuple:
        import os

        return os.system, (f"touch {self._witness}",)


def _with_metadata(run: Path, content: bytes) -> None:
    folder = run / "checkpoints"
    trainer = folder / "step-3" / "trainer"
    (trainer / ".metadata").write_bytes(content)
    copy = Path(shutil.copytree(trainer, run / "copy"))
    shutil.rmtree(folder / "step-3")
    write = written_by(lambda path: shutil.copytree(copy, path, dirs_exist_ok=True))
    save_checkpoint(CheckpointStore(folder, keep=9), 3, write, state={})


@pytest.fixture
def metadata(run):
    return read_metadata(run / "checkpoints" / "step-3" / "trainer")


def test_pickle_cannot_run_a_command(run, metadata, tmp_path):
    witness = tmp_path / "it-ran"
    metadata.planner_data = _RunsACommand(witness)
    _with_metadata(run, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"(posix|os)\.system, which was not run"):
        export_checkpoint(find_source(run, 3), tmp_path / "out")
    assert not witness.exists() and not (tmp_path / "out").exists()


TABLE = pickle.dumps({"state_dict_metadata": {}})


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x04.", b"not a pickle", b"cos\nsystem\n.", TABLE],
    ids=["empty", "nothing", "text", "function", "table"],
)
def test_invalid_metadata_is_refused(run, tmp_path, content):
    _with_metadata(run, content)
    with pytest.raises(CheckpointError, match="metadata"):
        export_checkpoint(find_source(run, 3), tmp_path / "out")


def test_metadata_paths_stay_in_the_folder(run, metadata, tmp_path):
    for place in metadata.storage_data.values():
        place.relative_path = "../../step-2/trainer/" + place.relative_path
    _with_metadata(run, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="not a file beside it"):
        export_checkpoint(find_source(run, 3), tmp_path / "out")


def test_incomplete_chunks_are_refused(run, metadata, tmp_path):
    stored = metadata.state_dict_metadata["decoder.final_layernorm.weight"]
    stored.chunks[0].sizes = torch.Size([stored.size[0] - 1])
    _with_metadata(run, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="do not cover it"):
        export_checkpoint(find_source(run, 3), tmp_path / "out")


@pytest.mark.slow
def test_quantised_export_is_marked(finished, tmp_path):
    export_checkpoint(find_source(finished), tmp_path / "out", quantize="fp8")
    exported = weights_of(tmp_path / "out")
    kinds = {tensor.dtype for name, tensor in exported.items() if name.endswith("_proj.weight")}
    assert kinds == {torch.float8_e4m3fn}
    assert "quantised to fp8" in (tmp_path / "out" / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_card_of_fine_tuning_says_so(run, tmp_path):
    step = max((run / "checkpoints").iterdir()).name
    source = find_source(run)
    source.checkpoint.state["rows"] = "fingerprint"
    export_checkpoint(source, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{step.removeprefix('step-')} steps of supervised fine-tuning" in card
    assert "DAPO" not in card and "reinforcement" not in card


def test_export_keeps_all_files_of_the_tokenizer_and_no_quantisation(
    finished, tiny_model, tmp_path
):
    """transformers would quantise the plain weights, or look for their scales."""
    base = Path(shutil.copytree(tiny_model, tmp_path / "base"))
    small = ("additional_chat_templates/rag.jinja", "tekken.json", "spiece.model")
    for name in small:
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text("{}")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"bits": 4}}))
    export_checkpoint(find_source(finished), tmp_path / "out", model=str(base))
    assert all((tmp_path / "out" / name).is_file() for name in small)
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize(("padding", "kept"), [(0, 0), (1, None)])
def test_padding_does_not_hide_the_last_token_of_a_conversation(tmp_path, padding, kept):
    """transformers would score the token before it, and order pairs in another way."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config

    config = Qwen2Config(**TEXT | {"pad_token_id": padding, "num_labels": 1})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    set_padding(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    tokens = AutoTokenizer.from_pretrained(tmp_path)("1+2<eos>", return_tensors="pt")
    with torch.no_grad():
        last = model.score(model.model(**tokens)[0])[:, -1]
        assert torch.equal(model(**tokens).logits, last) and model.config.pad_token_id == kept
