"""A small recipe that is complete."""

from pathlib import Path

import pytest

RECIPE = """
[run]
folder = "runs/x"
num_steps = 3
[model]
path = "models/base"
[data]
train = "arithmetic:train:64"
[trainer.optimizer]
warmup_steps = 2
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path
