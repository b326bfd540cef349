"""The report of `megadapo weights plan`."""

import json
import re

import pytest

from megadapo.cli import run_command
from megadapo.errors import DataError
from tests.support.models.large import QWEN_32B

RECIPE = """
[run]
folder = "runs/x"
num_steps = 1
[model]
path = "{path}"
dtype = "bfloat16"
[data]
train = "data.parquet"
[rollout]
num_engines = 8
{engine}
tensor_parallel = 8
[trainer]
tensor_parallel = 8
pipeline_parallel = 4
data_parallel = 16
{split}
[trainer.optimizer]
warmup_steps = 1
[cluster]
placement = "{placement}"
"""


def plan(tmp_path, *words, placement="separate", model=True, split="", engine=""):
    if model:
        (tmp_path / "config.json").write_text(json.dumps(QWEN_32B))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(path=tmp_path, placement=placement, split=split, engine=engine))
    return run_command(["weights", "plan", str(recipe), *words])


def test_report_counts_bytes_of_every_engine(tmp_path, capsys):
    plan(tmp_path)
    text = capsys.readouterr().out
    assert "512 trainer ranks to 8 receiver(s) of TP 8" in text
    # 32.76 G parameters of 2 bytes, 8 times, and every rank's own copy of the replicated norms
    assert "bytes moved           488.3 GiB, 488.3 GiB of them between nodes" in text
    assert "(1.000 x)" in text


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_report_shows_memory_of_update(tmp_path, capsys, placement):
    """Catches staged slices left out: two buckets of 64 MiB hold everything."""
    plan(tmp_path, placement=placement)
    text = capsys.readouterr().out
    assert "512 trainer ranks to 8 receiver(s) of TP 8" in text
    assert "0 B of them between nodes" not in text
    trainer, engine = re.findall(r"memory, (?:trainer|engine) rank +([\d.]+) MiB at most", text)
    assert 100 < float(trainer) <= 128 and 50 < float(engine) <= 64


def test_report_uses_recipe_split(tmp_path, capsys):
    plan(tmp_path, split="virtual_pipeline = 2", engine="pipeline_parallel = 2")
    text = capsys.readouterr().out
    assert "512 trainer ranks to 8 receiver(s) of TP 8 x PP 2" in text
    assert "(1.000 x)" in text


def test_missing_model_is_named(tmp_path):
    with pytest.raises(DataError, match="--model-config"):
        plan(tmp_path, model=False)
