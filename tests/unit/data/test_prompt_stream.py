"""The order of prompts: a resumed run must see exactly what the uninterrupted one would have."""

from __future__ import annotations

import hashlib
import json

import pytest

from megadapo.data.prompts import Prompt, PromptStream
from megadapo.errors import DataError

PROMPTS = [Prompt(f"{i:02d}", (("user", f"question {i}"),), str(i), "test") for i in range(7)]
RECORDED = ["06", "01", "02", "04", "03", "00", "05", "01", "05"]


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


def test_each_epoch_takes_every_prompt_once_in_an_order_of_its_own() -> None:
    stream = PromptStream(PROMPTS, seed=0)
    epochs = [ids(stream.next(7)) for _ in range(4)]
    assert all(sorted(epoch) == ids(PROMPTS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert stream.epoch == 4


def test_the_order_does_not_depend_on_how_many_are_taken_at_once() -> None:
    whole = ids(PromptStream(PROMPTS, seed=3).next(60))
    for size in (1, 2, 3, 7, 8, 20):
        stream = PromptStream(PROMPTS, seed=3)
        pieces = [prompt for _ in range(60 // size) for prompt in ids(stream.next(size))]
        assert pieces == whole[: len(pieces)]
    assert PromptStream(PROMPTS, seed=3).next(0) == []


def test_seeds_give_different_orders_and_no_shuffle_keeps_that_of_the_file() -> None:
    orders = {tuple(ids(PromptStream(PROMPTS, seed).next(7))) for seed in range(20)}
    assert len(orders) > 15
    assert ids(PromptStream(PROMPTS, 0, shuffle=False).next(14)) == ids(PROMPTS) * 2


def test_the_order_is_the_same_on_every_machine_and_python() -> None:
    # Recorded: another order after an upgrade would break the resume of every saved run.
    assert ids(PromptStream(PROMPTS, seed=0).next(9)) == RECORDED


@pytest.mark.parametrize("taken", range(0, 22))
def test_a_resumed_stream_continues_exactly_at_every_place(taken: int) -> None:
    """At 7, 14 and 21 an epoch has just ended: the classic place to repeat or skip a prompt."""
    uninterrupted = PromptStream(PROMPTS, seed=5)
    uninterrupted.next(taken)
    state = json.loads(json.dumps(uninterrupted.state_dict()))
    resumed = PromptStream(PROMPTS, seed=5)
    resumed.next(3)
    resumed.load_state_dict(state)
    assert resumed.epoch == uninterrupted.epoch
    assert ids(resumed.next(20)) == ids(uninterrupted.next(20))
    assert resumed.state_dict() == uninterrupted.state_dict()


def test_the_fingerprint_is_that_of_saved_runs() -> None:
    """Another one after an upgrade would refuse to resume every saved run."""
    fingerprint = hashlib.sha256(b"00010203040506").hexdigest()
    assert PromptStream(PROMPTS, seed=0).state_dict()["fingerprint"] == fingerprint


def test_other_prompts_another_seed_or_another_order_are_refused() -> None:
    state = PromptStream(PROMPTS, seed=0).state_dict()
    for prompts in (PROMPTS[:-1], PROMPTS[::-1], [*PROMPTS, PROMPTS[0]]):
        with pytest.raises(
            DataError, match="^the prompts have changed since the checkpoint was saved \\(finger"
        ):
            PromptStream(prompts, seed=0).load_state_dict(state)
    with pytest.raises(
        DataError, match="^the checkpoint was saved with another seed \\(seed 0 there, 1 here\\)"
    ):
        PromptStream(PROMPTS, seed=1).load_state_dict(state)
    with pytest.raises(
        DataError, match="^the checkpoint was saved with another data.shuffle \\(shuffle True"
    ):
        PromptStream(PROMPTS, seed=0, shuffle=False).load_state_dict(state)


@pytest.mark.parametrize(
    "damage",
    [
        {"epoch": -1},
        {"epoch": None},
        {"epoch": 1.5},
        {"position": 7},
        {"position": -1},
        {"position": "3"},
        {"position": True},
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage: dict) -> None:
    stream = PromptStream(PROMPTS, seed=0)
    stream.next(3)
    before = stream.state_dict()
    with pytest.raises(DataError, match="damaged|out of range"):
        stream.load_state_dict(before | damage)
    with pytest.raises(DataError, match="prompts have changed"):
        stream.load_state_dict({})
    assert stream.state_dict() == before


def test_a_stream_without_prompts_is_refused() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptStream([], seed=0)
