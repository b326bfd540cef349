"""The sampler: batches that depend on the engines' speed, or an endless search."""

import pytest

from megadapo.errors import SamplingError
from tests.support.rollout.samplers import RARE, contents, make_sampler, take
from tests.support.rollout.scripted_engines import (
    POLICY_VERSION,
    ScriptedEngines,
)


def test_batch_has_mixed_groups():
    for batch in take(make_sampler(ScriptedEngines()), 5):
        assert batch.num_kept == 8
        for group in batch.groups:
            assert 0 < sum(group.correct) < 3
            assert group.rewards == tuple(1.0 if ok else -1.0 for ok in group.correct)


@pytest.mark.parametrize("finish", ["short first", "last first", "at random"])
@pytest.mark.parametrize("slots", [3, 12, 200])
@pytest.mark.parametrize("at_once", [1, 5])
def test_batch_does_not_depend_on_engines(finish, slots, at_once):
    """A batch of early finishers would prefer short responses."""
    expected = take(make_sampler(ScriptedEngines()), 6)
    other = take(make_sampler(ScriptedEngines(finish, slots=slots, at_once=at_once)), 6)
    assert contents(expected) == contents(other)


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
    assert batch.num_all_correct == batch.num_sampled == 22


def test_next_step_starts_after_the_batch():
    """Prompts requested beyond it with old weights are requested again."""
    engines = ScriptedEngines(slots=200)
    batches = take(make_sampler(engines, saved_groups="all"), 4)
    assert sum(batch.num_surplus + batch.num_stopped for batch in batches) > 0
    for before, after in zip(batches, batches[1:], strict=False):
        first = min(sampled.group.prompt_index for sampled in after.saved)
        assert first == max(group.prompt_index for group in before.groups) + 1
    for version, batch in enumerate(batches, start=POLICY_VERSION):
        assert batch.num_from_reserve == batch.num_to_reserve == 0
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
    assert batch.num_stopped + batch.num_surplus > 0
    assert batch.num_tokens_stopped > 0 and engines.num_in_flight == 0


def test_seeds_give_different_responses():
    assert contents(take(make_sampler(ScriptedEngines(), seed=0), 1)) != contents(
        take(make_sampler(ScriptedEngines(), seed=1), 1)
    )


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
    assert 0 < batch.num_kept < 8
    assert batch.num_sampled == 16
    with pytest.raises(SamplingError, match="of 8 groups"):
        make_sampler(ScriptedEngines(), on_shortfall="stop", **few).next_batch()
