"""Would catch: a writer that is asked for, is not installed, and is noticed after the first step or
never; the packages themselves are not needed here, and training needs none of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megadapo.cli import run_command
from megadapo.errors import ConfigError
from megadapo.observe.config import ObserveConfig
from megadapo.observe.metrics.writers import missing_packages, open_writer


def package(folder: Path, name: str, text: str = "") -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)


def test_a_writer_that_is_not_installed_is_named_before_anything_starts(tmp_path, monkeypatch):
    repository = Path(__file__).parents[4]
    monkeypatch.chdir(repository)
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
    (tmp_path / "mlflow").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert missing_packages(("tensorboard", "mlflow")) == ["mlflow"]
    (tmp_path / "mlflow" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert missing_packages(("tensorboard", "mlflow")) == []


def test_a_disk_that_refuses_the_events_does_not_end_a_run(tmp_path, caplog):
    """A copy of metrics.jsonl must not cost a step."""
    (tmp_path / "tensorboard").touch()
    writer = open_writer("tensorboard", tmp_path, {}, None)
    writer.write({"reward/mean": 1.0}, 1)
    writer.close()
    assert "tensorboard has no metrics" in caplog.text


@pytest.mark.parametrize("writers", [["csv"], "tensorboard", ["tensorboard", "tensorboard"]])
def test_writers_that_make_no_sense_are_config_errors(writers):
    with pytest.raises(ConfigError, match=r"observe\.writers"):
        ObserveConfig(writers=writers)


@pytest.mark.parametrize("saved", [-1, "some", 1.5, True])
def test_groups_that_cannot_be_counted_are_config_errors(saved):
    with pytest.raises(ConfigError, match=r"observe\.saved_groups"):
        ObserveConfig(saved_groups=saved)


def test_importing_writers_imports_none_of_them():
    """Catches seconds of imports, and a failure of a broken package that no run uses."""
    code = (
        "import sys, megadapo.observe.metrics.records\n"
        "loaded = {'wandb', 'mlflow', 'tensorboard', 'torch'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
