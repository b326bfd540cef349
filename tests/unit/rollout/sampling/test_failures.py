"""Responses without a score after failures of rewards and environments."""

import itertools
import random
import re
import zlib
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megadapo import environments
from megadapo.algorithm.advantages import advantages
from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.groups import Branch, branches_among
from megadapo.algorithm.loss_weights import loss_weights
from megadapo.codec import decode, encode
from megadapo.data.batch import pack
from megadapo.data.group import INTERRUPTED, Failure, Group, Score
from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.processes import EnvironmentDescription
from megadapo.errors import InfraError
from megadapo.rewards.config import RewardConfig
from megadapo.rewards.scorer import Scorer
from megadapo.rewards.workers.processes import LOST
from megadapo.rollout import episodes
from megadapo.rollout.config import EvaluationConfig
from megadapo.rollout.episodes.requests import EpisodeRequests
from megadapo.rollout.journal.journal import VERSION, Journal
from megadapo.rollout.sampling import scoring
from megadapo.rollout.sampling.evaluation import MAX_REPLACED, EvaluationInProgress, HeldOutRequests
from megadapo.rollout.sampling.schedule import SamplingSchedule
from megadapo.rollout.sampling.scoring import MAX_REPEATS
from megadapo.rollout.types import CAUSES
from tests.support.rollout.clocked_engines import ClockedEngines, weights_after
from tests.support.rollout.samplers import HALF, MAX_TOKENS, contents, make_sampler
from tests.support.rollout.scripted_engines import (
    AtOnce,
    FailsOn,
    PlainTokenizer,
    RightAtLeast,
    ScriptedEngines,
    Slowly,
    make_prompts,
)

NO_SERVER = "exception: ValueError: no server (game.py, line 3)"


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
    assert len(batch.unscored) == 0
    for group in batch.groups:
        assert decode(Group, encode(group)).failures == group.failures


def test_group_whose_remaining_responses_are_all_correct_is_all_correct():
    """Catches counts that compare with the size of a whole group."""
    batch, _ = failing_batch(0.2, bound=10, responses_per_prompt=4)
    finished = [entry for entry in batch.saved if entry.disposition == "all_correct"]
    assert any(len(entry.group.responses) < 4 for entry in finished)
    assert batch.num_at("all_correct") == len(finished)
    kept = sum(entry.disposition == "trained" for entry in batch.saved)
    assert len(batch.stats) == kept + batch.num_at("all_correct") + batch.num_at("all_wrong")


@pytest.mark.parametrize("mode", [
    {}, {"mode": "rounds"}, {"selection": "all"}, {"mode": "partial", "max_staleness": 1},
])  # fmt: skip
def test_group_with_one_response_left_is_replaced(mode):
    """Catches a group that counts as all incorrect, and a batch with too few groups."""
    batch, judge = failing_batch(0.5, responses_per_prompt=3, **mode)
    assert len(batch.groups) == 8 and len(batch.unscored) > 0
    assert all(len(group.responses) >= 2 for group in batch.groups)
    counted = (
        batch.num_at("all_correct")
        + batch.num_at("all_wrong")
        + len(batch.groups)
        + batch.num_surplus
    )
    assert len(batch.stats) <= counted + len(batch.to_reserve)
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
    assert decode(Group, encode(left)).branches == left.branches


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
    assert (
        len(make_sampler(ScriptedEngines(), judge=judge, sampler=shares).next_batch().groups) == 8
    )


def test_group_with_failures_is_scored_again_after_a_kill(tmp_path):
    """Catches a restart that finds the failures in its journal and ends again."""
    journal = Journal(Group, tmp_path, "settings", name=VERSION)
    journal.begin(3, "weights")
    keys = {"selection": "all", "sampler": {"journal": journal}}
    first = make_sampler(ScriptedEngines(), judge=FailsOn(0.3, HALF), **keys).next_batch()
    journal.close()
    again = Journal(Group, tmp_path, "settings", name=VERSION)
    again.begin(3, "weights")
    keys["sampler"] = {"journal": again}
    whole = make_sampler(ScriptedEngines(), judge=FailsOn(0.0, HALF), **keys).next_batch()
    num_ragged = sum(bool(group.failures) for group in first.groups)
    assert 0 < num_ragged < 8
    assert (whole.counts["groups/from_journal"], whole.num_excluded) == (8 - num_ragged, 0)
    assert all(isinstance(g, Group) and len(g.responses) == 3 for g in whole.groups)


def test_evaluation_is_the_mean_over_scored_responses():
    """Catches an evaluation that counts failures as wrong, and one without any score."""
    config = EvaluationConfig(samples_per_problem=6)
    held_out = HeldOutRequests.create(
        {"": make_prompts(20)},
        config,
        EpisodeRequests(tokenizer=PlainTokenizer(), seed=0),
        max_response_tokens=12,
    )
    with EvaluationInProgress(ScriptedEngines(), FailsOn(0.1, 0), held_out) as running:
        result = running.finish()
    assert result.accuracy == 1.0 and 5.0 < result.response_length_mean < 8.0
    with (
        EvaluationInProgress(ScriptedEngines(), FailsOn(1.0, HALF), held_out) as running,
        pytest.raises(InfraError, match="judge failed on all responses to problem id-.*HTTP 400"),
    ):
        running.finish()


class Broken(ScriptedEngines):
    """Engines in whose environment some responses fail, chosen by their text."""

    def __init__(self, share: float, num_failures: int = 1000, **keys) -> None:
        """`num_failures`: of each of these responses, after which its environment works."""
        super().__init__(**keys)
        self._share, self._num_failures = share, num_failures
        self._failures = Counter()

    def finished(self, timeout_s=None):
        def failing(response):
            assert response.failure is None, "it has not been asked again"
            if zlib.crc32(response.text.encode()) % 1000 >= 1000 * self._share:
                return response
            self._failures[response.text] += 1
            if self._failures[response.text] > self._num_failures:
                return response
            failure = Failure("environment/Sum", NO_SERVER)
            return replace(response, finish_reason="failed", failure=failure)

        return [
            replace(group, responses=tuple(map(failing, group.responses)))
            for group in super().finished(timeout_s)
        ]


def test_failures_of_environments_are_counted_by_cause(caplog):
    """Catches a step that loses responses and says nothing of it."""
    scorer = Scorer(RewardConfig(symbolic="off"))
    with closing(scorer):
        keys = {"prompts_per_step": 8, "responses_per_prompt": 6, "selection": "all"}
        batch = make_sampler(Broken(0.2), judge=scorer, **keys).next_batch()
        num_excluded = batch.num_excluded
        assert 1 < num_excluded < 24
        assert scorer.drain_warnings() == [
            f"environment Sum failed on {num_excluded} responses, which were left out or "
            f"requested again: {num_excluded} x {NO_SERVER}"
        ]
        assert scorer.drain_warnings() == []
    # the first one is told at once, with its prompt
    [told] = [one.getMessage() for one in caplog.records]
    assert re.fullmatch(rf"environment Sum, prompt id-\d+: {re.escape(NO_SERVER)}", told)


def test_every_cause_has_a_kind():
    """Catches a cause that metrics would count as an exception."""
    sources = [
        path.read_text()
        for folder in (environments, episodes)
        for path in Path(folder.__path__[0]).glob("*.py")
    ]
    raised = {
        cause
        for source in sources
        for pattern in (r'CallError\(\s*"([^"]+)"', r'"cause": "([^"]+)"', r'cause = "([^"]+)"')
        for cause in re.findall(pattern, source)
    }
    assert len(raised) > 8 and raised <= CAUSES.keys()
    assert {LOST, INTERRUPTED} <= CAUSES.keys()


def requests_of(recovery):
    """Return the requests of prompts that are all played in an environment."""
    config = EnvironmentConfig(environment="games:Sum", recovery=recovery)
    description = EnvironmentDescription("Sum", (), (), "{}")
    return EpisodeRequests(environments=[(config, description)], tokenizer=PlainTokenizer(), seed=0)


class SumOfDigits(RightAtLeast):
    """The verifier of groups with environments."""

    def score_group(self, prompt, texts, token_ids, returns=()):
        assert len(returns) == len(texts)
        return super().score_group(prompt, texts, token_ids)

    def count_failure(self, failure, prompt):
        assert failure.reason == NO_SERVER


def played(engines, recovery="replay", **config):
    return make_sampler(
        engines,
        judge=SumOfDigits(HALF),
        sampler={"episodes": requests_of(recovery)},
        **{"prompts_per_step": 8, "responses_per_prompt": 3, **config},
    )


@pytest.mark.parametrize("mode", [{}, {"mode": "rounds"}, {"selection": "all"}])
def test_group_that_environments_empty_is_asked_again(mode):
    """Catches another prompt in its place, and a batch that differs from one without failures."""
    plain, broken = ScriptedEngines(), Broken(1.0, num_failures=MAX_REPEATS)
    expected = played(plain, **mode).next_batch()
    batch = played(broken, **mode).next_batch()
    assert contents([batch]) == contents([expected])
    assert [len(batch.unscored), batch.num_excluded] == [0, 0]
    assert set(broken.asked) == set(plain.asked)
    assert max(Counter(broken.asked).values()) == 1 + MAX_REPEATS
    num_again = len(broken.asked) - len(plain.asked)
    failures = "environment/Sum/failures/exception"
    assert batch.counts[failures] == 3.0 * num_again and failures not in expected.counts


@pytest.mark.parametrize("mode", [{}, {"mode": "partial", "max_staleness": 1}])
def test_group_whose_environment_keeps_failing_is_replaced(mode):
    """Catches a step that asks for the same prompt forever, or again in spite of enough others."""
    engines = Broken(0.5)
    batch = played(engines, **mode).next_batch()
    assert len(batch.groups) == 8 and len(batch.unscored) > 0
    ragged = {group.prompt_index for group in batch.groups if group.failures}
    tries = Counter(engines.asked)
    assert ragged and {tries[index] for index in ragged} == {1}
    assert max(tries.values()) == 1 + MAX_REPEATS


def test_actions_that_must_not_be_repeated_are_not():
    """Catches an episode with effects elsewhere that is tried again."""
    engines = Broken(0.5)
    batch = played(engines, "once").next_batch()
    assert len(batch.unscored) > 0 and set(Counter(engines.asked).values()) == {1}


def evaluation_of(recovery, engines, judge=None):
    held_out = HeldOutRequests.create(
        {"": make_prompts(20)},
        EvaluationConfig(samples_per_problem=1),
        requests_of(recovery),
        max_response_tokens=12,
    )
    return EvaluationInProgress(engines, judge or SumOfDigits(0), held_out)


@pytest.mark.parametrize("recovery", ["replay", "once"])
def test_problem_of_an_evaluation_is_asked_again(recovery):
    """Catches an evaluation that ends because of one failure, or loses its answer to training.

    After a restart open episodes fail with "once", so that an evaluation would fail each time.
    """
    engines = Broken(0.3, num_failures=1 if recovery == "replay" else 1000)
    seeds = []
    submit = engines.submit
    engines.submit = lambda groups: [seeds.extend(one.seeds for one in groups), submit(groups)]
    with evaluation_of(recovery, engines) as running:
        running.submit()
        while not running.is_done:
            running.poll()
        assert running.finish().accuracy == 1.0
    assert 20 < len(engines.asked) < 40
    # other seeds name other episodes, and none is played again
    assert len(set(seeds)) == (20 if recovery == "replay" else len(seeds))


@pytest.mark.parametrize("recovery,num_asked", [("replay", MAX_REPEATS), ("once", MAX_REPLACED)])
def test_evaluation_whose_environment_keeps_failing_ends(recovery, num_asked):
    """Catches an evaluation that asks for ever."""
    engines = Broken(1.0)
    running = evaluation_of(recovery, engines)
    with running, pytest.raises(InfraError, match="environment Sum failed on all responses"):
        running.finish()
    assert max(Counter(engines.asked).values()) == 1 + num_asked


class NoJudge(SumOfDigits):
    """A judge that answers nothing about episodes that have ended."""

    def score_group(self, prompt, texts, token_ids, returns=()):
        return [Score(0.0, False, "", failure=Failure("judge", "HTTP 400")) for _ in texts]


def test_episodes_are_not_played_again_for_a_judge():
    """Their actions with effects elsewhere would be done for nothing."""
    engines = ScriptedEngines()
    running = evaluation_of("once", engines, NoJudge(0))
    with running, pytest.raises(InfraError, match="judge failed on all responses"):
        running.finish()
    assert set(Counter(engines.asked).values()) == {1}


class EndsAfterNine(ClockedEngines):
    """Engines in whose environment whole groups fail; a turn ends with the digit 9."""

    def __init__(self, clock, share, **keys):
        super().__init__(clock, **keys)
        self._share, self.failures = share, Counter()

    def _next(self, one, place, response):
        # its answer alone may be missing
        has_ended = response.finish_reason == "unfinished" and self._ends(response)
        found = response if has_ended else super()._next(one, place, response)
        if found is response and not has_ended:
            return found
        reason = "stop" if self._ends(found) else "unfinished"
        text = "".join(str(i - 3) for i in found.token_ids)
        return replace(found, finish_reason=reason, text=text)

    @staticmethod
    def _ends(response):
        ids = response.token_ids.tolist()
        return ids[-1:] == [9 + 3] or len(ids) == MAX_TOKENS

    def finished(self, timeout_s=None):
        return [self._failed(group) for group in super().finished(timeout_s)]

    def _failed(self, group):
        may_fail = not group.is_unfinished and self.failures[group.key] < MAX_REPEATS
        if not may_fail or self._clock.random() >= self._share:
            return group
        self.failures[group.key] += 1
        failure = Failure("environment/Sum", NO_SERVER)
        return replace(
            group,
            responses=tuple(
                replace(one, finish_reason="failed", failure=failure) for one in group.responses
            ),
        )


@pytest.mark.parametrize("seed", range(8))
def test_run_without_the_failures_repeats_one_that_asked_again(seed, tmp_path):
    """Catches a second try with other tokens, also if weights change in the middle of it."""

    def run(clock, share, schedule):
        engines = EndsAfterNine(clock, share, num_engines=clock.randint(1, 3))
        engines.policy_version = 0
        slowly = clock.random() < 0.5
        sampler = make_sampler(
            engines,
            judge=SumOfDigits(HALF),
            num_prompts=1000,
            mode=("partial", "async")[seed % 2],
            max_staleness=2,
            sampler={
                "schedule": schedule,
                "episodes": requests_of("replay"),
                "new_executor": (lambda: Slowly(clock)) if slowly else AtOnce,
            },
        )
        sampler.pause_for_weights()
        sampler.resume_sampling(0, "start")
        batches = []
        for version in range(1, 8):
            batches.append(sampler.next_batch())
            for _ in range(clock.randint(0, 6) if sampler.config.overlaps else 0):
                sampler.turn()
            while not sampler.can_pause:
                sampler.turn()
            sampler.pause_for_weights()
            engines.policy_version = version
            sampler.resume_sampling(version, weights_after(version, batches[-1]))
        schedule.close()
        return contents(batches), engines.failures

    expected, failures = run(random.Random(seed), 0.3, SamplingSchedule(tmp_path / "a"))
    assert failures.total() > 10
    source = SamplingSchedule(tmp_path / "b", source=tmp_path / "a")
    again, none = run(random.Random(100 + seed), 0.0, source)
    assert again == expected and not none
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


class Losing(ScriptedEngines):
    """Engines whose longest responses end because their environment takes no further action."""

    def finished(self, timeout_s=None):
        return [
            replace(
                group,
                responses=tuple(
                    replace(one, finish_reason="max_turns") if one.truncated else one
                    for one in group.responses
                ),
            )
            for group in super().finished(timeout_s)
        ]


def test_lost_games_are_counted_and_trained_on():
    """Catches a lost game that is masked or counted as truncated."""
    batch = played(Losing(), selection="all").next_batch()
    responses = [one for group in batch.groups for one in group.responses]
    lost = [one.finish_reason == "max_turns" for one in responses]
    assert 0 < sum(lost) < len(lost) and batch.truncated_fraction == 0.0
    assert batch.reward_parts["environment/Sum/out_of_turns"] == pytest.approx(np.mean(lost))
    # a mean over the episodes with cuts alone would hide how rare they are
    assert batch.reward_parts["environment/Sum/cut_messages"] == 0.0
    weights = loss_weights(batch.groups, AlgorithmConfig(overlong_filtering=True))
    assert (weights > 0).all()


def test_step_that_environments_stop_names_environment_cause_and_remedy():
    scorer = Scorer(RewardConfig(symbolic="off"))
    sampler = make_sampler(
        Broken(1.0), judge=scorer, num_prompts=500, sampler={"max_failed_share": 0.25}
    )
    with closing(scorer), pytest.raises(InfraError) as raised:
        sampler.next_batch()
    assert str(raised.value) == (
        "reward functions or environments failed on 9 responses of the step, 37.5% of them, and "
        "reward.max_failed_share = 0.25; the last failure is of environment Sum: exception: "
        "ValueError: no server (game.py, line 3). Nothing of the step is trained on. Mend it or "
        "its server, let it return a score for such responses, or raise reward.max_failed_share"
    )
