"""The verdict on a batch: who decides, what is counted, and that it holds in Ray's threads."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import ray

from megadapo.errors import ConfigError
from megadapo.rewards.config import RewardConfig
from megadapo.rewards.dapo_math import Score
from megadapo.rewards.verifier import Disagreement, Verifier

RESPONSES = ["Answer: 42", "Answer: 42.", "so \\boxed{42}", "Answer: 7", "no idea"]
GOLDS = ["42"] * 5
SLOW = "Answer: (x+y+z+w)^{99}"


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(RewardConfig(symbolic_timeout_s=30.0)) as verifier:
        yield verifier


def test_the_rule_decides_and_the_second_opinion_is_reported(verifier: Verifier) -> None:
    assert verifier.score_batch(RESPONSES, GOLDS) == [
        Score(1.0, True, "42", True),
        Score(-1.0, False, "42.", True),
        Score(-1.0, False, "[INVALID]", True),
        Score(-1.0, False, "7", False),
        Score(-1.0, False, "[INVALID]", None),
    ]


def test_disagreements_are_counted_and_kept() -> None:
    with Verifier(RewardConfig(symbolic_timeout_s=30.0)) as verifier:
        verifier.score_batch(RESPONSES, GOLDS)
        # The rule compares words only after removing "cm", the symbols know no such word.
        verifier.score_batch(["Answer: x cm", "Answer: 42."], ["x", "42"])
        counts = verifier.counts
        assert (counts.num_scored, counts.num_unanswered) == (7, 2)
        assert verifier.num_disagreements == counts.num_only_rule + counts.num_only_symbolic
        assert counts.num_only_symbolic == 3
        assert verifier.recent_disagreements[:2] == [
            Disagreement("42.", "42", False),
            Disagreement("42", "42", False),
        ]
        # Seven responses, but "Answer: 42" and "\\boxed{42}" ask the same, and one says nothing.
        assert counts.symbolic.num_checked == 5


def test_the_symbols_decide_where_that_is_chosen_and_the_rule_where_they_cannot() -> None:
    config = RewardConfig(decide="symbolic", symbolic_timeout_s=30.0)
    with Verifier(config) as verifier:
        verdicts = verifier.score_batch([*RESPONSES, "Answer: 9!!!"], [*GOLDS, "9!!!"])
    assert [v.correct for v in verdicts] == [True, True, True, False, False, True]
    assert [v.reward for v in verdicts] == [1.0, 1.0, 1.0, -1.0, -1.0, 1.0]
    assert verdicts[-1].symbolic_correct is None


def test_without_a_second_opinion_nothing_is_started() -> None:
    with Verifier(RewardConfig(symbolic=False)) as verifier:
        verdicts = verifier.score_batch(RESPONSES, GOLDS)
        assert [v.correct for v in verdicts] == [True, False, False, False, False]
        assert all(v.symbolic_correct is None for v in verdicts)
        assert verifier._pool is None
        assert verifier.counts.num_scored == 5 and verifier.num_disagreements == 0


def test_the_rule_of_the_config_is_the_one_that_scores() -> None:
    for rule, expected in (
        ("answer", [True, False, False]),
        ("boxed", [False, False, True]),
        ("answer_or_boxed", [True, False, True]),
    ):
        with Verifier(RewardConfig(rule=rule, symbolic=False)) as verifier:
            assert [v.correct for v in verifier.score_batch(RESPONSES[:3], GOLDS[:3])] == expected


def test_a_batch_may_be_empty_and_must_have_a_gold_for_each_response(verifier: Verifier) -> None:
    assert verifier.score_batch([], []) == []
    with pytest.raises(ValueError, match="2 responses for 1 gold"):
        verifier.score_batch(["a", "b"], ["1"])


@pytest.mark.fault
def test_lost_comparisons_do_not_change_the_reward_and_are_warned_of(caplog) -> None:
    """The silent form of this failure is a reward of 0 for everything."""
    config = RewardConfig(symbolic_workers=1, symbolic_timeout_s=3.0)
    with caplog.at_level(logging.WARNING), Verifier(config) as verifier:
        verdicts = verifier.score_batch([SLOW, "Answer: 42"], ["42", "42"])
        assert [(v.correct, v.symbolic_correct) for v in verdicts] == [(False, None), (True, True)]
    assert "crashes: 1 for the last 2 answers" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"decide": "symbolic", "symbolic": False}, "reward.decide"),
        ({"symbolic_workers": 0}, "reward.symbolic_workers"),
        ({"symbolic_timeout_s": 0.0}, "reward.symbolic_timeout_s"),
        ({"symbolic_timeout_s": float("nan")}, "reward.symbolic_timeout_s"),
        ({"symbolic_seconds_per_minute": -1.0}, "reward.symbolic_seconds_per_minute"),
        ({"symbolic_memory_mib": 10}, "reward.symbolic_memory_mib"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(wrong: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        RewardConfig(**wrong)


@ray.remote(num_cpus=0)
class AsyncScorer:
    """Scores on the event loop's thread, which is not a main thread."""

    def __init__(self) -> None:
        self.verifier = Verifier(RewardConfig(symbolic_timeout_s=30.0))

    async def score(self) -> list[Score]:
        return self.verifier.score_batch(RESPONSES, GOLDS)

    async def close(self) -> None:
        self.verifier.close()


def test_verdicts_are_the_same_in_an_async_ray_actor(verifier: Verifier) -> None:
    """Where the well-known bug strikes: math-verify in such a thread marks everything wrong."""
    started_here = not ray.is_initialized()
    if started_here:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        actor = AsyncScorer.remote()
        assert ray.get(actor.score.remote(), timeout=120) == verifier.score_batch(RESPONSES, GOLDS)
        ray.get(actor.close.remote(), timeout=30)
    finally:
        if started_here:
            ray.shutdown()
