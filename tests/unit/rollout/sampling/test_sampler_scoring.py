"""Scoring: engines that wait for it, and errors that are lost in its threads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.rollout.samplers import HALF, RARE, make_sampler
from tests.support.rollout.scripted_engines import (
    RightAtLeast,
    ScriptedEngines,
)


class WaitsForScoring(ScriptedEngines):
    """Engines that return further groups only after the first one has been scored."""

    def __init__(self, scored: threading.Event) -> None:
        super().__init__()
        self._scored = scored

    def finished(self, timeout_s=None):
        if self.num_handed_back == 1:
            assert self._scored.wait(timeout=10), "nothing was scored while the others ran"
        return super().finished(timeout_s)


def test_scoring_runs_during_generation():
    scored = threading.Event()

    class Judge(RightAtLeast):
        def score_group(self, prompt, texts, token_ids):
            scored.set()
            return super().score_group(prompt, texts, token_ids)

    sampler = make_sampler(WaitsForScoring(scored), judge=Judge(HALF))
    assert sampler.next_batch().num_kept == 8


def test_reward_seconds_covers_all_groups():

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


def test_scoring_error_ends_the_step():
    class Broken:
        num_threads = 1

        def score_group(self, prompt, texts, token_ids):
            raise ValueError("no score")

    sampler = make_sampler(ScriptedEngines(), judge=Broken())
    with pytest.raises(ValueError, match="no score"):
        sampler.next_batch()


def test_group_being_scored_continues_in_the_next_step():
    """Neither the engines nor the batch have it when the step ends."""
    full = threading.Event()

    class SlowOnTheFirst(RightAtLeast):
        num_threads = 2

        def score_group(self, prompt, texts, token_ids):
            if prompt.id == first:
                assert full.wait(timeout=10)
            return super().score_group(prompt, texts, token_ids)

    class TellsWhenFull(ScriptedEngines):
        def stop(self, keys=None, *, keep):
            full.set()
            return super().stop(keys, keep=keep)

    sampler = make_sampler(
        TellsWhenFull(),
        judge=SlowOnTheFirst(HALF),
        sampler={"scoring": lambda: ThreadPoolExecutor(2)},
        mode="partial",
        max_staleness=1,
        saved_groups="all",
    )
    first = sampler._cursor.prompt(0).id
    sampler.next_batch()
    (waiting,) = (one for one in sampler.state_dict()["unfinished"] if one["prompt_index"] == 0)
    assert {response["finish_reason"] for response in waiting["responses"]} <= {"stop", "length"}
    assert 0 in [saved.group.prompt_index for saved in sampler.next_batch().saved]
