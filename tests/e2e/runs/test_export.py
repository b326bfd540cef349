"""An exported model is the run's policy, and a split run learns the same."""

from pathlib import Path

import numpy as np
import pytest

from megadapo.cli import run_command
from megadapo.observe.metrics.records import read_evaluations
from megadapo.observe.rollouts.files import read_rollouts, rollouts_path
from tests.support import REPOSITORY
from tests.support.rollout.engine_checks import Reference
from tests.support.runs.whole_runs import metrics, run

pytestmark = pytest.mark.timeout(600)

LAYOUTS = {
    "tp2-pp2": ("--trainer.pipeline_parallel=2", "--rollout.num_engines=2"),
    # a stage that the plan, the slots or vLLM do not know of gets no trained weights
    "tp2-cp2": ("--trainer.context_parallel=2", "--rollout.pipeline_parallel=2"),
}


def test_exported_checkpoint_scores_the_next_step(uninterrupted, tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    run_command(["export", str(uninterrupted), str(tmp_path / "model"), "--step", "2"])
    reference = Reference(tmp_path / "model")
    errors = {step: engine_error(reference, uninterrupted, step) for step in (2, 3, 4)}
    assert errors[3] < 1e-4
    assert min(errors[2], errors[4]) > 1e-3
    accuracy = {one.step: one for one in read_evaluations(uninterrupted)}[2].accuracy
    assert f"{accuracy:.4f}" in (tmp_path / "model" / "README.md").read_text()


def engine_error(reference: Reference, folder: Path, step: int) -> float:
    return max(
        np.abs(
            saved.response.logprobs
            - reference.logprobs(group.prompt_ids, saved.response.token_ids.tolist())
        ).max()
        for group in read_rollouts(rollouts_path(folder, step))
        for saved in group.responses
    )


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_split_run_learns_the_same(uninterrupted, tmp_path, layout):
    """The first step has the same responses; its loss may differ by rounding only."""
    folder = tmp_path / "split"
    run(
        folder,
        *LAYOUTS[layout],
        "--trainer.tensor_parallel=2",
        "--trainer.sequence_parallel=true",
        "--rollout.num_threads=1",
        # half of the quickstart's, as the warm-up of so short a run is half of the other run's
        "--trainer.optimizer.lr=1.5e-5",
        num_steps=2,
    )
    (split, then), whole = metrics(folder), metrics(uninterrupted)[0]
    assert then["parity/logprob_abs_max"] < 1e-4, "engines do not have what was trained"
    for name in ("policy/lr", "response_length/mean", "accuracy/mean"):
        assert split[name] == whole[name], name
    assert split["policy/loss"] == pytest.approx(whole["policy/loss"], rel=1e-4, abs=1e-6)
    assert split["policy/entropy"] == pytest.approx(whole["policy/entropy"], rel=1e-5)
    assert then["policy/ratio_first_max_error"] == split["policy/ratio_first_max_error"] == 0.0
