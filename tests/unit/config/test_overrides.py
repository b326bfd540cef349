"""Overrides: the value and the key that each one sets."""

from pathlib import Path

import pytest

from megadapo.config import load_config
from tests.support.runs.recipes import refused


def test_overrides_are_toml_values_or_bare_text(recipe: Path) -> None:
    config = load_config(
        recipe,
        [
            "--run.seed=7",
            "--run.resume=never",
            "run.folder=runs/a = b",
            "--algorithm.objective.dual_clip=10",
            "--evaluation.max_problems=none",
            '--data.held_out="arithmetic:held_out:8"',
            "--trainer.optimizer.lr=2e-6",
            "--trainer.sequence_parallel=true",
            "--trainer.tensor_parallel=2",
        ],
    )
    assert config.run.seed == 7
    assert config.run.resume == "never"
    assert config.run.folder == Path("runs/a = b")
    assert config.algorithm.objective.dual_clip == 10.0
    assert config.evaluation.max_problems is None
    assert config.data.held_out == "arithmetic:held_out:8"
    assert config.trainer.optimizer.lr == 2e-6
    assert config.trainer.sequence_parallel is True


def test_later_override_wins(recipe: Path) -> None:
    assert load_config(recipe, ["--run.seed=1", "--run.seed=2"]).run.seed == 2


@pytest.mark.parametrize("text", ["--run.seed", "--seed=3", "--=3", "--run.=3", "--.seed=3", ""])
def test_malformed_override_is_refused(recipe: Path, text: str) -> None:
    assert "write --section.key=value" in refused(recipe, text)


def test_override_cannot_smuggle_in_a_second_key(recipe: Path) -> None:
    """A value with a line break must not become two assignments."""
    config = load_config(recipe, ['--run.resume="a"\nseed = 9'])
    assert config.run.resume == '"a"\nseed = 9'
    assert config.run.seed == 0


def test_override_through_a_value_is_refused(recipe: Path) -> None:
    assert "run.seed is a value" in refused(recipe, "--run.seed=3", "--run.seed.x=1")


@pytest.mark.parametrize("text", ["7", "1e3", "a b", "2020-01-01", "{a = 1}"])
def test_override_for_a_text_field_keeps_its_text(recipe: Path, text: str) -> None:
    """A folder called 7 must not be refused because 7 is also a number."""
    config = load_config(recipe, [f"--run.folder={text}", f"--run.resume={text}"])
    assert (config.run.folder, config.run.resume) == (Path(text), text)


def test_override_of_a_table_takes_its_place(recipe: Path) -> None:
    config = load_config(recipe, ["--trainer.optimizer={lr = 1e-3, warmup_steps = 1}"])
    assert (config.trainer.optimizer.lr, config.trainer.optimizer.warmup_steps) == (1e-3, 1)
