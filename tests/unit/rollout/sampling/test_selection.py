from collections import Counter
from collections.abc import Sequence

import pytest

from megadapo.data.batch import Group
from megadapo.observe.rollouts.saved_group import Disposition
from megadapo.rollout.sampling.selection import (
    SampledGroup,
    choose_saved,
    describe_shortfall,
)
from tests.support.rollout.scripted_engines import make_prompts


def test_a_shortfall_shows_the_histogram_and_points_at_the_cause():
    text = describe_shortfall(1, 8, {0: 70, 3: 1, 16: 9}, 16)
    assert "only 1 of 8 groups" in text and "asking for 80" in text
    assert "70 were all wrong, 9 all right" in text
    assert "  0 of 16 right: 70 groups" in text and " 16 of 16 right: 9 groups" in text
    assert "too hard" in text and "sampling.max_asked_per_prompt" in text
    assert "too easy" in describe_shortfall(0, 8, {16: 80}, 16)


def test_a_shortfall_is_told_word_for_word():
    """With as many all wrong as all right, of which here none were seen."""
    assert describe_shortfall(0, 8, {2: 7, 1: 40}, 3) == (
        "only 0 of 8 groups for the batch after asking for 47: 0 were all wrong, 0 all right\n"
        "    1 of 3 right: 40 groups\n"
        "    2 of 3 right: 7 groups\n"
        "the problems are too hard for the model, or its answers miss the format the scorer reads; "
        "or raise sampling.responses_per_prompt or sampling.max_asked_per_prompt"
    )
    assert describe_shortfall(0, 8, {3: 1}, 3).splitlines()[-1] == (
        "the problems are too easy for the model: use harder ones; "
        "or raise sampling.responses_per_prompt or sampling.max_asked_per_prompt"
    )


def sampled(*fates: Disposition) -> list[SampledGroup]:
    (prompt,) = make_prompts(1)
    nothing = dict.fromkeys(("samples", "rewards", "correct", "answers", "symbolic_correct"), ())
    return [
        SampledGroup(
            group=Group(order=order, prompt=prompt, **nothing), fate=fate, from_reserve=False
        )
        for order, fate in enumerate(fates)
    ]


def fates_of(groups: Sequence[SampledGroup]) -> list[str]:
    return [group.fate for group in groups]


def test_a_few_saved_groups_show_every_fate():
    """Eight trained groups alone would hide why the others were not."""
    step = sampled(*["all_wrong"] * 20, *["trained"] * 20, *["all_correct"] * 20, "dropped")
    assert Counter(fates_of(choose_saved(step, 8))) == {
        "trained": 5,
        "all_wrong": 1,
        "all_correct": 1,
        "dropped": 1,
    }
    assert fates_of(choose_saved(step, 1)) == ["trained"]
    assert choose_saved(step, 0) == ()


def test_saved_groups_lie_evenly_in_asking_order_whoever_finished_first():
    step = sampled(*["trained"] * 12)
    chosen = choose_saved(list(reversed(step)), 4)
    assert [group.group.order for group in chosen] == [0, 3, 6, 9]


@pytest.mark.parametrize("limit", [3, 5, "all"])
def test_no_more_groups_are_saved_than_there_are(limit):
    step = sampled("all_wrong", "to_reserve", "all_wrong")
    assert list(choose_saved(step, limit)) == step
    assert choose_saved([], limit) == ()
