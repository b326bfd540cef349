"""An exported model equals the run's policy: engines that load it score the same."""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from megadapo.config import load_config
from megadapo.data.prompts import load_prompts
from megadapo.observe.metrics.records import read_evaluations
from megadapo.observe.rollouts.files import read_rollouts, rollouts_path
from megadapo.rewards.scorer import Scorer
from megadapo.rollout.sampling.evaluation import Evaluation, EvaluationInProgress, HeldOutRequests
from tests.support.rollout.engine_checks import (
    Reference,
    ask,
    make_requests,
    running_engines,
    worst_error,
)
from tests.support.runs.whole_runs import megadapo, metrics, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LAYOUTS = {
    "tp2-pp2": ("--trainer.pipeline_parallel=2", "--rollout.num_engines=2"),
    # a stage that the plan, the slots or vLLM do not know of gets no trained weights
    "tp2-cp2": ("--trainer.context_parallel=2", "--rollout.pipeline_parallel=2"),
}


def score(run_folder: Path, model: Path, log_folder: Path) -> tuple[Evaluation, float]:
    """The run's own evaluation on engines that vLLM loads from `model`; and how far log-probs of
    what they say are from transformers'."""
    config = load_config(run_folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    problems = load_prompts(
        config.data.held_out,
        check_gold=config.reward.check_gold,
        tokenizer=tokenizer,
        max_prompt_tokens=config.data.max_prompt_tokens,
        overlong_prompts=config.data.overlong_prompts,
    )
    settings = config.rollout.model_dump(include={"max_num_seqs", "num_threads"})
    with running_engines(model, log_folder, **settings) as engines:
        with Scorer(config.reward) as scorer:
            held_out = HeldOutRequests.create(
                {"": problems},
                config.evaluation,
                tokenizer=tokenizer,
                max_response_tokens=config.rollout.max_response_tokens,
                seed=config.run.seed,
            )
            with EvaluationInProgress(engines, scorer, held_out) as under_way:
                evaluation = under_way.finish()
        groups = make_requests(4, 2)
        return evaluation, worst_error(Reference(model), groups, ask(engines, groups))


def test_exported_checkpoint_scores_the_next_step(uninterrupted, tmp_path):
    megadapo("export", uninterrupted, tmp_path / "model", "--step", "2")
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
def test_split_run_learns_the_same_and_exports_its_model(uninterrupted, tmp_path, layout):
    """The first step's samples come from equal weights and seeds, so they are the same responses;
    its loss may differ by rounding only. The same seeds give the same responses, and so the same
    score, only from equal weights, so the export has the weights of the run."""
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
    megadapo("export", folder, tmp_path / "model")
    evaluation, error = score(folder, tmp_path / "model", tmp_path)
    (recorded,) = (one for one in read_evaluations(folder) if one.step == 2)
    assert (recorded.accuracy, recorded.standard_error, recorded.response_length) == (
        *(evaluation.accuracy, evaluation.standard_error, evaluation.response_length_mean),
    )
    assert error < 1e-4
