"""Whole runs that train on what earlier weights sampled, also with a damaged update."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megadapo.errors import OracleError
from megadapo.observe.rollouts.files import read_rollouts, rollouts_path
from megadapo.observe.rollouts.saved_group import SavedResponse
from tests.support.runs.whole_runs import (
    NUM_STEPS,
    assert_same_metrics,
    command,
    injecting,
    marked,
    metrics,
    run,
    run_killed_at,
    start_command,
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

PARTIAL = (
    "--sampling.mode=partial",
    "--sampling.max_staleness=2",
    "--observe.saved_groups=all",
    # slots for two groups: if all run at once, all can end while a step waits for the oldest
    "--rollout.max_num_seqs=16",
)
AHEAD = (
    "--sampling.mode=one_step_off",
    "--sampling.max_staleness=1",
    "--cluster.placement=separate",
    "--observe.saved_groups=all",
)
ASYNC = (
    "--sampling.mode=async",
    "--sampling.max_staleness=2",
    "--cluster.placement=separate",
    "--evaluation.every=0",
)


def trained_responses(folder: Path, step: int) -> Iterator[SavedResponse]:
    for group in read_rollouts(rollouts_path(folder, step)):
        if group.disposition == "trained":
            yield from group.responses


def check_numbers(folder: Path, *, max_staleness: int) -> None:
    """Recompute the staleness metrics; no token may be older than the bound."""
    records = metrics(folder)
    assert [record["step"] for record in records] == list(range(1, NUM_STEPS + 1))
    for record in records:
        responses = list(trained_responses(folder, record["step"]))
        versions = np.concatenate([saved.response.policy_versions for saved in responses])
        staleness = record["step"] - 1 - versions
        assert record["groups/kept"] == 8 and len(responses) == 64
        assert record["tokens/trained"] == len(staleness)
        assert staleness.min() >= 0 and staleness.max() <= max_staleness
        assert record["staleness/token_share"] == pytest.approx((staleness > 0).mean())
        assert record["staleness/mean"] == pytest.approx(staleness.mean())
        assert record["staleness/max"] == staleness.max()
        assert record["policy/ratio_first_max_error"] == 0.0
        assert record["policy/skipped_updates"] == 0
        for name in ("parity/probe_abs_mean", "parity/probe_abs_max"):
            assert (record[name] is not None) == (staleness > 0).any(), name
        assert (record["parity/probe_abs_max"] or 0.0) < 1e-4
        assert not (staleness == 0).any() or record["parity/logprob_abs_max"] < 1e-4


def test_partial_rollouts_mix_policy_versions(tmp_path):
    folder = tmp_path / "partial"
    run(folder, *PARTIAL)
    check_numbers(folder, max_staleness=2)
    records = metrics(folder)
    assert records[0]["staleness/token_share"] == 0.0
    assert all(record["groups/carried"] > 0 for record in records)
    mixed = 0
    for step in range(2, NUM_STEPS + 1):
        for response in trained_responses(folder, step):
            steps_up = np.diff(response.response.policy_versions)
            assert (steps_up >= 0).all()
            mixed += bool(steps_up.any())
    assert mixed > 0, "no answer was continued with other weights"


def test_one_step_off_keeps_its_waiting_batch_after_a_kill(tmp_path):
    folder, killed = tmp_path / "ahead", tmp_path / "killed"
    run(folder, *AHEAD)
    check_numbers(folder, max_staleness=1)
    assert [record["staleness/mean"] for record in metrics(folder)] == [0.0, 1.0, 1.0, 1.0]

    run_killed_at(3, killed, *AHEAD)
    assert "resuming after step 2" in run(killed, *AHEAD).stdout
    assert_same_metrics(killed, folder)


@pytest.mark.fault
@pytest.mark.parametrize("mode", [AHEAD, PARTIAL, ASYNC], ids=["one_step_off", "partial", "async"])
def test_damaged_update_stops_the_run(tmp_path, mode):
    """If all tokens of a step are stale, only the probe can see what the engines have."""
    folder = tmp_path / "damaged"
    environment = marked(folder) | injecting(DAMAGE_UPDATE="2")
    process = start_command(command(folder, *mode), environment)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == OracleError.exit_code, output
    first, second = metrics(folder)
    assert first["parity/logprob_abs_max"] < 1e-4 and first["parity/probe_abs_max"] is None
    assert second["parity/probe_abs_mean"] > 1e-4
    if mode == AHEAD:
        assert second["parity/logprob_abs_max"] is None
        assert "step 2: parity/probe_abs_mean" in " ".join(output.split())
