"""An exported model equals the run's policy: engines that load it score the same."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import run as run_command

import numpy as np
import pytest
from transformers import AutoTokenizer

from megadapo.config import load_config
from megadapo.data.prompts import load_prompts
from megadapo.observe.metrics.records import read_evaluations
from megadapo.observe.rollouts.files import read_rollouts, rollouts_path
from megadapo.rewards.scorer import Scorer
from megadapo.rollout.sampling.evaluation import Evaluation, EvaluationInProgress, HeldOut
from tests.support import REPOSITORY
from tests.support.rollout.engine_checks import (
    Reference,
    ask,
    make_requests,
    running_engines,
    worst_error,
)
from tests.support.runs.whole_runs import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SPLIT = (
    "--trainer.tensor_parallel=2",
    "--trainer.pipeline_parallel=2",
    "--trainer.sequence_parallel=true",
    "--checkpoint.export_every=2",
)


def score(run_folder: Path, model: Path, log_folder: Path) -> tuple[Evaluation, float]:
    """The run's own evaluation on engines that vLLM loads from `model`; and how far log-probs of
    what they say are from transformers'."""
    config = load_config(run_folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    problems, _ = load_prompts(
        config.data.held_out,
        check_gold=config.reward.check_gold,
        tokenizer=tokenizer,
        max_prompt_tokens=config.data.max_prompt_tokens,
        overlong_prompts=config.data.overlong_prompts,
    )
    settings = config.rollout.model_dump(include={"max_num_seqs", "num_threads"})
    with running_engines(model, log_folder, **settings) as engines:
        with Scorer(config.reward) as scorer:
            held_out = HeldOut.create(
                problems,
                config.evaluation,
                tokenizer=tokenizer,
                max_response_tokens=config.rollout.max_response_tokens,
                seed=config.run.seed,
            )
            with EvaluationInProgress(engines, scorer, held_out) as under_way:
                evaluation = under_way.finish()
        groups = make_requests(4, 2)
        return evaluation, worst_error(Reference(model), groups, ask(engines, groups))


def is_what_the_run_scored(run_folder: Path, step: int, found: Evaluation) -> bool:
    recorded = {one.step: one for one in read_evaluations(run_folder)}[step]
    return (recorded.accuracy, recorded.standard_error, recorded.response_length) == (
        found.accuracy,
        found.standard_error,
        found.response_length_mean,
    )


def test_exported_checkpoint_scores_the_next_step(uninterrupted: Path, tmp_path: Path) -> None:
    """Weights of the step before or after would give other responses."""
    words = ("export", uninterrupted, tmp_path / "model", "--step", "2")
    result = run_command(
        [sys.executable, "-m", "megadapo.cli", *map(str, words)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    reference = Reference(tmp_path / "model")
    errors = {step: engine_error(reference, uninterrupted, step) for step in (2, 3, 4)}
    assert errors[3] < 1e-4
    assert min(errors[2], errors[4]) > 1e-3
    accuracy = {one.step: one for one in read_evaluations(uninterrupted)}[2].accuracy
    assert f"{accuracy:.4f}" in (tmp_path / "model" / "README.md").read_text()


def engine_error(reference: Reference, folder: Path, step: int) -> float:
    """Return the largest difference from the saved log-probs of this step."""
    return max(
        np.abs(
            saved.response.logprobs
            - reference.logprobs(group.prompt_ids, saved.response.token_ids.tolist())
        ).max()
        for group in read_rollouts(rollouts_path(folder, step))
        for saved in group.responses
    )


@pytest.mark.full
def test_split_run_exports_its_model(tmp_path: Path) -> None:
    """TP 2 x PP 2, exported beside the run: the same seeds give the same responses, and so the
    same score, only from the same weights."""
    folder = tmp_path / "split"
    result = run(folder, *SPLIT, num_steps=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "exports: 1 in" in (folder / "log.txt").read_text()
    evaluation, error = score(folder, folder / "exports" / "step-2", tmp_path)
    assert is_what_the_run_scored(folder, 2, evaluation)
    assert error < 1e-4
