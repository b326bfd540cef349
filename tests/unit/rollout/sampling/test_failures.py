"""Responses without a score: they leave their groups, and outages of rewards cost only time."""

import itertools
import random
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from megadapo.algorithm.advantages import advantages
from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.groups import Branch, branches_among
from megadapo.algorithm.loss_weights import loss_weights
from megadapo.data.batch import pack
from megadapo.data.group import Failure, Group
from megadapo.data.group_codec import decode_group, encode_group
from megadapo.errors import InfraError
from megadapo.rollout.config import EvaluationConfig
from megadapo.rollout.journal.journal import Journal
from megadapo.rollout.sampling import scoring
from megadapo.rollout.sampling.evaluation import EvaluationInProgress, HeldOutRequests
from tests.support.rollout.samplers import HALF, make_sampler
from tests.support.rollout.scripted_engines import (
    FailsOn,
    PlainTokenizer,
    ScriptedEngines,
    make_prompts,
)


def failing_batch(share=0.1, *, bound=HALF, **config):
    judge = FailsOn(share, bound)
    config = {"prompts_per_step": 8, "responses_per_prompt": 6} | config
    batch = make_sampler(ScriptedEngines(), judge=judge, saved_groups="all", **config).next_batch()
    return batch, judge


def test_failed_responses_leave_groups_and_statistics():
    """Catches failures that count as wrong responses, in advantages or in metrics."""
    batch, judge = failing_batch(selection="all")
    assert batch.num_excluded == judge.num_failed > 0
    sizes = [len(group.responses) for group in batch.groups]
    assert min(sizes) < 6 and sum(sizes) == 8 * 6 - batch.num_excluded
    assert len(batch.response_lengths) == sum(sizes)
    rewards = [reward for group in batch.groups for reward in group.rewards]
    assert 0.0 not in rewards and batch.reward_mean == pytest.approx(np.mean(rewards))
    assert batch.accuracy == pytest.approx(np.mean([reward > 0 for reward in rewards]))
    assert batch.reward_parts["judge/failed"] == pytest.approx(batch.num_excluded / 48)
    assert batch.num_unscored == 0
    for group in batch.groups:
        assert decode_group(encode_group(group)).failures == group.failures


def test_group_whose_remaining_responses_are_all_correct_is_all_correct():
    """Catches counts that compare with the size of a whole group."""
    batch, _ = failing_batch(0.2, bound=10, responses_per_prompt=4)
    finished = [entry for entry in batch.saved if entry.disposition == "all_correct"]
    assert any(len(entry.group.responses) < 4 for entry in finished)
    assert batch.num_all_correct == len(finished)
    kept = sum(entry.disposition == "trained" for entry in batch.saved)
    assert batch.num_sampled == kept + batch.num_all_correct + batch.num_all_wrong


@pytest.mark.parametrize("mode", [
    {}, {"mode": "rounds"}, {"selection": "all"}, {"mode": "partial", "max_staleness": 1},
])  # fmt: skip
def test_group_with_one_response_left_is_replaced(mode):
    """Catches a group that counts as all incorrect, and a batch with too few groups."""
    batch, judge = failing_batch(0.5, responses_per_prompt=3, **mode)
    assert batch.num_kept == 8 and batch.num_unscored > 0
    assert all(len(group.responses) >= 2 for group in batch.groups)
    counted = batch.num_all_correct + batch.num_all_wrong + batch.num_kept + batch.num_surplus
    assert batch.num_sampled <= counted + batch.num_to_reserve
    assert batch.num_excluded <= judge.num_failed


@pytest.mark.parametrize("aggregation", [
    "token-mean", "group-token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum",
])  # fmt: skip
def test_losses_of_ragged_groups_depend_on_nothing_else(aggregation):
    """Catches advantages over failed responses, and a reduction by the planned sizes."""
    batch, _ = failing_batch(selection="all")
    config = AlgorithmConfig(loss_aggregation=aggregation, responses_per_mini_batch=24)
    values = advantages(batch.groups, config, max_response_tokens=10**6)
    weights = loss_weights(batch.groups, config)
    sizes = [len(group.responses) for group in batch.groups]
    packed = pack(batch.groups, values, weights, mini_batch_size=24, rewards=values)
    assert [len(part) for part in packed.mini_batches] == [sum(sizes[:4]), sum(sizes[4:])]
    lengths = np.concatenate([group.lengths for group in batch.groups])
    for part in packed.mini_batches:
        total = {
            "seq-mean-token-sum": lengths[part].sum() / len(part), "token-sum": lengths[part].sum(),
        }.get(aggregation, 1.0)  # fmt: skip
        assert (weights[part] * lengths[part]).sum() == pytest.approx(total)
    for group, own in zip(batch.groups, np.split(values, np.cumsum(sizes)[:-1]), strict=True):
        rewards = np.array(group.rewards)
        spread = rewards.std(ddof=1) or 1.0
        assert own == pytest.approx((rewards - rewards.mean()) / spread)


@pytest.mark.parametrize("seed", range(20))
def test_branches_of_remaining_responses_share_the_same_tokens(seed):
    """Catches a branch that points to another response after one has left."""
    source = random.Random(seed)
    branches: list[Branch | None] = []
    tokens: list[list[tuple[int, int]]] = []
    for index in range(7):
        parent = source.randrange(-1, index)
        num_shared = source.randint(1, len(tokens[parent])) if parent >= 0 else 0
        branches.append(Branch(parent, num_shared) if num_shared else None)
        tokens.append((tokens[parent][:num_shared] if num_shared else []) + [(index, 0)] * 4)
    kept = sorted(source.sample(range(7), 4))
    for place, branch in enumerate(branches_among(branches, kept)):
        own, others = tokens[kept[place]], [tokens[index] for index in kept[:place]]
        longest = max((len(common_prefix(own, other)) for other in others), default=0)
        assert longest == (0 if branch is None else branch.num_tokens)
        if branch is not None:
            assert len(common_prefix(own, others[branch.parent])) == longest


def common_prefix(own: list, other: list) -> list:
    pairs = zip(own, other, strict=False)
    return [ours for ours, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]


def test_left_out_response_takes_no_branches_along():
    """Catches a branch to a response that has left, or to the one in its place."""
    batch, _ = failing_batch(0.0, selection="all")
    group = next(group for group in batch.groups if min(group.lengths[:4]) >= 2)
    branches = [None, Branch(0, 2), Branch(1, 1), Branch(1, 2), None, None]
    responses = [replace(r, branch=b) for r, b in zip(group.responses, branches, strict=True)]
    failure = Failure("judge", "HTTP 400")
    scores = [replace(s, failure=failure if i == 1 else None) for i, s in enumerate(group.scores)]
    branched = replace(group, responses=tuple(responses), scores=tuple(scores))
    left = branched.without_failures()
    assert left.branches == (None, Branch(0, 1), Branch(0, 2), None, None)
    assert left.failures == (failure,)
    assert decode_group(encode_group(left)).branches == left.branches


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(scoring, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(scoring, "LONGEST_PAUSE_S", 0.004)


@pytest.mark.parametrize("mode", [{}, {"mode": "partial", "max_staleness": 1}])
def test_outage_costs_time_and_no_prompts(soon, mode):
    """Catches prompts that are used up while a judge is away."""
    plain, away = ScriptedEngines(), ScriptedEngines()
    expected = make_sampler(plain, judge=FailsOn(0.0, HALF), **mode).next_batch()
    judge = FailsOn(0.0, HALF, outages=25)
    batch = make_sampler(away, judge=judge, **mode).next_batch()
    assert judge.outages == 0 and away.asked == plain.asked
    assert [group.prompt_index for group in batch.groups] == [
        group.prompt_index for group in expected.groups
    ]
    assert [group.rewards for group in batch.groups] == [g.rewards for g in expected.groups]


def test_long_outage_ends_the_run_with_the_code_for_a_restart(soon, monkeypatch):
    monkeypatch.setattr(scoring, "OUTAGE_S", 0.05)
    engines = ScriptedEngines()
    sampler = make_sampler(engines, judge=FailsOn(0.0, HALF, outages=10**9))
    # the groups that still try again would keep this process alive
    with closing(sampler), pytest.raises(InfraError, match="judge is away") as raised:
        sampler.next_batch()
    assert raised.value.exit_code == 5
    # the first request of a step: half of the batch more than it needs, but not ten times as much
    assert len(engines.asked) <= 24


def test_too_many_failures_stop_the_step_early():
    """Catches training on noise, and all prompts of an epoch used up by a function that fails."""
    engines = ScriptedEngines()
    sampler = make_sampler(
        engines, judge=FailsOn(1.0, HALF), num_prompts=500, sampler={"max_failed_share": 0.25}
    )
    with pytest.raises(InfraError, match=r"failed on 9 .* 37.5% .* = 0.25; .* judge: HTTP 400"):
        sampler.next_batch()
    assert len(engines.asked) <= 24
    judge = FailsOn(0.1, HALF)
    shares = {"max_failed_share": 0.3}
    assert make_sampler(ScriptedEngines(), judge=judge, sampler=shares).next_batch().num_kept == 8


def test_group_with_failures_is_scored_again_after_a_kill(tmp_path):
    """Catches a restart that finds the failures in its journal and ends again."""
    journal = Journal(tmp_path, "settings")
    journal.begin(3, "weights")
    keys = {"selection": "all", "sampler": {"journal": journal}}
    first = make_sampler(ScriptedEngines(), judge=FailsOn(0.3, HALF), **keys).next_batch()
    journal.close()
    again = Journal(tmp_path, "settings")
    again.begin(3, "weights")
    keys["sampler"] = {"journal": again}
    whole = make_sampler(ScriptedEngines(), judge=FailsOn(0.0, HALF), **keys).next_batch()
    num_ragged = sum(bool(group.failures) for group in first.groups)
    assert 0 < num_ragged < 8
    assert (whole.num_from_journal, whole.num_excluded) == (8 - num_ragged, 0)
    assert all(isinstance(g, Group) and len(g.responses) == 3 for g in whole.groups)


def test_evaluation_is_the_mean_over_scored_responses():
    """Catches an evaluation that counts failures as wrong, and one without any score."""
    config = EvaluationConfig(samples_per_problem=6)
    held_out = HeldOutRequests.create(
        {"": make_prompts(20)}, config, tokenizer=PlainTokenizer(), max_response_tokens=12, seed=0
    )
    with EvaluationInProgress(ScriptedEngines(), FailsOn(0.1, 0), held_out) as running:
        result = running.finish()
    assert result.accuracy == 1.0 and 5.0 < result.response_length_mean < 8.0
    with (
        EvaluationInProgress(ScriptedEngines(), FailsOn(1.0, HALF), held_out) as running,
        pytest.raises(InfraError, match="judge failed on all responses to problem id-.*HTTP 400"),
    ):
        running.finish()
