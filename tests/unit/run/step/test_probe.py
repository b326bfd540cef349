"""The parity probe: the choice of stale tokens, and the comparison with the trainer's log-probs."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megadapo.data.batch import PackedBatch
from megadapo.errors import OracleError
from megadapo.observe.metrics.names import METRIC_NAMES
from megadapo.observe.oracles import OracleConfig, check_oracles
from megadapo.rollout.types import MAX_ONE_PASS, ScoreRequest
from megadapo.run.processes import GpuSharing
from megadapo.run.step.probe import MAX_REQUESTS, ParityProbe, compare, probed_sequences
from megadapo.run.step.training import StepTrainer
from megadapo.trainer.types import RecordedTokens, UpdateRequest, UpdateResult
from tests.support.runs.runs_alone import config_of
from tests.support.runs.step_results import UPDATE
from tests.support.trainer.batches import RAGGED, stale_batch

CONFIG = config_of()
PRESENT = 7
ORACLES = OracleConfig(logprob_abs_mean=1e-5, logprob_abs_max=1e-3)


def choose(batch: PackedBatch, changes: dict[str, Any] | None = None):
    return probed_sequences(batch, config_of(changes=changes), policy_version=PRESENT)


def tokens_of(batch: PackedBatch, sequence: int) -> slice:
    return slice(*batch.cu_seqlens[sequence : sequence + 2].tolist())


def test_stale_tokens_with_a_loss_are_chosen_in_training_order():
    """Tokens without a loss have no log-prob of the trainer; fresh ones are compared anyway."""
    batch = stale_batch([9, 40, 30, 35, 8, 2, 50, 60, 9, 70])
    batch.loss_weights[tokens_of(batch, 2)] = 0.0
    found = choose(batch)
    # 0, 4 and 8 are fresh, 2 has no loss, and the one response token of 5 is its last
    assert list(found) == [1, 3, 6, 7]
    for sequence, request in found.items():
        own, positions = tokens_of(batch, sequence), request.positions
        is_stale = np.isin(batch.policy_versions[own], [PRESENT - 1, PRESENT - 3])
        is_stale[-1] = False
        assert positions.tolist() == np.flatnonzero(is_stale).tolist()
        ids = batch.tokens[own][: positions[-1] + 1]
        assert request.token_ids == tuple(ids) and request.in_one_pass


def test_groups_member_with_most_stale_tokens_is_chosen():
    """Four members of one group would be responses to one prompt only."""
    batch = replace(stale_batch([9, 40, 60, 35, 8, 20, 30, 9]), group_sizes=np.array([4, 4]))
    assert list(choose(batch)) == [2, 6]


@pytest.mark.parametrize(
    ("lengths", "changes"),
    [
        ([60, 1500, 50], {"rollout.temperature": 0.7}),
        ([60, 6000, 50], {"rollout.temperature": 1.0}),
    ],
)
def test_few_tokens_are_chosen_if_each_is_a_request(lengths, changes):
    """One pass gives log-probs at temperature 1 only, and of a bounded number of tokens."""
    first = choose(stale_batch(lengths), changes)[1]
    positions, num_prompt = first.positions, lengths[1] // 3
    assert not first.in_one_pass
    assert len(positions) == MAX_REQUESTS and (np.diff(positions) > 0).all()
    assert num_prompt <= positions[0] and positions[-1] + 1 == len(first.token_ids)
    assert positions[-1] < max(MAX_ONE_PASS, num_prompt + 256)


def test_nothing_is_chosen_where_trainer_and_engine_may_differ():
    batch, importance = stale_batch(RAGGED), "algorithm.importance.stale_logprobs"
    assert len(choose(batch)) == 4
    partial = {"sampling.mode": "partial", "sampling.max_staleness": 1}
    assert choose(batch, {importance: "none", **partial}) == {}
    assert choose(batch, {"trainer.router_replay": True}) == {}
    fresh = replace(batch, policy_versions=np.minimum(batch.policy_versions, 0) + PRESENT)
    assert choose(fresh) == {}


def test_engine_that_differs_most_is_reported():
    """A fault of one engine of many must not vanish in a mean over all."""
    known = [np.array([-1.0, np.nan]), np.array([-2.0])]
    equal, wrong = [k + 1e-7 for k in known], [known[0], known[1] - 0.5]
    found = compare(known, [equal, equal, wrong])
    assert found["parity/probe_abs_mean"] == pytest.approx(0.25)
    assert found["parity/probe_abs_max"] == pytest.approx(0.5)
    broken = compare(known, [equal, [known[0], np.array([np.nan])]])
    assert all(math.isnan(value) for value in broken.values() if value is not None)
    for nothing in (compare(known, []), compare([np.array([np.nan])], [[np.zeros(1)]])):
        assert list(nothing.values()) == [None, None]


def trained(batch: PackedBatch, change: Callable[[np.ndarray], np.ndarray]) -> UpdateResult:
    """Update with a probe whose engine gives the trainer's log-probs after `change`.

    The trainer's log-prob of each token is a function of its place in the batch.
    """
    probed = list(choose(batch))
    # saved groups are recorded too
    batch = replace(batch, recorded=sorted({*probed, 0, 4}))

    def of_places(places: np.ndarray) -> np.ndarray:
        return np.sin(places).astype(np.float32)

    def update(request: UpdateRequest) -> UpdateResult:
        starts = batch.cu_seqlens[:-1] + batch.prompt_lengths
        places = [np.arange(starts[i], batch.cu_seqlens[i + 1]) for i in batch.recorded]
        values = of_places(np.concatenate(places))
        nothing = np.full_like(values, np.nan)
        kept = RecordedTokens(old=nothing, proximal=values, update=nothing, advantages=nothing)
        return replace(UPDATE, metrics={"policy/lr": 0.0}, recorded=kept)

    def score(requests: list[ScoreRequest]) -> Any:
        firsts = batch.cu_seqlens[probed]
        scores = [
            change(of_places(first + request.positions))
            for first, request in zip(firsts, requests, strict=True)
        ]
        return SimpleNamespace(result=lambda: [scores])

    ranks: Any = SimpleNamespace(update=update, check_others=lambda: None)
    engines: Any = SimpleNamespace(score=score, shares_gpus=False)
    probe = ParityProbe(CONFIG, engines)
    trainer = StepTrainer(ranks, GpuSharing(ranks), CONFIG.algorithm, probe=probe)
    return trainer.finish_probe(trainer.update(batch, PRESENT + 1))


def check(update: UpdateResult, *, token_share: float) -> None:
    record = dict.fromkeys(METRIC_NAMES) | update.metrics
    record |= {"step": 8, "staleness/token_share": token_share, "policy/loss": 0.0}
    record |= {"policy/ratio_first_max_error": 0.0, "policy/skipped_updates": 0}
    if token_share < 1.0:
        record |= {"parity/logprob_abs_mean": 0.0, "parity/logprob_abs_max": 0.0}
    check_oracles([record], ORACLES, is_deterministic=True)


@pytest.mark.parametrize("token_share", [0.5, 1.0])
def test_wrong_weights_of_an_engine_stop_the_run(token_share):
    """The step may have no fresh token that shows them."""
    batch = stale_batch(RAGGED)
    healthy = trained(batch, lambda values: values)
    assert healthy.metrics["parity/probe_abs_max"] == 0.0
    check(healthy, token_share=token_share)

    noise = np.random.default_rng(0)
    damaged = trained(batch, lambda values: values + noise.normal(0.0, 0.01, len(values)))
    with pytest.raises(OracleError, match="parity/probe_abs_mean.*logprob_abs_mean.*transfer"):
        check(damaged, token_share=token_share)


def test_step_without_stale_tokens_asks_no_engine():
    batch = stale_batch(RAGGED)
    fresh = replace(batch, policy_versions=np.minimum(batch.policy_versions, 0) + PRESENT)
    assert "parity/probe_abs_max" not in trained(fresh, lambda values: values / 0).metrics
