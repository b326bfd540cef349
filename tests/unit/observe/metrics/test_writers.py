"""Writers are checked before anything starts; the packages themselves are not needed here."""

import sys
import threading
import time
from types import SimpleNamespace

import pytest

from megadapo.cli import run_command
from megadapo.errors import ConfigError
from megadapo.observe.config import ObserveConfig
from megadapo.observe.metrics.records import MetricsLog, read_metrics
from megadapo.observe.metrics.writers import missing_packages, open_writer
from tests.support import REPOSITORY
from tests.support.processes.running import run_python


def test_a_writer_that_is_not_installed_is_named_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "wandb" not in p])
    with pytest.raises(ConfigError, match=r"observe\.writers.*pip install wandb"):
        run_command(
            [
                *("train", "configs/quickstart.toml", "--dry-run"),
                f"--run.folder={tmp_path / 'run'}",
                '--observe.writers=["tensorboard", "wandb"]',
            ]
        )
    assert not (tmp_path / "run").exists()


def test_a_folder_of_that_name_is_no_package(tmp_path, monkeypatch):
    """wandb keeps its files in ./wandb, which Python takes for a package without modules."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert missing_packages(("tensorboard", "wandb")) == ["wandb"]
    (tmp_path / "wandb" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert missing_packages(("tensorboard", "wandb")) == []


def test_a_disk_that_refuses_the_events_does_not_end_a_run(tmp_path, caplog):
    (tmp_path / "tensorboard").touch()
    writer = open_writer("tensorboard", tmp_path, {}, None)
    writer.write({"reward/mean": 1.0}, 1)
    writer.close()
    assert "tensorboard has no metrics" in caplog.text


class WandbError(Exception):
    pass


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package, whose runs fail or hang as told."""

    def log(values, step):
        if stand_in.fails:
            raise WandbError("the service is gone")
        stand_in.steps.append(step)

    stand_in = SimpleNamespace(fails=False, steps=[], finish=lambda: None)
    stand_in.errors = SimpleNamespace(Error=WandbError)
    stand_in.Settings = dict
    run = SimpleNamespace(log=log, finish=lambda: stand_in.finish())
    stand_in.init = lambda **options: run
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    return stand_in


def test_wandb_that_refuses_metrics_does_not_end_a_run(tmp_path, caplog, wandb):
    with MetricsLog(tmp_path, writers=("wandb",)) as log:
        log.open_writers()
        for step in (1, 2, 3):
            wandb.fails = step == 2
            log.record({"step": step})
    assert wandb.steps == [1]
    assert "none are sent from step 2 on: the service is gone" in caplog.text
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]


def test_writer_that_does_not_close_is_abandoned(tmp_path, caplog, wandb, monkeypatch):
    """With the network down, wandb waits for its upload without end."""
    monkeypatch.setattr("megadapo.observe.metrics.writers.CLOSE_S", 0.2)
    released = threading.Event()
    wandb.finish = released.wait
    start = time.monotonic()
    with MetricsLog(tmp_path, writers=("wandb",)) as log:
        log.open_writers()
    assert time.monotonic() - start < 5
    assert "WandbWriter did not send its last metrics in 0.2 s" in caplog.text
    released.set()


@pytest.mark.parametrize(
    ("key", "value"),
    [("writers", value) for value in (["csv"], "tensorboard", ["tensorboard", "tensorboard"])]
    + [("saved_groups", value) for value in (-1, "some", 1.5, True)],
)
def test_impossible_values_are_config_errors(key, value):
    with pytest.raises(ConfigError, match=rf"observe\.{key}"):
        ObserveConfig(**{key: value})


def test_importing_writers_imports_none_of_them():
    program = "import megadapo.observe.metrics.records, sys\n"
    program += "assert not {'wandb', 'tensorboard', 'torch'} & set(sys.modules)"
    run_python(program)
