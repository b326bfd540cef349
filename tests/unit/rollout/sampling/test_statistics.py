"""A step's message, saved groups and keep rates, and the reserve of groups."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from megadapo.codec import decode, encode
from megadapo.data.group import Group, Response
from megadapo.observe.rollouts.saved_group import Disposition
from megadapo.rollout.sampling.reserve import OpenEntry, PromptHistory, Reserve
from megadapo.rollout.sampling.sampler import describe_shortfall
from megadapo.rollout.sampling.statistics import (
    GroupStats,
    SampledBatch,
    SampledGroup,
    choose_saved,
)
from tests.support.rollout.groups import EXPERTS, make_group
from tests.support.rollout.scripted_engines import make_prompts


def test_shortfall_message_has_histogram_and_cause():
    assert describe_shortfall(1, 8, {3: 1, 0: 70, 16: 9}, 16) == (
        "the batch has only 1 of 8 groups after 80 requests: 70 groups were all incorrect, "
        "9 all correct\n"
        "    0 of 16 correct: 70 groups\n"
        "    3 of 16 correct: 1 groups\n"
        "   16 of 16 correct: 9 groups\n"
        "the problems are too hard for the model, or the scorer cannot read the answers: "
        "check both, or raise sampling.responses_per_prompt or sampling.max_asked_per_prompt"
    )
    assert describe_shortfall(0, 8, {3: 1}, 3).splitlines()[-1] == (
        "the problems are too easy for the model: use harder ones, "
        "or raise sampling.responses_per_prompt or sampling.max_asked_per_prompt"
    )


def sampled(*dispositions: Disposition) -> list[SampledGroup]:
    (prompt,) = make_prompts(1)
    groups = [
        Group(prompt_index=index, prompt=prompt, prompt_ids=(), responses=(), scores=())
        for index in range(len(dispositions))
    ]
    return [
        SampledGroup(group=group, disposition=disposition, from_reserve=False)
        for group, disposition in zip(groups, dispositions, strict=True)
    ]


def dispositions_of(groups: Sequence[SampledGroup]) -> list[str]:
    return [group.disposition for group in groups]


def test_saved_groups_cover_every_disposition():
    """Trained groups alone would hide why the others were rejected."""
    step = sampled(*["all_wrong"] * 20, *["trained"] * 20, *["all_correct"] * 20, "dropped")
    assert Counter(dispositions_of(choose_saved(step, 8))) == {
        "trained": 5,
        "all_wrong": 1,
        "all_correct": 1,
        "dropped": 1,
    }
    assert dispositions_of(choose_saved(step, 1)) == ["trained"]
    assert choose_saved(step, 0) == ()


def test_saved_groups_are_spread_over_prompt_indices():
    step = sampled(*["trained"] * 12)
    chosen = choose_saved(list(reversed(step)), 4)
    assert [group.group.prompt_index for group in chosen] == [0, 3, 6, 9]


@pytest.mark.parametrize("limit", [3, 5, "all"])
def test_all_groups_are_saved_below_the_limit(limit):
    step = sampled("all_wrong", "to_reserve", "all_wrong")
    assert list(choose_saved(step, limit)) == step
    assert choose_saved([], limit) == ()


def stats(prompt_id: str, num_correct: int) -> GroupStats:
    return GroupStats(
        num_generated=40,
        prompt_index=0,
        prompt_id=prompt_id,
        num_correct=num_correct,
        num_responses=4,
        reward_sum=0.0,
        reward_range=(0.0, 0.0),
        lengths=(10,) * 4,
        mean_logprobs=(),
        repetitions=(),
        is_one_text=False,
        num_truncated=0,
        is_mixed=0 < num_correct < 4,
        seconds=1.0,
    )


def test_group_of_one_text_has_several_responses():
    """With one response a prompt every group would be one."""
    group = make_group(0)
    first, second = group.responses
    for responses, is_one_text in (
        ((first, second), True),
        ((first, replace(second, text="6")), False),
        ((first,), False),
    ):
        changed = replace(group, responses=responses, scores=group.scores[: len(responses)])
        assert GroupStats.from_group(changed, is_mixed=False).is_one_text == is_one_text


def test_keep_rate_depends_on_the_level():
    """One rate for all prompts would expect solved ones to fill a batch as fast as others."""
    difficulty = PromptHistory()
    prompts = [f"p{i}" for i in range(300)]
    difficulty.end_step([stats(p, 4 if i < 150 else 2) for i, p in enumerate(prompts)])
    difficulty.end_step([stats(p, 4 if i < 150 else 2) for i, p in enumerate(prompts)])
    assert difficulty.keep_rate("p0").value < 0.05
    assert difficulty.keep_rate("p299").value > 0.95
    assert 0.4 < difficulty.keep_rate("never seen").value < 0.6


def test_finished_group_is_kept_if_it_is_mixed():
    reserve = Reserve(open={index: OpenEntry(5, ()) for index in (1, 2)})
    reserve.finish(make_group(1), is_mixed=True)
    reserve.finish(make_group(2), is_mixed=False)
    assert (reserve.versions, reserve.finished.keys(), reserve.open) == ({1: 5}, {1}, {})
    again = decode(Reserve, json.loads(json.dumps(encode(reserve), allow_nan=False)))
    assert again.versions == {1: 5}
    assert encode(again.take(1)) == encode(make_group(1))
    assert again == Reserve()


def test_copy_does_not_change_with_the_reserve():
    """A checkpoint is encoded in a thread while the next groups finish."""
    reserve = Reserve(open={1: OpenEntry(5, ())})
    copy, text = reserve.copy(), json.dumps(encode(reserve))
    reserve.finish(make_group(1), is_mixed=True)
    assert json.dumps(encode(copy)) == text


def test_counts_of_a_batch_that_is_not_taken_survive_json():
    """A resumed run would report the accuracy of later groups only."""
    batch = SampledBatch(saved_groups="all")
    batch.counts |= {"groups/stopped": 3, "time/overdue_s": 0.5}
    for index in range(3):
        batch.add(make_group(index), is_mixed=index == 1)
    batch.unscored.append(make_group(7))
    copy = batch.copy()
    text = json.dumps(encode(batch), allow_nan=False)
    again = decode(SampledBatch, json.loads(text))
    assert repr(again.stats) == repr(batch.stats)
    assert again.counts == batch.counts
    assert json.dumps(encode(again)) == text
    batch.add(make_group(4), is_mixed=False)
    batch.counts["groups/stopped"] += 1
    assert json.dumps(encode(copy)) == text


def test_unfinished_group_survives_json_exactly():
    """A changed token would make the engine continue another text."""
    responses = tuple(
        Response(
            token_ids=np.arange(size, dtype=np.int32),
            logprobs=np.linspace(-1.0, 0.0, size, dtype=np.float32),
            finish_reason=reason,
            text="x" * size,
            policy_versions=np.sort(np.arange(size) % 3).astype(np.int32) + 4,
            experts=EXPERTS[: 1 + size] if size else None,
        )
        for size, reason in ((0, "unfinished"), (7, "unfinished"), (5, "stop"))
    )
    reserve = Reserve(open={9: OpenEntry(4, responses)})
    after = decode(Reserve, json.loads(json.dumps(encode(reserve), allow_nan=False)))
    assert after.open.keys() == {9} and after.open[9].version == 4
    again = after.open[9].responses
    assert [one.oldest_version for one in again] == [float("inf"), 4, 4]
    for one, two in zip(responses, again, strict=True):
        assert (one.text, one.finish_reason) == (two.text, two.finish_reason)
        for name in ("token_ids", "logprobs", "policy_versions", "experts"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


def test_rejected_groups_beyond_the_limit_are_forgotten():
    """The texts of all rejected groups of a step are gigabytes."""
    batch = SampledBatch(saved_groups=2)
    wrong = [
        replace(make_group(index), scores=(make_group(index).scores[1],) * 2)
        for index in (3, 1, 2, 0)
    ]
    for group in (*wrong, make_group(5)):
        batch.add(group, is_mixed=False)
    assert [group.prompt_index for group in batch.rejected] == [1, 0, 5]
