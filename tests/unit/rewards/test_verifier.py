"""Scores of a batch: which comparison decides, and what is counted."""

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from megadapo.data.group import Score
from megadapo.errors import InfraError
from megadapo.rewards.config import RewardConfig
from megadapo.rewards.verifier import CHUNK, CrossCheck, Verifier

RESPONSES = ["Answer: 42", "Answer: 42.", "so \\boxed{42}", "Answer: 7", "no idea"]
GOLDS = ["42"] * 5
SLOW = "Answer: (x+y+z+w)^{99}"
SOON_S = 60.0


def compare(verifier: Verifier) -> None:
    """Cross-check the pairs scored so far, and wait for the results."""
    verifier.ask_cross_check()
    verifier.finish_cross_check(SOON_S)


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(RewardConfig(), symbolic_timeout_s=30.0) as verifier:
        yield verifier


def test_rule_decides_and_cross_check_follows(verifier: Verifier) -> None:
    assert verifier.score_batch(RESPONSES, GOLDS) == [
        Score(1.0, True, "42"),
        Score(-1.0, False, "42."),
        Score(-1.0, False, "[INVALID]"),
        Score(-1.0, False, "7"),
        Score(-1.0, False, "[INVALID]"),
    ]
    assert verifier.cross_checks(RESPONSES, "42") == [None] * 5
    compare(verifier)
    assert verifier.cross_checks(RESPONSES, "42") == [True, True, None, False, None]


def test_disagreements_are_counted(monkeypatch) -> None:
    compared, ask = [], CrossCheck.ask

    def watched(self, pairs):
        compared.extend(pairs)
        return ask(self, pairs)

    monkeypatch.setattr(CrossCheck, "ask", watched)
    with Verifier(RewardConfig(), symbolic_timeout_s=30.0) as verifier:
        verifier.score_batch(RESPONSES, GOLDS)
        # the rule removes "cm", the symbolic comparison does not know it
        verifier.score_batch(["Answer: x cm", "Answer: 42."], ["x", "42"])
        verifier.ask_cross_check([("Answer: 42.", "42"), ("not scored", "1")])
        verifier.finish_cross_check(SOON_S)
        counts = verifier.counts
        assert (counts.num_scored, counts.num_unanswered) == (7, 2)
        assert verifier.num_disagreements == counts.num_only_rule + counts.num_only_symbolic
        assert counts.num_only_symbolic == 2
        # of the scored pairs only, and once for both of its responses
        assert compared[0] == ("42.", "42") and len(compared) == len(set(compared)) == 4
        # seven responses: two of them are equal, and two have no answer at the rule's place
        assert counts.symbolic.num_checked == 4
        # a known answer is counted again, but not compared again
        verifier.score_batch(["Answer: 42."], ["42"])
        verifier.finish_cross_check(SOON_S)
        assert verifier.counts.num_only_symbolic == 3
        assert verifier.counts.symbolic.num_checked == 4


@pytest.mark.fault
def test_slow_cross_check_drops_and_counts_pairs() -> None:
    config = RewardConfig()
    with Verifier(config, symbolic_timeout_s=300.0) as verifier:
        started = time.perf_counter()
        for step in range(3):
            slow = [f"Answer: (x+y+z+w)^{{{90 + i}}}" for i in range(30)]
            scores = verifier.score_batch(slow, [str(step)] * 30)
            assert not any(score.correct for score in scores)
            verifier.ask_cross_check()
        assert time.perf_counter() - started < 2.0
        left_out = verifier.counts.num_left_out
        # the first two batches, except for chunks that the workers already had
        assert 2 * 30 - 2 * CHUNK <= left_out <= 2 * 30
        verifier.finish_cross_check(0.1)
        assert verifier.counts.num_scored == 90
    assert time.perf_counter() - started < 10.0


@pytest.mark.fault
@pytest.mark.parametrize(
    ("executable", "reason"),
    [("/bin/false", "3 times before it was ready"), ("/does/not/exist", "No such file")],
)
def test_irreplaceable_workers_only_stop_the_cross_check(monkeypatch, executable, reason) -> None:
    """The cross-check only observes, so it must not end a long run, but must report its end."""
    with Verifier(RewardConfig(), symbolic_timeout_s=30.0) as verifier:
        monkeypatch.setattr(sys, "executable", executable)
        for pid in verifier._pool.process_ids:
            os.kill(pid, signal.SIGKILL)
        # more answers than processes: the last ones need new processes
        golds = [str(number) for number in range(10, 14)]
        verifier.score_batch([f"Answer: {gold}" for gold in golds], golds)
        compare(verifier)
        (note,) = verifier.drain_warnings()
        assert "not compared symbolically" in note and "cannot start: " in note
        assert reason in note
        assert verifier.score_batch(["Answer: 3"], ["3"])[0].correct
        compare(verifier)
        assert verifier.cross_checks(["Answer: 3"], "3") == [None]
        assert verifier.drain_warnings() == []
        assert verifier.counts.num_left_out == 1


@pytest.mark.fault
def test_hung_workers_delay_nothing() -> None:
    """All of them hang, also after they are replaced."""
    with Verifier(RewardConfig(), symbolic_timeout_s=1.0) as verifier:
        started = time.perf_counter()
        for _ in range(3):
            for pid in verifier._pool.process_ids:
                os.kill(pid, signal.SIGSTOP)
            assert verifier.score_batch(["Answer: 1"], ["1"])[0].correct
            verifier.ask_cross_check()
            verifier.finish_cross_check(0.1)
        closing = time.perf_counter()
        assert closing - started < 5
    assert time.perf_counter() - closing < 5


def test_cross_check_is_optional_but_a_deciding_comparison_is_not(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Verifier(RewardConfig()) as verifier:
        assert verifier.score_batch(["Answer: 1"], ["1"])[0].correct
        compare(verifier)
        assert verifier.cross_checks(["Answer: 1"], "1") == [None]
        (note,) = verifier.drain_warnings()
        assert "not compared symbolically" in note and 'reward.symbolic = "off"' in note
    with pytest.raises(InfraError, match=r'reward\.symbolic = "off"'):
        Verifier(RewardConfig(symbolic="decide"))


def test_symbolic_decides_if_chosen_with_the_rule_as_fallback() -> None:
    """Only an answer at the place of reward.rule counts."""
    config = RewardConfig(symbolic="decide")
    with Verifier(config, symbolic_timeout_s=30.0) as verifier:
        scores = verifier.score_batch([*RESPONSES, "Answer: 9!!!"], [*GOLDS, "9!!!"])
    assert [v.correct for v in scores] == [True, True, False, False, False, True]
    assert [v.reward for v in scores] == [1.0, 1.0, -1.0, -1.0, -1.0, 1.0]
    assert scores[-1].symbolic_correct is None


def test_without_cross_check_no_process_starts() -> None:
    with Verifier(RewardConfig(symbolic="off")) as verifier:
        scores = verifier.score_batch(RESPONSES, GOLDS)
        assert [v.correct for v in scores] == [True, False, False, False, False]
        assert all(v.symbolic_correct is None for v in scores)
        compare(verifier)
        assert verifier.cross_checks(RESPONSES, "42") == [None] * 5
        assert verifier._pool is None
        assert verifier.counts.num_scored == 5 and verifier.num_disagreements == 0


def test_configured_rule_scores() -> None:
    for rule, expected in (
        ("answer", [True, False, False]),
        ("boxed", [False, False, True]),
        ("answer_or_boxed", [True, False, True]),
    ):
        with Verifier(RewardConfig(rule=rule, symbolic="off")) as verifier:
            assert [v.correct for v in verifier.score_batch(RESPONSES[:3], GOLDS[:3])] == expected


def test_batch_needs_a_gold_per_response(verifier: Verifier) -> None:
    assert verifier.score_batch([], []) == []
    with pytest.raises(ValueError, match="2 responses for 1 gold"):
        verifier.score_batch(["a", "b"], ["1"])


@pytest.mark.fault
def test_lost_comparisons_warn_and_keep_the_reward(caplog) -> None:
    """Without a warning, every reward could be 0."""
    config = RewardConfig()
    texts = [SLOW, "Answer: 42"]
    with caplog.at_level(logging.WARNING), Verifier(config, symbolic_timeout_s=3.0) as verifier:
        assert [v.correct for v in verifier.score_batch(texts, ["42", "42"])] == [False, True]
        verifier.finish_cross_check(SOON_S)
        assert verifier.cross_checks(texts, "42") == [None, True]
    assert "crashes: 1 for the last 2 answers" in caplog.text
