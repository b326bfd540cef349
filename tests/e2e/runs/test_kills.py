"""A killed run resumes by itself, has the same numbers, and leaves no process or file behind.

MEGADAPO_KILLS sets the number of random kills in each mode: 50, which in "async" are 100 schedules.
Runs with an environment, which check that no action is done twice, have a fifth of them.
tools/kills.py spreads them over several sittings.
"""

import os
import subprocess
import sys

import pytest

from megadapo.observe.metrics.records import read_evaluations
from tests.support import REPOSITORY
from tests.support.runs.whole_runs import NUM_STEPS, assert_same_metrics, descendants, start

pytestmark = [pytest.mark.fault, pytest.mark.full]

NUM_KILLS = int(os.environ.get("MEGADAPO_KILLS", "50"))
POINTS = {
    "sync and journal": (
        "megadapo.weights.sync.sender:WeightSender.fill",
        "megadapo.rollout.journal.record_log:RecordLog.append",
    ),
    "save": (
        "megadapo.trainer.checkpoint.checkpoint:write_snapshot",
        "megadapo.trainer.checkpoint.checkpoint:_check_live",
        "megadapo.trainer.trainer:complete_save",
        "megadapo.run.state.checkpoint:_check_present",
        "megadapo.run.state.checkpoint:_digest",
        "megadapo.run.state.checkpoint:sync_path",
        "megadapo.run.state.checkpoint:_delete",
    ),
    "record": (
        "megadapo.observe.metrics.records:append_line",
        "megadapo.run.run:Run.complete",
    ),
}
"""Functions before which a rank or the driver is killed. A save is copied, written, reported, gets
its state and its manifest, is renamed and pruned."""


@pytest.mark.timeout(18_000)
@pytest.mark.parametrize("mode", ["sync", "async", "replay", "state", "once"])
def test_random_kills_change_no_metric(tmp_path, mode):
    how = {
        "sync": ("--kills", NUM_KILLS),
        "async": ("--kills", NUM_KILLS, "--mode", "async", "--changes", 2 * NUM_KILLS),
    }
    words = (tmp_path, *how.get(mode, ("--kills", NUM_KILLS // 5, "--environment", mode)))
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tools" / "kills.py", *map(str, words)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", POINTS)
def test_kill_at_each_point_of_a_step_changes_no_metric(uninterrupted, tmp_path, part):
    folder, points = tmp_path / "killed", tmp_path / "points"
    points.mkdir()
    for point in POINTS[part]:
        (points / point).touch()
    process = start(folder, "--restarts=20", "--checkpoint.every=1", points=points)
    output, _ = process.communicate(timeout=1100)
    assert process.returncode == 0, output
    assert list(points.iterdir()) == [], output
    assert_same_metrics(folder, uninterrupted)
    assert read_evaluations(folder) == read_evaluations(uninterrupted)
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == [f"step-{NUM_STEPS - 1}", f"step-{NUM_STEPS}"]
    assert descendants(folder) == []
