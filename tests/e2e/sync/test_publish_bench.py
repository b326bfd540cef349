"""A small run of `benchmarks/weights.py`."""

import json
import subprocess
import sys

import pytest

from tests.support import REPOSITORY


@pytest.mark.full
def test_weights_benchmark_sends_the_engines_shard_only(tmp_path):
    sizes = {"layers": "2", "hidden": "128", "vocab": "512", "repeat": "1", "bucket-mib": "0.25"}
    words = [word for name, value in sizes.items() for word in (f"--{name}", value)]
    script = str(REPOSITORY / "benchmarks" / "weights.py")
    command = [sys.executable, script, *words, "--json", str(tmp_path / "bench.json")]
    shown = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    record = json.loads((tmp_path / "bench.json").read_text())
    ours, gathered = record["measurements"]
    num_parameters = (
        2 * 512 * 128
        + 128
        + 2 * (2 * 128 + 2 * 128 * 128 + 2 * 128 * 128 + 3 * 128 + 3 * 512 * 128)
    )
    assert ours["bytes_moved"] == ours["bytes_received"] == 2 * num_parameters
    assert gathered["bytes_moved"] == 2 * num_parameters
    assert record["floor_seconds"] > 0
    assert "shard to shard (megadapo)" in shown
