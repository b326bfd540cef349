"""A step's scoring and statistics: lost errors, numbers over some responses, unsaved groups."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from megadapo.data.prompts import PromptStream
from megadapo.observe.rollouts.saved_group import Disposition
from megadapo.rollout.types import SamplingSettings, response_seeds
from tests.support.rollout.samplers import HALF, MAX_TOKENS, RARE, contents, make_sampler, take
from tests.support.rollout.scripted_engines import (
    POLICY_VERSION,
    RightAtLeast,
    ScriptedEngines,
    make_prompts,
    respond,
)


def test_statistics_cover_all_responses():
    """Over kept groups alone, accuracy would always be near a half."""
    engines = ScriptedEngines()
    sampler = make_sampler(engines, bound=RARE, num_prompts=500, max_asked_per_prompt=40.0)
    batch = sampler.next_batch()
    assert batch.num_sampled == max(group.prompt_index for group in batch.groups) + 1
    assert batch.num_all_wrong > 4 * batch.num_kept
    responses = all_responses(batch)
    lengths = [len(text) for text in responses]
    right = [sum(map(int, text)) >= RARE for text in responses]
    assert batch.accuracy == np.mean(right) < 0.1
    assert batch.reward_mean == pytest.approx(2 * np.mean(right) - 1)
    assert sorted(batch.response_lengths) == sorted(lengths)
    assert batch.truncated_fraction == np.mean([n == MAX_TOKENS for n in lengths]) > 0
    assert batch.num_tokens == sum(lengths)


def all_responses(batch) -> list[str]:
    """Generate the responses of all requests again."""
    settings = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=MAX_TOKENS)
    prompts = PromptStream(make_prompts(500), 0)
    return [
        respond(seed, settings).text
        for index in range(batch.num_sampled)
        for seed in response_seeds(3, 0, "train", index, prompts.at(index).id)
    ]


def test_group_keeps_responses_and_answers():
    group = make_sampler(ScriptedEngines()).next_batch().groups[0]
    assert "".join(map(chr, group.prompt_ids)) == group.prompt.messages[0][1]
    for response in group.responses:
        assert response.policy_versions.tolist() == [POLICY_VERSION] * len(response.token_ids)
        assert len(response.logprobs) == len(response.token_ids)
        assert np.isnan(response.logprobs[0])
        assert response.text == "".join(str(i - 3) for i in response.token_ids)
    answers = [(score.answer, score.symbolic_correct) for score in group.scores]
    assert answers == [(response.text[-1:], None) for response in group.responses]


def test_all_groups_are_saved_with_their_disposition():
    config = {"prompts_per_step": 3, "bound": 35, "accuracy_range": (0.0, 0.5)}
    modes = {"mode": "partial", "max_staleness": 1}, {"mode": "rounds", "prompts_per_round": 9}
    batches = [
        batch
        for mode in modes
        for batch in take(
            make_sampler(
                ScriptedEngines("last first", slots=300),
                saved_groups="all",
                num_prompts=900,
                **config,
                **mode,
            ),
            6,
        )
    ]
    for batch in batches:
        indices = [sampled.group.prompt_index for sampled in batch.saved]
        assert indices == sorted(set(indices))
        reserved = [sampled for sampled in batch.saved if sampled.from_reserve]
        assert len(indices) == batch.num_sampled + len(reserved)
        dispositions = Counter(sampled.disposition for sampled in batch.saved)
        assert dispositions["trained"] == batch.num_kept
        assert dispositions["dropped"] == batch.num_dropped + batch.num_surplus
        for disposition in ("to_reserve", "all_correct", "all_wrong"):
            assert dispositions[disposition] == getattr(batch, f"num_{disposition}")
        trained = [sampled.group for sampled in batch.saved if sampled.disposition == "trained"]
        assert {id(one) for one in trained} == {id(one) for one in batch.groups}
        kept = [sampled for sampled in reserved if sampled.disposition == "trained"]
        assert len(kept) == batch.num_from_reserve
    seen = Counter(sampled.disposition for batch in batches for sampled in batch.saved)
    assert min(seen[disposition] for disposition in get_args(Disposition)) > 0, (
        f"not all dispositions occurred: {seen}"
    )


def test_saved_groups_change_nothing_else():
    by_default = take(make_sampler(ScriptedEngines()), 4)
    assert [(batch.num_kept, batch.saved) for batch in by_default] == [(8, ())] * 4
    for limit in (2, "all"):
        batches = take(make_sampler(ScriptedEngines(), saved_groups=limit), 4)
        assert limit == "all" or [len(batch.saved) for batch in batches] == [2] * 4
        assert contents([replace(batch, saved=()) for batch in batches]) == contents(by_default)


def test_reward_parts_are_means():
    class Parts(RightAtLeast):
        def score_group(self, prompt, texts, token_ids):
            scores = super().score_group(prompt, texts, token_ids)
            assert [len(ids) > 0 for ids in token_ids] == [True] * len(texts)
            parts = [(("all", float(i)), *[("first", 7.0)] * (i == 0)) for i in range(len(texts))]
            return [replace(one, parts=those) for one, those in zip(scores, parts, strict=True)]

    batch = make_sampler(ScriptedEngines(), judge=Parts(HALF)).next_batch()
    size = len(batch.groups[0].responses)
    assert batch.reward_parts == {"all": (size - 1) / 2, "first": 7.0}


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
        sampler={"new_executor": lambda: ThreadPoolExecutor(2)},
        mode="partial",
        max_staleness=1,
        saved_groups="all",
    )
    first = sampler._cursor.prompt(0).id
    sampler.next_batch()
    waiting = sampler.state_dict().reserve.open[0]
    assert {response.finish_reason for response in waiting.responses} <= {"stop", "length"}
    assert 0 in [saved.group.prompt_index for saved in sampler.next_batch().saved]
