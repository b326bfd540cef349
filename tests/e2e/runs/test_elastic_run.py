"""A run whose engines join and leave learns the same as one that keeps its engine."""

import json
from pathlib import Path

import pytest

from tests.support.runs.whole_runs import (
    assert_same_metrics,
    command,
    marked,
    megadapo,
    metrics,
    run,
    start_command,
    wait_for_step,
    wait_until,
)

pytestmark = pytest.mark.full

NUM_STEPS = 90
"""Number of steps that take longer than the start of an engine beside them."""
OPTIONS = ["--cluster.placement=separate", "--evaluation.every=45", "--checkpoint.every=45"]


def states(folder: Path) -> dict[int, str]:
    """Return the states of a run's engines by number, as the command lists them."""
    answer = json.loads(megadapo("engines", folder, "--json").stdout)
    report = answer["report"] or {"engines": []}
    return {one["number"]: one["state"] for one in report["engines"]}


def test_run_with_changing_engines_has_same_metrics(tmp_path):
    """The engine that the run began with leaves, so nothing may depend on it."""
    kept, changing = tmp_path / "kept", tmp_path / "changing"
    run(kept, *OPTIONS, num_steps=NUM_STEPS)
    words = command(changing, *OPTIONS, num_steps=NUM_STEPS)
    process = start_command(words, marked(changing))
    wait_for_step(process, changing, 1)
    assert "wanted: 2, before: 1" in megadapo("engines", changing, "--add", 1).stdout
    wait_until(lambda: states(changing) == {0: "serving", 1: "serving"}, process)
    joined_at = len(metrics(changing))
    megadapo("engines", changing, "--remove-engine", 0)
    wait_until(lambda: states(changing) == {1: "serving"}, process)
    left_at = len(metrics(changing))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert joined_at <= left_at < NUM_STEPS
    assert_same_metrics(changing, kept)
    log = (changing / "log.txt").read_text()
    for line in ("engine 1 joins on", "engine 0 leaves within 600 s", "engine 0 has left"):
        assert line in log
    # the recipe's number counts without the request, and fewer engines are started with it
    assert json.loads((changing / "engines.json").read_text())["num_engines"] == 1
