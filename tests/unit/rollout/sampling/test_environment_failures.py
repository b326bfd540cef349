"""Groups whose environments fail: asked again within a bound, given up, and counted by cause."""

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
from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.loss_weights import loss_weights
from megadapo.data.group import INTERRUPTED, Failure, Score
from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.processes import LOST
from megadapo.errors import InfraError
from megadapo.rewards.config import RewardConfig
from megadapo.rewards.scorer import Scorer
from megadapo.rollout import episodes
from megadapo.rollout.config import EvaluationConfig
from megadapo.rollout.episodes.requests import EpisodeRequests
from megadapo.rollout.episodes.types import CAUSES, EnvironmentDescription
from megadapo.rollout.sampling.evaluation import (
    MAX_REPLACED,
    EvaluationInProgress,
    HeldOutRequests,
)
from megadapo.rollout.sampling.schedule import SamplingSchedule
from megadapo.rollout.sampling.scoring import MAX_REPEATS
from tests.support.rollout.clocked_engines import ClockedEngines, weights_after
from tests.support.rollout.samplers import HALF, MAX_TOKENS, contents, make_sampler
from tests.support.rollout.scripted_engines import (
    AtOnce,
    PlainTokenizer,
    RightAtLeast,
    ScriptedEngines,
    Slowly,
    make_prompts,
)

NO_SERVER = "exception: ValueError: no server (game.py, line 3)"


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
        assert 1 < batch.num_excluded < 24
        assert scorer.drain_warnings() == [
            f"environment Sum failed on {batch.num_excluded} responses, which were left out or "
            f"requested again: {batch.num_excluded} x {NO_SERVER}"
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
    assert [batch.num_unscored, batch.num_excluded] == [0, 0]
    assert set(broken.asked) == set(plain.asked)
    assert max(Counter(broken.asked).values()) == 1 + MAX_REPEATS
    num_again = len(broken.asked) - len(plain.asked)
    assert batch.failures == {"environment/Sum/failures/exception": 3.0 * num_again}
    assert expected.failures == {}


@pytest.mark.parametrize("mode", [{}, {"mode": "partial", "max_staleness": 1}])
def test_group_whose_environment_keeps_failing_is_replaced(mode):
    """Catches a step that asks for the same prompt forever, or again in spite of enough others."""
    engines = Broken(0.5)
    batch = played(engines, **mode).next_batch()
    assert batch.num_kept == 8 and batch.num_unscored > 0
    ragged = {group.prompt_index for group in batch.groups if group.failures}
    tries = Counter(engines.asked)
    assert ragged and {tries[index] for index in ragged} == {1}
    assert max(tries.values()) == 1 + MAX_REPEATS


def test_actions_that_must_not_be_repeated_are_not():
    """Catches an episode with effects elsewhere that is tried again."""
    engines = Broken(0.5)
    batch = played(engines, "once").next_batch()
    assert batch.num_unscored > 0 and set(Counter(engines.asked).values()) == {1}


def evaluation_of(recovery, engines, judge=None):
    held_out = HeldOutRequests.create(
        {"": make_prompts(20)},
        EvaluationConfig(samples_per_problem=1),
        tokenizer=PlainTokenizer(),
        max_response_tokens=12,
        seed=0,
        episodes=requests_of(recovery),
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
        "its server, or raise reward.max_failed_share"
    )
