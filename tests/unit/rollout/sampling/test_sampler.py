"""The sampler in each mode: batches that depend on the engines' speed, and groups that are lost."""

import itertools
import math
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from megadapo.data.prompts import PromptStream
from megadapo.errors import CheckpointError, SamplingError
from megadapo.observe.rollouts.saved_group import Disposition
from megadapo.rollout.types import SamplingSettings, response_seeds
from megadapo.run.rollouts import SAMPLER_STATE, from_first_prompt
from tests.support.rollout.samplers import (
    HALF,
    MAX_TOKENS,
    RARE,
    contents,
    make_sampler,
    saved_state,
    take,
)
from tests.support.rollout.scripted_engines import (
    POLICY_VERSION,
    Grades,
    RightAtLeast,
    ScriptedEngines,
    make_prompts,
    respond,
)

PARTIAL = {"mode": "partial", "max_staleness": 2, "num_prompts": 1000}


@pytest.mark.parametrize("mode", [{}, {"mode": "one_step_off", "max_staleness": 1}])
def test_batch_does_not_depend_on_engines(mode):
    """A batch of early finishers would prefer short responses."""
    expected = contents(take(make_sampler(ScriptedEngines(), **mode), 6))
    orders = ("short first", "last first", "at random")
    for finish, slots, at_once in itertools.product(orders, (3, 12, 200), (1, 5)):
        engines = ScriptedEngines(finish, slots=slots, at_once=at_once)
        found = contents(take(make_sampler(engines, **mode), 6))
        assert found == expected, (finish, slots, at_once)


def test_batch_is_the_first_mixed_groups():
    (every,) = take(make_sampler(ScriptedEngines(), selection="all", prompts_per_step=40), 1)
    mixed = [group.prompt_index for group in every.groups if 0 < sum(group.correct) < 3]
    batches = take(make_sampler(ScriptedEngines("short first")), 2)
    indices = [group.prompt_index for batch in batches for group in batch.groups]
    assert indices == mixed[:16]


@pytest.mark.parametrize("mode", [{}, {"mode": "one_step_off", "max_staleness": 1}])
def test_no_surplus_if_every_group_is_kept(mode):
    """An uncertain keep rate would waste a group in every step."""
    engines = ScriptedEngines(slots=200)
    take(make_sampler(engines, selection="all", prompts_per_step=40, **mode), 3)
    assert engines.asked == list(range(120))


def test_custom_is_mixed():
    """Comparing steps uses it; all-correct groups can then be in the batch."""
    every_third = {"is_mixed": lambda group: group.prompt_index % 3 == 0}
    (batch,) = take(make_sampler(ScriptedEngines(), bound=0, sampler=every_third), 1)
    assert [group.prompt_index for group in batch.groups] == [3 * place for place in range(8)]
    assert batch.num_at("all_correct") == len(batch.stats) == 22


def test_graded_groups_are_mixed_if_their_rewards_differ():
    """A bound of 0 makes nearly all of them all correct, and the run ends as too easy."""
    pairs = {"responses_per_prompt": 2, "prompts_per_step": 20}
    sampler = make_sampler(ScriptedEngines(), judge=Grades(), saved_groups="all", **pairs)
    batch = sampler.next_batch()
    assert all(len({*group.rewards}) > 1 for group in batch.groups)
    equal = [entry.group for entry in batch.saved if entry.disposition == "equal"]
    assert len(equal) == batch.num_at("equal") > 0
    assert all(len({*group.rewards}) == 1 for group in equal)
    assert math.isnan(batch.accuracy) and 0.0 < batch.reward_mean < 1.0
    assert saved_state(sampler)["difficulty"]["prompts"].keys() == {
        group.prompt_id for group in batch.stats
    }


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (RightAtLeast(0), "all correct\n.*rewards are from 1 to 1; the rule says what is correct"),
        (
            Grades(by_prompt=True),
            "groups the rewards .* are equal, .*; rewards are from 0.25 to 0.75. Use a finer",
        ),
    ],
)
def test_shortfall_names_what_decided_and_the_range(judge, message):
    """ "Use harder problems" is no help if a bound on the score is the cause."""
    sampler = make_sampler(
        ScriptedEngines(), judge=judge, max_asked_per_prompt=2.0, sampler={"verdict": "the rule"}
    )
    with pytest.raises(SamplingError, match=f"(?s){message}"):
        sampler.next_batch()


def test_next_step_starts_after_the_batch():
    """Prompts requested beyond it with old weights are requested again."""
    engines = ScriptedEngines(slots=200)
    batches = take(make_sampler(engines, saved_groups="all"), 4)
    assert sum(batch.num_surplus + batch.counts["groups/stopped"] for batch in batches) > 0
    for before, after in zip(batches, batches[1:], strict=False):
        first = min(sampled.group.prompt_index for sampled in after.saved)
        assert first == max(group.prompt_index for group in before.groups) + 1
    for version, batch in enumerate(batches, start=POLICY_VERSION):
        assert batch.num_from_reserve == len(batch.to_reserve) == 0
        responses = [response for group in batch.groups for response in group.responses]
        assert {int(v) for one in responses for v in one.policy_versions} == {version}


def test_requests_never_exceed_the_engines_room():
    """A backlog inside an engine could not move to another engine."""
    engines = ScriptedEngines("at random", slots=12)
    submit, in_flight = engines.submit, []

    def watched(groups):
        submit(groups)
        in_flight.append(engines.num_in_flight)

    engines.submit = watched
    take(make_sampler(engines), 3)
    assert max(in_flight) == 4


def test_stragglers_are_cancelled_once_useless():
    """Long groups behind the batch would otherwise be generated completely."""
    engines = ScriptedEngines("last first", slots=200)
    (batch,) = take(make_sampler(engines), 1)
    assert batch.counts["groups/stopped"] + batch.num_surplus > 0
    assert batch.counts["tokens/stopped"] > 0 and engines.num_in_flight == 0


@pytest.mark.parametrize(("bound", "histogram"), [(10_000, "  0 of 3"), (-1, "  3 of 3")])
def test_no_mixed_group_is_an_error(bound, histogram):
    engines = ScriptedEngines()
    with pytest.raises(SamplingError, match="0 of 8 groups") as raised:
        make_sampler(engines, bound=bound, max_asked_per_prompt=5.0).next_batch()
    assert f"{histogram} correct: 40 groups" in str(raised.value)
    assert len(engines.asked) == 40


def test_shortfall_trains_on_found_groups_or_stops_the_run():
    few = {"bound": RARE, "max_asked_per_prompt": 2.0}
    batch = make_sampler(ScriptedEngines(), **few).next_batch()
    assert 0 < len(batch.groups) < 8
    assert len(batch.stats) == 16
    with pytest.raises(SamplingError, match="of 8 groups"):
        make_sampler(ScriptedEngines(), on_shortfall="stop", **few).next_batch()


def test_rounds_wait_for_all_groups_and_drop_surplus():
    """verl requests 1,536 prompts at a time, and another 1,536 if these do not suffice."""
    engines = ScriptedEngines("short first", slots=30)
    sampler = make_sampler(engines, mode="rounds", prompts_per_round=24, num_prompts=1000)
    batches = take(sampler, 6)
    assert {len(batch.stats) % 24 for batch in batches} == {0}
    assert sum(batch.num_surplus for batch in batches) > 0
    assert engines.asked == list(range(sum(len(batch.stats) for batch in batches)))
    for batch in batches:
        assert (
            len(batch.groups) == 8 and batch.counts["groups/stopped"] == batch.num_from_reserve == 0
        )
        indices = [group.prompt_index for group in batch.groups]
        assert indices == sorted(indices)


def test_second_round_if_the_first_does_not_suffice():
    engines = ScriptedEngines(slots=9)
    sampler = make_sampler(
        engines, bound=RARE, mode="rounds", num_prompts=1000, max_asked_per_prompt=40.0
    )
    (batch,) = take(sampler, 1)
    assert len(batch.groups) == 8 and len(batch.stats) > 16 and len(batch.stats) % 8 == 0


@pytest.mark.parametrize("finish", ["in order", "short first", "last first", "at random"])
def test_partial_loses_and_repeats_no_group(finish):
    engines = ScriptedEngines(finish, slots=60)
    sampler = make_sampler(engines, saved_groups="all", **PARTIAL)
    batches = take(sampler, 12)
    trained = [group.prompt_index for batch in batches for group in batch.groups]
    assert len(trained) == len(set(trained)) == 12 * 8
    consumed = {s.group.prompt_index for batch in batches for s in batch.saved}
    reserve = sampler.state_dict().reserve
    waiting = reserve.open.keys() | reserve.finished.keys()
    assert set(engines.asked) == consumed | waiting
    # with so few groups per step, many can become due at once
    assert sum(len(batch.dropped) for batch in batches) < 0.15 * len(trained)


def test_partial_step_without_new_groups():
    """Groups that had to be waited for may fill the next batch as well."""
    batches = take(make_sampler(ScriptedEngines("short first", slots=12), **PARTIAL), 6)
    assert [len(batch.groups) for batch in batches] == [8] * 6
    nothing_new = [batch for batch in batches if len(batch.stats) == 0]
    assert nothing_new and all(np.isnan(batch.accuracy) for batch in nothing_new)


def test_partial_response_has_versions_per_token():
    engines = ScriptedEngines("last first", slots=60)
    batches = take(make_sampler(engines, **PARTIAL), 12)
    spans = set()
    for version, batch in enumerate(batches, start=POLICY_VERSION):
        for group in batch.groups:
            assert group.oldest_version >= version - 2, "older than max_staleness allows"
            for response in group.responses:
                versions = response.policy_versions.tolist()
                assert len(versions) == len(response.token_ids) and versions == sorted(versions)
                spans.add(len(set(versions)))
    assert spans >= {1, 2, 3}


def test_partial_carries_groups_and_stops_none():
    """Engines must not wait for the longest response of a step."""
    engines = ScriptedEngines(slots=12)
    batches = take(make_sampler(engines, **PARTIAL), 6)
    assert all(batch.counts["groups/carried"] > 0 for batch in batches)
    assert all(
        batch.counts["groups/stopped"] == batch.counts["tokens/stopped"] == 0 for batch in batches
    )


def test_accuracy_range():
    config = {"accuracy_range": (0.0, 0.5), "saved_groups": "all"}
    batches = take(make_sampler(ScriptedEngines(), **config), 3)
    right = [sum(group.correct) for batch in batches for group in batch.groups]
    assert set(right) == {1}
    out = [s for b in batches for s in b.saved if s.disposition == "out_of_band"]
    assert {sum(s.group.correct) for s in out} == {2}


def test_sampler_begins_with_the_first_of_other_prompts():
    """With --accept-changes=data.train; a kept position would skip prompts of the new data."""
    sampler = make_sampler(ScriptedEngines(), num_prompts=31)
    take(sampler, 2)
    others = make_sampler(ScriptedEngines(), num_prompts=30)
    state = {SAMPLER_STATE: saved_state(sampler), "kl": 0.5}
    state = from_first_prompt(state, others._prompts)
    others.load_state_dict(state[SAMPLER_STATE])
    fresh = make_sampler(ScriptedEngines(), num_prompts=30)
    assert contents(take(others, 2)) == contents(take(fresh, 2))


@pytest.mark.parametrize("key", ["cursor", "difficulty", "reserve", "counters", "schedule"])
def test_damaged_state_is_rejected(key):
    state = saved_state(make_sampler(ScriptedEngines()))
    del state[key]
    with pytest.raises(CheckpointError):
        make_sampler(ScriptedEngines()).load_state_dict(state)


def test_statistics_cover_all_responses():
    """Over kept groups alone, accuracy would always be near a half."""
    engines = ScriptedEngines()
    sampler = make_sampler(engines, bound=RARE, num_prompts=500, max_asked_per_prompt=40.0)
    batch = sampler.next_batch()
    assert len(batch.stats) == max(group.prompt_index for group in batch.groups) + 1
    assert batch.num_at("all_wrong") > 4 * len(batch.groups)
    responses = all_responses(batch)
    lengths = [len(text) for text in responses]
    right = [sum(map(int, text)) >= RARE for text in responses]
    assert batch.accuracy == np.mean(right) < 0.1
    assert batch.reward_mean == pytest.approx(2 * np.mean(right) - 1)
    assert sorted(batch.response_lengths) == sorted(lengths)
    assert batch.truncated_fraction == np.mean([n == MAX_TOKENS for n in lengths]) > 0
    assert sum(group.num_generated for group in batch.stats) == sum(lengths)


def all_responses(batch) -> list[str]:
    """Generate the responses of all requests again."""
    settings = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=MAX_TOKENS)
    prompts = PromptStream(make_prompts(500), 0)
    return [
        respond(seed, settings).text
        for index in range(len(batch.stats))
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
        assert len(indices) == len(batch.stats) + len(reserved)
        dispositions = Counter(sampled.disposition for sampled in batch.saved)
        assert dispositions["trained"] == len(batch.groups)
        assert dispositions["dropped"] == len(batch.dropped) + batch.num_surplus
        assert dispositions["to_reserve"] == len(batch.to_reserve)
        assert dispositions["all_correct"] == batch.num_at("all_correct")
        assert dispositions["all_wrong"] == batch.num_at("all_wrong")
        trained = [sampled.group for sampled in batch.saved if sampled.disposition == "trained"]
        assert {id(one) for one in trained} == {id(one) for one in batch.groups}
        kept = [sampled for sampled in reserved if sampled.disposition == "trained"]
        assert len(kept) == batch.num_from_reserve
    seen = Counter(sampled.disposition for batch in batches for sampled in batch.saved)
    assert seen.keys() == {*get_args(Disposition)} - {"equal", "held_out"}, (
        f"not all dispositions occurred: {seen}"
    )


def test_saved_groups_change_nothing_else():
    by_default = take(make_sampler(ScriptedEngines()), 4)
    assert [(len(batch.groups), batch.saved) for batch in by_default] == [(8, ())] * 4
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
    assert len(sampler.next_batch().groups) == 8


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
    assert judge.seconds <= batch.counts["time/reward_s"] < 2 * judge.seconds


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
    first = sampler._prompts.at(0).id
    sampler.next_batch()
    waiting = sampler.state_dict().reserve.open[0]
    assert {response.finish_reason for response in waiting.responses} <= {"stop", "length"}
    assert 0 in [saved.group.prompt_index for saved in sampler.next_batch().saved]
