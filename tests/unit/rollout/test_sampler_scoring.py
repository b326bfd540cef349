"""Would catch: engines that wait for the scoring of responses, a failure lost in its thread."""

from __future__ import annotations

import threading
import time

import pytest

from tests.support.samplers import HALF, RARE, make_sampler
from tests.support.scripted_engines import (
    RightAtLeast,
    ScriptedEngines,
)


class WaitsForTheJudge(ScriptedEngines):
    """Hands the first group back at once and the others only after it has been scored."""

    def __init__(self, scored: threading.Event) -> None:
        super().__init__()
        self._scored = scored

    def finished(self, timeout_s=None):
        if self.num_handed_back == 1:
            assert self._scored.wait(timeout=10), "nothing was scored while the others ran"
        return super().finished(timeout_s)


def test_scoring_runs_while_generation_goes_on():
    scored = threading.Event()

    class Judge(RightAtLeast):
        def score_group(self, prompt, texts, token_ids):
            scored.set()
            return super().score_group(prompt, texts, token_ids)

    sampler = make_sampler(WaitsForTheJudge(scored), judge=Judge(HALF))
    assert sampler.next_batch().num_kept == 8


def test_the_time_of_scoring_is_that_of_all_groups():

    class Slow(RightAtLeast):
        seconds = 0.0

        def score_group(self, prompt, texts, token_ids):
            start = time.perf_counter()
            time.sleep(0.001)
            scores = super().score_group(prompt, texts, token_ids)
            self.seconds += time.perf_counter() - start
            return scores

    engines, judge = ScriptedEngines(), Slow(RARE)
    sampler = make_sampler(engines, num_prompts=500, max_asked_per_prompt=40.0, judge=judge)
    batch = sampler.next_batch()
    assert judge.seconds <= batch.reward_seconds < 2 * judge.seconds


def test_a_failing_verifier_ends_the_step():
    """An exception in the scoring thread must not be lost."""

    class Broken:
        num_threads = 1

        def score_group(self, prompt, texts, token_ids):
            raise ValueError("no score")

    sampler = make_sampler(ScriptedEngines(), judge=Broken())
    with pytest.raises(ValueError, match="no score"):
        sampler.next_batch()
