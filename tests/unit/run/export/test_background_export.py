"""Background exports survive pruning, stop and resume, and never harm the run."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from megadapo.config import RunConfig
from megadapo.errors import ConfigError, RunInterruptedError
from megadapo.run.export import background_export
from megadapo.run.export.background_export import BackgroundExports
from megadapo.run.run import Run
from tests.support.runs import runs_alone
from tests.support.runs.exported_runs import saved, trainer_tensors, write_run


def config_of(folder: Path, model: Path, *, num_steps: int, **checkpoint: float) -> RunConfig:
    changes = {
        "model.path": str(model),
        "evaluation.every": 0,
        "checkpoint": {"every": 2, "export_every": 2, "keep": 2} | checkpoint,
    }
    return runs_alone.config_of(folder, changes, num_steps=num_steps)


def advance(run: Run, model: Path, to_step: int) -> None:
    """Do steps after which the weights of step N are the base model's times N."""
    runs_alone.advance(run, to_step, lambda step: saved(trainer_tensors(model, step)))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def holds_weights_of(folder: Path, model: Path, step: int) -> bool:
    name = "model.norm.weight"
    found = load_file(folder / "exports" / f"step-{step}" / "model.safetensors")[name]
    return torch.equal(found, load_file(model / "model.safetensors")[name] * step)


def test_every_due_checkpoint_is_exported(tiny_model, tmp_path):
    """Steps take no time here: a checkpoint that pruning took would be gone before its export."""
    due = {"every": 3, "every_minutes": 1e-9, "export_every": 3}
    with Run.open(config_of(tmp_path, tiny_model, num_steps=5, **due)) as run:
        advance(run, tiny_model, 5)
        assert names(tmp_path / "checkpoints") == ["step-3", "step-4", "step-5"]
    assert names(tmp_path / "exports") == ["step-3", "step-5"]
    assert all(holds_weights_of(tmp_path, tiny_model, step) for step in (3, 5))
    assert names(tmp_path / "checkpoints") == ["step-4", "step-5"]
    assert "exports: 2 in" in (tmp_path / "log.txt").read_text()


def test_resumed_run_repeats_stopped_export(tiny_model, tmp_path):
    """Exports of later steps, of the branch that it leaves, are set aside."""
    with (
        pytest.raises(RunInterruptedError),
        Run.open(config_of(tmp_path, tiny_model, num_steps=2)) as run,
    ):
        advance(run, tiny_model, 2)
        raise RunInterruptedError("stop")
    assert not (tmp_path / "exports" / "step-2").exists()
    (tmp_path / "exports" / "step-2.partial" / "model").mkdir(parents=True, exist_ok=True)
    (tmp_path / "exports" / "step-4").mkdir()
    (tmp_path / "exports" / "step-4-fp8").mkdir()  # a user's own
    with Run.open(config_of(tmp_path, tiny_model, num_steps=2)):
        pass
    aside, made, users = names(tmp_path / "exports")
    assert aside.startswith("aside-step-4-") and (made, users) == ("step-2", "step-4-fp8")
    assert holds_weights_of(tmp_path, tiny_model, 2)


def test_failed_export_does_not_end_the_run(tiny_model, tmp_path):
    config = config_of(tmp_path, tmp_path / "no-such-model", num_steps=2)
    with Run.open(config) as run:
        # as a child leaves it that was killed
        (tmp_path / "exports" / "step-2.partial").mkdir(parents=True)
        advance(run, tiny_model, 2)
    log = (tmp_path / "log.txt").read_text()
    assert "the export of step 2 failed, training continues: exit code 3" in log
    assert "exports: 0 in" in log and "1 failed" in log
    assert "no such folder" in (tmp_path / "logs" / "export-step-2.log").read_text()
    assert names(tmp_path / "exports") == []


@pytest.mark.fault
@pytest.mark.parametrize("waits", [True, False])
def test_export_that_hangs_does_not_keep_the_run(tiny_model, tmp_path, monkeypatch, waits):
    monkeypatch.setattr(background_export, "LAST_S", 0.3)
    monkeypatch.setattr(background_export, "END_S", 0.3)
    run, shown = write_run(tmp_path / "run", tiny_model, 2), []
    with BackgroundExports(run, shown.append) as exports:
        exports.start(run / "checkpoints" / "step-2", 2)
        (child,) = (one for one in psutil.Process().children() if "megadapo.cli" in one.cmdline())
        child.suspend()  # it cannot answer SIGTERM either
        start = time.monotonic()
        if waits:
            exports.wait()
            assert "the export of step 2 failed, training continues: it did not end" in shown[0]
    assert time.monotonic() - start < 10 and not child.is_running()


DRIVER = """
import sys, time
from pathlib import Path
from megadapo.run.export.background_export import BackgroundExports

exports = BackgroundExports(Path(sys.argv[1]), print)
exports.start(Path(sys.argv[1]) / "checkpoints" / "step-2", 2)
print("started", flush=True)
time.sleep(60)
"""


@pytest.mark.fault
def test_killed_run_ends_its_export(tiny_model, tmp_path):
    run = write_run(tmp_path / "run", tiny_model, 2)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, run], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout.readline() == "started\n"
    children = psutil.Process(driver.pid).children()
    (child,) = (one for one in children if "megadapo.cli" in one.cmdline())
    child.suspend()  # so that it cannot end by itself
    driver.kill()
    driver.communicate()
    _, alive = psutil.wait_procs([child], timeout=20)
    assert not alive
    assert names(run / "exports") == []


def test_export_is_off_by_default(tiny_model, tmp_path):
    with Run.open(config_of(tmp_path, tiny_model, num_steps=2, export_every=0)) as run:
        advance(run, tiny_model, 2)
    assert not (tmp_path / "exports").exists()
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["driver.log"]


@pytest.mark.parametrize("export_every", [-2, 1, 3])
def test_only_checkpoints_are_exported(tiny_model, tmp_path, export_every):
    with pytest.raises(ConfigError, match=r"checkpoint\.export_every = "):
        config_of(tmp_path, tiny_model, num_steps=2, export_every=export_every)
