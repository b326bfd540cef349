"""Commands end with one message and the right exit code, and import only what they need."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

import megadapo
from megadapo import cli, errors
from megadapo.cli import main
from megadapo.config import load_config, preflight, to_dict
from megadapo.observe.rollouts.files import write_rollouts
from megadapo.run.run import Run
from tests.support import REPOSITORY
from tests.support.models.tiny_models import write_tokenizer, write_zeros
from tests.support.processes.running import heavy_imports
from tests.support.rollout.saved_groups import saved_group
from tests.support.runs.recorded_runs import record_run
from tests.support.runs.runs_alone import config_of

RECIPE = """
[run]
folder = "runs/x"
num_steps = 3
[model]
path = "{model}"
[data]
train = "arithmetic:train:64"
max_prompt_tokens = 16
[rollout]
max_response_tokens = 48
[algorithm]
overlong_buffer = 16
[trainer.optimizer]
warmup_steps = 2
"""

SIZES = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_tokenizer(folder)
    return write_zeros(folder, SIZES)


@pytest.fixture
def recipe(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(model=model))
    return path


FAILS = """
import sys
from megadapo import cli, errors
def fail(argv):
    raise errors.InfraError("trainer rank 3 died")
cli.run_command = fail
sys.exit(cli.main([]))
"""


def test_lost_stderr_changes_no_exit_code():
    """A supervisor took the code 1 of a lost terminal for an error that no restart mends."""
    with open("/dev/full", "wb") as full:
        assert subprocess.run([sys.executable, "-c", FAILS], stderr=full).returncode == 5


def test_reader_of_the_first_line_changes_no_exit_code(tmp_path):
    """`megadapo status RUN | head -1` ended with a traceback and 1, which means "not running"."""
    with Run.open(config_of(tmp_path)):
        words = [sys.executable, "-m", "megadapo.cli", "status", str(tmp_path)]
        status = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert status.stdout is not None and status.stderr is not None
        status.stdout.close()
        assert (status.stderr.read(), status.wait()) == (b"", 0)


def test_unforeseen_error_of_a_file_names_it(tmp_path, fails):
    record_run(tmp_path, num_steps=2)
    (tmp_path / "evaluations.jsonl").unlink()
    (tmp_path / "evaluations.jsonl").mkdir()
    assert "evaluations.jsonl: Is a directory" in fails(5, "plot", str(tmp_path))


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--restarts=-3", "'-3' is no whole number"),
        ("--accept-changes=bogus.key", "there is no such key"),
    ],
)
def test_option_that_can_have_no_effect_is_refused(recipe, capsys, option, said):
    with pytest.raises(SystemExit) if "restarts" in option else nullcontext():
        assert main(["train", str(recipe), "--dry-run", option]) == 2
    assert said in capsys.readouterr().err


def test_rollout_asks_for_no_keys_of_the_trainer(recipe):
    changes = ["sampling.prompts_per_step=3", "rollout.max_response_tokens=16"]
    with pytest.raises(errors.ConfigError, match=r"(?s)responses_per_mini_batch.*overlong_buffer"):
        load_config(recipe, changes)
    config = load_config(recipe, changes, trains=False)
    assert (config.groups_per_mini_batch, config.algorithm.overlong_buffer) == (3, 0)


Fails = Callable[..., str]


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """Run a command that must fail with this exit code; return its one message."""

    def run(code: int, *argv: str) -> str:
        assert main(argv) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("megadapo: ") and "Traceback" not in captured.err
        return captured.err

    return run


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90m", 5400), ("24h", 86400), ("1.5d", 129600), ("2s", 2)]
)
def test_time_to_give_up_after_has_a_unit(text, seconds):
    arguments = cli.build_parser().parse_args(["train", "x.toml", "--give-up-after", text])
    assert arguments.give_up_after == seconds


@pytest.mark.parametrize("text", ["", "-1", "1w", "h", "24h30m"])
def test_time_that_cannot_be_read_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        main(["train", "x.toml", f"--give-up-after={text}"])
    assert "is no time such as 90m, 24h or 3d" in capsys.readouterr().err


def test_dry_run_prints_configuration_and_starts_nothing(recipe, tmp_path, monkeypatch):
    """A process of its own shows its imports and files."""
    argv = ["train", str(recipe), "--dry-run", "--run.seed=5", "--resume", "never"]
    monkeypatch.chdir(tmp_path)
    printed = tmp_path / "printed.toml"
    program = f"import sys; from megadapo.cli import main; sys.stdout = open({str(printed)!r}, 'w')"
    program += f"; assert main({argv}) == 0; sys.stdout.flush(); sys.stdout = sys.__stdout__"
    assert not {"ray", "vllm", "megatron"} & set(heavy_imports(program))
    assert load_config(printed) == load_config(recipe, ["run.seed=5", "run.resume=never"])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["train", "{recipe}", "--dry-run", "--run.sed=5"], 2, "run.seed"),
        (["trian", "{recipe}"], 2, "trian: unknown command; did you mean train?"),
        (["config", "trainer", "--schema"], 2, "trainer: --schema, --markdown and"),
        (["config", "--diff", "{recipe}"], 2, "megadapo config RECIPE --diff BASE"),
        (["xyz"], 2, "xyz: unknown command; see megadapo --help"),
        (["train", "{recipe}", "--dry-run", "--dryrun"], 2, "unknown argument"),
        (["train", "{recipe}", "--dry-run", "--dry"], 2, "unknown argument"),
        (["train", "{recipe}", "--dry-run", "--run.seed"], 2, "write --section.key=value"),
        (["train", "{recipe}", "--dry-run", "stray"], 2, "unknown argument"),
        (["train", "{recipe}", "--dry-run", "--seed=5"], 2, "unknown argument"),
        (["doctor", "--run.seed=5"], 2, "unknown argument"),
        (["plot", "somewhere", "--run.seed=5"], 2, "unknown argument"),
        (["eval", "{recipe}"], 2, "data.held_out"),
        (["convert", "inspect", "{folder}"], 2, "--model"),
    ],
)
def test_unknown_argument_or_useless_command_is_refused(recipe, fails, argv, code, said):
    """A silently ignored argument would start a run with wrong settings."""
    names = {"recipe": recipe, "folder": recipe.parent}
    assert said.format(**names) in fails(code, *(word.format(**names) for word in argv))


@pytest.mark.parametrize(
    ("override", "code", "said"),
    [
        ("model.path=nowhere", 3, "no such folder"),
        ("model.path=./a/b", 3, "no such folder"),
        # a typing error where the folder `models` exists, not a Hub name
        ("model.path=models/bse", 3, "no such folder"),
        ("model.path=models/m.gguf", 3, "megadapo convert gguf-to-hf models/m.gguf DST"),
        ("data.train=nowhere.parquet", 3, "data.train"),
        ("data.train=./none/at/all", 3, "data.train"),
        ("data.train=arithmetic:train:0", 3, "data.train"),
        ("data.held_out=arithmetic:wrong:9", 3, "data.held_out"),
        ("data.held_out=arithmetic-chain:wrong:9", 3, "data.held_out"),
        ("run.resume=nowhere", 4, "run.resume"),
        ("run.folder=/dev/null/run", 2, "/dev/null is a file"),
        ("trainer.tensor_parallel=4", 2, "num_key_value_heads"),
        ("trainer.pipeline_parallel=3", 2, "num_hidden_layers"),
        ("rollout.max_response_tokens=49", 2, "max_position_embeddings = 64"),
    ],
)
def test_dry_run_checks_files(recipe, tmp_path, fails, monkeypatch, override, code, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.gguf").touch()
    assert said in fails(code, "train", str(recipe), "--dry-run", f"--{override}")


@pytest.mark.parametrize("folder", ["/proc/megadapo/run", "runs/" + "x" * 300, "/proc/self/x"])
def test_impossible_run_folder_is_found_early(recipe, tmp_path, fails, monkeypatch, folder):
    """Root may write everywhere, so permissions do not show it."""
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    message = fails(2, "train", str(recipe), "--dry-run", f"--run.folder={folder}")
    assert f"run.folder = {folder} cannot be created" in message
    assert set(tmp_path.rglob("*")) == before


def test_run_folder_that_fails_for_a_while_can_be_tried_again(recipe, tmp_path, fails, monkeypatch):
    """With exit code 2 a supervisor would give the run up."""
    folder, real = tmp_path / "run", Path.exists

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def unreadable(path):
        if path.parent == folder:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path)

    monkeypatch.setattr(Path, "exists", unreadable)
    words = ("train", str(recipe), "--dry-run", f"--run.folder={folder}")
    assert f"{folder}/resumed.json cannot be read" in fails(5, *words)
    monkeypatch.setattr(preflight, "TemporaryDirectory", full)
    assert "cannot be created: No space left" in fails(5, *words)


def test_error_reaches_the_terminal_without_escape_sequences(tmp_path, capsys):
    assert main(["show", str(tmp_path / "\x1b[2J")]) != 0
    assert r"\x1b[2J" in (shown := capsys.readouterr().err) and "\x1b" not in shown


def test_missing_gpus_are_found_early(recipe, capsys, fails, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    dry = ("train", str(recipe), "--dry-run", "--cluster.device=cuda")
    assert 'cluster.device = "cuda", but this machine has no NVIDIA GPU' in fails(2, *dry)
    assert main([*dry, "--cluster.address=auto"]) == 0
    assert "cluster.address = auto are not checked" in capsys.readouterr().err
    assert main(dry[:3]) == 0
    assert 'cluster.device = "auto" means the CPU' in capsys.readouterr().err


def test_hub_names_are_reported_as_not_checked(recipe, capsys):
    argv = ["--model.path=no-such-org/no-such-model", "--data.train=no-such-org/no-such-data"]
    assert main(["train", str(recipe), "--dry-run", *argv]) == 0
    notes = capsys.readouterr().err
    assert "model.path" in notes and "data.train" in notes and "not checked" in notes


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_incomplete_model_folder_is_named(recipe, model, fails, missing):
    (model / missing).unlink()
    message = fails(3, "train", str(recipe), "--dry-run")
    assert str(model) in message and missing.removeprefix("model") in message


def test_random_initialisation_needs_no_weights(recipe, model):
    (model / "model.safetensors").unlink()
    assert main(["train", str(recipe), "--dry-run", "--model.init=random"]) == 0


@pytest.mark.parametrize("content", ["{", "[]", "\xff", '{"num_attention_heads": "4"}'])
def test_damaged_model_configuration_is_one_message(recipe, model, capsys, content):
    (model / "config.json").write_bytes(content.encode("latin-1"))
    assert main(["train", str(recipe), "--dry-run"]) in (2, 3)
    assert "config.json" in capsys.readouterr().err


def test_problems_of_model_and_data_are_reported_together(recipe, fails):
    argv = ["--model.path=nowhere", "--data.train=nowhere.jsonl"]
    message = fails(3, "train", str(recipe), "--dry-run", *argv)
    assert "model.path" in message and "data.train" in message


def test_run_folder_as_config_resumes_the_run(recipe, tmp_path, capsys):
    """This holds after --resume never and from another directory too."""
    folder = tmp_path / "run"
    folder.mkdir()
    started = load_config(recipe, ["run.resume=never"])
    (folder / "config.json").write_text(json.dumps(to_dict(started)))
    assert main(["train", str(folder), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert 'resume = "auto"' in printed and f'folder = "{folder}"' in printed
    assert main(["train", str(folder), "--dry-run", "--resume=never"]) == 0
    assert 'resume = "never"' in capsys.readouterr().out


def test_impossible_replay_is_refused_early(recipe, tmp_path, capsys, fails):
    saved = tmp_path / "source" / "rollouts"
    argv = ["train", str(recipe), "--dry-run", f"--replay={saved}"]
    assert "there is no step-N.jsonl.zst" in fails(2, *argv)
    write_rollouts(saved / "step-3.jsonl.zst", [saved_group(step=3)])
    (tmp_path / "source" / "metrics.jsonl").write_text('{"step": 3, "groups/kept": 1}\n')
    assert main(argv) == 0
    assert f"replaying {saved}" in capsys.readouterr().err
    message = fails(2, *argv, f"--run.folder={tmp_path / 'source'}")
    assert "choose another run.folder" in message


def test_rollout_refuses_missing_weights_and_existing_run(recipe, tmp_path, fails):
    """Random weights show nothing, and an existing run must not be overwritten."""
    argv = ["rollout", str(recipe), f"--run.folder={tmp_path / 'run'}"]
    assert "at least 1" in fails(2, *argv, "--steps=0")
    assert "leaves engines without weights" in fails(2, *argv, "--model.init=random")
    folder = tmp_path / "run-rollout"
    write_rollouts(folder / "rollouts" / "step-3.jsonl.zst", [saved_group(step=3)])
    (folder / "checkpoints").mkdir()
    assert "holds a run (checkpoints)" in fails(2, *argv)
    assert (folder / "rollouts" / "step-3.jsonl.zst").is_file()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        *((errors.ConfigError("x"), 2), (errors.DataError("x"), 3)),
        *((errors.CheckpointError("x"), 4), (errors.InfraError("x"), 5)),
        *((errors.OracleError("x"), 6), (errors.RunInterruptedError("x"), 75)),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_error_type_has_its_exit_code(monkeypatch, fails, error, code):
    monkeypatch.setattr("megadapo.commands.doctor.run", Mock(side_effect=error))
    fails(code, "doctor")


def test_a_defect_keeps_its_traceback(monkeypatch):
    """Only errors for users hide the traceback."""
    monkeypatch.setattr("megadapo.commands.doctor.run", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [(["--version"], 0, f"megadapo {megadapo.__version__}\n"), ([], 2, "usage: megadapo")],
)
def test_version_and_usage(capsys, argv, code, said):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    captured = capsys.readouterr()
    assert ended.value.code == code and said in captured.out + captured.err


def test_every_command_has_help(capsys):
    parser = cli.build_parser()
    commands = next(a for a in parser._actions if hasattr(a, "choices") and a.choices).choices
    for name in commands:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert f"megadapo {name}" in capsys.readouterr().out


LARGE = str(REPOSITORY / "configs" / "qwen2.5-32b.toml")
FEW_RESPONSES = (
    *("--sampling.prompts_per_step=8", "--sampling.responses_per_prompt=4"),
    "--algorithm.responses_per_mini_batch=8",
)


SMALL_CLUSTER = (*FEW_RESPONSES, "--gpus", "24", "--trainer-gpus", "8", "--steps", "2")


def test_simulate_compares_whole_steps_on_equally_many_gpus(tmp_path, capsys):
    json_file = tmp_path / "steps.json"
    options = (*SMALL_CLUSTER, "--seeds", "2", "--json", str(json_file))
    assert main(["simulate", LARGE, *options]) == 0
    document = json.loads(json_file.read_text())
    assert document["machine"]["versions"]["numpy"]
    assert all(entry["step_s"] > 0 and len(entry["seconds"]) == 4 for entry in document["modes"])
    names = [(entry["name"], entry["gpus"]) for entry in document["modes"]]
    assert names[0] == ("sync", "24 shared") and names[-1] == ("async, 2 behind", "16 + 8")
    assert "16 + 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "128", "--trainer-gpus", "12"), "--trainer-gpus 12"),
        (("--gpus", "128", "--staleness", "1"), "at least 2"),
        (("--gpus", "4"), "too few"),
        (("--keep-rate", "0.9", "--solved", "0.4"), "mixed"),
        (("--steps", "0"), "--steps 0"),
        (("--seeds", "0"), "--seeds 0"),
    ],
)
def test_simulate_refuses_impossible_settings(capsys, arguments, message):
    assert main(["simulate", LARGE, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_simulate_imports_no_heavy_package():
    assert heavy_imports("import megadapo.lab.simulate.simulation") == []
