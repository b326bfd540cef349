"""A step's message and saved groups, and what it tells of prompts: their keep rates."""

from collections import Counter
from collections.abc import Sequence

import pytest

from megadapo.data.group import Group
from megadapo.observe.rollouts.saved_group import Disposition
from megadapo.rollout.sampling.sampler import PromptHistory, describe_shortfall
from megadapo.rollout.sampling.statistics import GroupStats, SampledGroup, choose_saved
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
        lengths=(10,) * 4,
        num_truncated=0,
        is_mixed=0 < num_correct < 4,
        seconds=1.0,
    )


def test_keep_rate_depends_on_the_level():
    """One rate for all prompts would expect solved ones to fill a batch as fast as others."""
    difficulty = PromptHistory()
    prompts = [f"p{i}" for i in range(300)]
    difficulty.end_step([stats(p, 4 if i < 150 else 2) for i, p in enumerate(prompts)])
    difficulty.end_step([stats(p, 4 if i < 150 else 2) for i, p in enumerate(prompts)])
    assert difficulty.keep_rate("p0").value < 0.05
    assert difficulty.keep_rate("p299").value > 0.95
    assert 0.4 < difficulty.keep_rate("never seen").value < 0.6
