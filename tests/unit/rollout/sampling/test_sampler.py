"""Would catch: a batch that depends on the engines' speed, number or room, or an endless search."""

from __future__ import annotations

import pytest

from megadapo.errors import SamplingError
from tests.support.rollout.samplers import RARE, contents, make_sampler, take
from tests.support.rollout.scripted_engines import (
    POLICY_VERSION,
    ScriptedEngines,
)


def test_the_batch_is_full_of_groups_that_teach():
    for batch in take(make_sampler(ScriptedEngines()), 5):
        assert batch.num_kept == 8
        for group in batch.groups:
            assert 0 < sum(group.correct) < 3
            assert group.rewards == tuple(1.0 if ok else -1.0 for ok in group.correct)


@pytest.mark.parametrize("finish", ["short first", "last first", "at random"])
@pytest.mark.parametrize("slots", [3, 12, 200])
@pytest.mark.parametrize("at_once", [1, 5])
def test_neither_speed_nor_number_of_engines_matters(finish, slots, at_once):
    """Filling the batch with early finishers would prefer short answers."""
    expected = take(make_sampler(ScriptedEngines()), 6)
    other = take(make_sampler(ScriptedEngines(finish, slots=slots, at_once=at_once)), 6)
    assert contents(expected) == contents(other)


def test_the_batch_is_the_first_groups_with_a_signal():
    """A late group is waited for, never replaced by a shorter one."""
    (every,) = take(make_sampler(ScriptedEngines(), selection="all", prompts_per_step=40), 1)
    with_signal = [group.order for group in every.groups if 0 < sum(group.correct) < 3]
    batches = take(make_sampler(ScriptedEngines("short first")), 2)
    orders = [group.order for batch in batches for group in batch.groups]
    assert orders == with_signal[:16]


@pytest.mark.parametrize("mode", [{}, {"mode": "one_step_off", "max_staleness": 1}])
def test_where_every_group_is_kept_none_is_asked_for_beyond_the_batch(mode):
    """An uncertain yield would have one more generated in every step, to be thrown away."""
    engines = ScriptedEngines(slots=200)
    take(make_sampler(engines, selection="all", prompts_per_step=40, **mode), 3)
    assert engines.asked == list(range(120))


def test_what_has_a_signal_can_be_said_from_outside():
    """As where steps are compared: groups that are all right or all wrong are in the batch too,
    and nothing is kept of the others."""
    every_third = {"is_mixed": lambda group: group.order % 3 == 0}
    (batch,) = take(make_sampler(ScriptedEngines(), bound=0, sampler=every_third), 1)
    assert [group.order for group in batch.groups] == [3 * place for place in range(8)]
    assert batch.num_all_correct == batch.num_sampled == 22


def test_groups_are_taken_in_asking_order_and_none_twice():
    orders = [
        group.order for batch in take(make_sampler(ScriptedEngines()), 12) for group in batch.groups
    ]
    assert orders == sorted(set(orders))


def test_the_next_step_begins_behind_the_last_group_of_the_batch():
    """What was asked for beyond it, with old weights, is neither used nor lost."""
    engines = ScriptedEngines(slots=200)
    batches = take(make_sampler(engines, saved_groups="all"), 4)
    assert sum(batch.num_surplus + batch.num_stopped for batch in batches) > 0
    for before, after in zip(batches, batches[1:], strict=False):
        first = min(sampled.group.order for sampled in after.saved)
        assert first == max(group.order for group in before.groups) + 1
    for version, batch in enumerate(batches, start=POLICY_VERSION):
        assert batch.num_from_reserve == batch.num_to_reserve == 0
        samples = [sample for group in batch.groups for sample in group.samples]
        assert {int(v) for s in samples for v in s.policy_versions} == {version}


def test_the_engines_are_never_asked_for_more_than_they_have_room_for():
    """A backlog inside an engine could neither be dealt out again nor be taken back cheaply."""
    engines = ScriptedEngines("at random", slots=12)
    largest = 0
    submit = engines.submit

    def watched(groups):
        nonlocal largest
        submit(groups)
        largest = max(largest, engines.num_in_flight)

    engines.submit = watched
    take(make_sampler(engines), 3)
    assert largest == 4


def test_stragglers_lose_their_slots_once_they_cannot_get_in():
    """The long groups behind the last one needed would otherwise run to their end."""
    engines = ScriptedEngines("last first", slots=200)
    (batch,) = take(make_sampler(engines), 1)
    assert batch.num_stopped + batch.num_surplus > 0
    assert batch.num_tokens_stopped > 0 and engines.num_in_flight == 0


def test_another_seed_draws_other_responses():
    assert contents(take(make_sampler(ScriptedEngines(), seed=0), 1)) != contents(
        take(make_sampler(ScriptedEngines(), seed=1), 1)
    )


@pytest.mark.parametrize(("bound", "histogram"), [(10_000, "  0 of 3"), (-1, "  3 of 3")])
def test_nothing_that_teaches_ends_in_a_message_and_not_in_an_endless_loop(bound, histogram):
    engines = ScriptedEngines()
    with pytest.raises(SamplingError, match="0 of 8 groups") as raised:
        make_sampler(engines, bound=bound, max_asked_per_prompt=5.0).next_batch()
    assert f"{histogram} right: 40 groups" in str(raised.value)
    assert len(engines.asked) == 40


def test_at_the_bound_the_step_trains_on_what_was_found():
    batch = make_sampler(ScriptedEngines(), bound=RARE, max_asked_per_prompt=2.0).next_batch()
    assert 0 < batch.num_kept < 8
    assert batch.num_sampled == 16


def test_a_shortfall_can_stop_the_run_instead():
    sampler = make_sampler(
        ScriptedEngines(), bound=RARE, max_asked_per_prompt=2.0, on_shortfall="stop"
    )
    with pytest.raises(SamplingError, match="of 8 groups"):
        sampler.next_batch()
