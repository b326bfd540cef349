"""Model folders that are not what they seem, as megadapo's checks and transformers read them."""

import json
import re
import shutil
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken

from megadapo.config import load_config
from megadapo.config.preflight import check_run
from megadapo.errors import DataError, MegadapoError
from megadapo.models.description import config_differences, describe_stored
from megadapo.weights.disk.conversion import inspect
from megadapo.weights.disk.model_folder import check_model_folder
from tests.support import REPOSITORY
from tests.support.models.tiny_models import FAMILY_NAMES, TEXT, make_model

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    """A folder of each family, with weights and tokenizer."""
    folders = tmp_path_factory.mktemp("families")
    for family in FAMILY_NAMES:
        extra = {"sliding_window": None} if family == "Mistral" else {}
        make_model(folders / family, family, sizes=TEXT, tokenizer=True, **extra)
    return folders


def rewrite(folder: Path, change) -> None:
    save_file(change(load_file(folder / WHOLE)), folder / WHOLE, metadata={"format": "pt"})


def configure(folder: Path, **keys: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def split(folder: Path, *, with_index: bool = True) -> None:
    """Write the weights as two shards."""
    tensors = load_file(folder / WHOLE)
    (folder / WHOLE).unlink()
    files = {name: SHARDS[number % 2] for number, name in enumerate(tensors)}
    for shard in SHARDS:
        part = {name: tensors[name] for name, file in files.items() if file == shard}
        save_file(part, folder / shard, metadata={"format": "pt"})
    if with_index:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def truncated(folder):
    (folder / WHOLE).write_bytes((folder / WHOLE).read_bytes()[:-100])


def empty(folder):
    (folder / WHOLE).write_bytes(b"")


def missing_shard(folder):
    split(folder)
    (folder / SHARDS[1]).unlink()


def missing_shard_without_index(folder):
    split(folder, with_index=False)
    (folder / SHARDS[0]).unlink()


def old_index_beside_a_newer_file(folder):
    newer = load_file(folder / WHOLE)
    rewrite(folder, lambda tensors: tensors | {NORM: tensors[NORM] + 9.0})
    split(folder)
    save_file(newer, folder / WHOLE, metadata={"format": "pt"})


def foreign_weights_beside_it(folder):
    for name in ("consolidated", "optimizer"):
        save_file({"layers.0.attention.wq.weight": torch.ones(2)}, folder / f"{name}.safetensors")


def wrong_prefix(folder):
    rewrite(folder, lambda tensors: {f"language_{name}": one for name, one in tensors.items()})


def extra_tensor(folder):
    rewrite(folder, lambda tensors: tensors | {"model.layers.0.extra.weight": torch.ones(2)})


def missing_tensor(folder):
    rewrite(folder, lambda tensors: {name: tensors[name] for name in tensors if name != NORM})


def wrong_shape(folder):
    rewrite(folder, lambda tensors: tensors | {NORM: torch.ones(3)})


def mixed_types(folder):
    rewrite(folder, lambda tensors: tensors | {NORM: tensors[NORM].bfloat16()})


def buffers_of_old_files(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda tensors: tensors | {name: torch.ones(16)})


def quantised_with_scales(folder):
    name = "model.layers.0.self_attn.q_proj.weight"
    scale = {f"{name}_scale": torch.ones(1)}
    rewrite(folder, lambda tensors: tensors | {name: tensors[name].to(torch.int8)} | scale)


def config_unlike_tensors(folder):
    configure(folder, num_hidden_layers=3, layer_types=None)


def vocabulary_unlike_tokenizer(folder):
    rewrite(folder, lambda tensors: tensors | {EMBEDDING: tensors[EMBEDDING][:40].clone()})
    configure(folder, vocab_size=40)


def broken_tokenizer(folder):
    (folder / "tokenizer.json").write_text('{"version": "1.0"')


def link_that_leaves_the_folder(folder):
    shutil.move(folder / "tokenizer.json", folder.parent / "elsewhere.json")
    (folder / "tokenizer.json").symlink_to(folder.parent / "elsewhere.json")


LOADS, UNREAD = "loads", "note: not read as weights: "
DAMAGES = {
    # megadapo's error, or its note after "note: "; and what transformers does
    truncated: ("model.safetensors is not a readable safetensors file", "SafetensorError"),
    empty: ("model.safetensors is not a readable safetensors file", "SafetensorError"),
    missing_shard: (f"{INDEX} names {SHARDS[1]}, which is not a file .* .1 of 2 f", "FileNotFound"),
    missing_shard_without_index: (f"neither {WHOLE} nor {INDEX} beside {SHARDS[1]}", "OSError"),
    old_index_beside_a_newer_file: (f"{UNREAD}{SHARDS[0]}, {SHARDS[1]}, {INDEX}", LOADS),
    foreign_weights_beside_it: (f"{UNREAD}consolidated.safetensors, optimizer.saf", LOADS),
    wrong_prefix: (f"language_.* of {WHOLE} is not in the layout; .* is missing", LOADS),
    extra_tensor: (f"layers.0.extra.weight of {WHOLE} is not in the layout", LOADS),
    missing_tensor: ("model.norm.weight is missing", LOADS),
    wrong_shape: (rf"norm.weight of {WHOLE} has shape \[3\], config.json says \[64\]", "Runtime"),
    mixed_types: ("note: ", LOADS),
    buffers_of_old_files: ("note: ", LOADS),
    quantised_with_scales: (f"{WHOLE}: the weights are quantised", LOADS),
    config_unlike_tensors: ("model.layers.2.input_layernorm.weight is missing", LOADS),
    vocabulary_unlike_tokenizer: ("tokens beyond the model's vocab_size = 40: .* and ", LOADS),
    broken_tokenizer: ("no usable tokenizer", LOADS),
    link_that_leaves_the_folder: ("note: tokenizer.json is a link to .*elsewhere.json", LOADS),
}


def transformers_says(folder: Path) -> str:
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except Exception as error:  # every kind of its errors is compared by name
        return type(error).__name__
    expected = load_file(folder / WHOLE).get(NORM)
    if expected is not None:
        assert torch.equal(model.model.norm.weight, expected.float())
    return LOADS


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_damaged_folder_is_one_message_before_anything_starts(
    sound, family, damage, tmp_path, monkeypatch
):
    """Otherwise a run trains another model, or ends after its engines have started."""
    monkeypatch.chdir(REPOSITORY)
    folder = Path(shutil.copytree(sound / family, tmp_path / "model"))
    damage(folder)
    said, theirs = DAMAGES[damage]
    assert transformers_says(folder).startswith(theirs)
    config = load_config("configs/quickstart.toml", [f"--model.path={folder}"])
    checks = (lambda: inspect(folder), lambda: "\n".join(check_run(config)))
    for check in checks:
        if said.startswith("note: "):
            assert re.search(said.removeprefix("note: "), check())
            continue
        with pytest.raises(MegadapoError, match=said) as caught:
            check()
        message = str(caught.value)
        assert message.count(str(folder)) == 1 and "\n" not in message


ODD = [
    *(None, True, -1, 0, 2**63, 10**400, 0.5, float("nan"), float("inf"), 1e308, "", "x" * 50),
    *([], [[]], [None], [1, "a"], ["Qwen2ForCausalLM", 5], {}, {"a": {"b": [1]}}),
    *({"rope_type": ["a"]}, {"rope_type": "default", "rope_theta": []}, {"type": "yarn"}),
]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_any_value_of_a_key_is_read_or_refused(sound, family):
    """Catches a value of another type that ends in a TypeError, far from config.json."""
    config = json.loads((sound / family / "config.json").read_text())
    for key in [*config, "rope_scaling", "rope_parameters", "head_dim", "layer_types"]:
        for value in ODD:
            for read in (describe_stored, partial(config_differences, config)):
                with suppress(MegadapoError):
                    read({**config, key: value})


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"added_tokens": [], "model": {}}'])
def test_damaged_tokenizer_is_one_message(sound, tmp_path, content):
    """transformers and tokenizers raise errors of many types for it."""
    folder = Path(shutil.copytree(sound / "Qwen3", tmp_path / "model"))
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match="no usable tokenizer"):
        check_model_folder(folder, where="model.path")


@pytest.mark.parametrize(
    ("token", "template", "ends", "said"),
    [
        (AddedToken("<more>", special=True), "", 1, None),
        (AddedToken("<more>", special=True), "<more>", 1, r"vocab_size = 50: <more> \(50\)"),
        (AddedToken("<more>", special=False), "", 1, r"vocab_size = 50: <more> \(50\)"),
        (None, "", [1, 50], "stop token 50"),
        (None, "", -5, "stop token -5"),
        (None, "", "1", "eos_token_id is '1', not a token's id"),
    ],
)
def test_tokens_beyond_the_vocabulary_are_refused(sound, tmp_path, token, template, ends, said):
    """They would train a row of padding, which no export has."""
    folder = Path(shutil.copytree(sound / "Qwen2", tmp_path / "model"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([token] if token is not None else [])
    tokenizer.chat_template += template
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(MegadapoError, match=said) if said else nullcontext():
        check_model_folder(folder, where="model.path")
