"""The order of prompts: a resumed run must see exactly what the uninterrupted one would have."""

from __future__ import annotations

import hashlib
import json

import pytest

from megadapo.data.prompts import Prompt, PromptStream
from megadapo.errors import DataError

PROMPTS = [Prompt(f"{i:02d}", (("user", f"question {i}"),), str(i), "test") for i in range(7)]
RECORDED = ["06", "01", "02", "04", "03", "00", "05", "01", "05"]


def ids(stream: PromptStream, stop: int, start: int = 0) -> list[str]:
    return [stream.at(order).id for order in range(start, stop)]


def test_each_epoch_takes_every_prompt_once_in_an_order_of_its_own() -> None:
    stream = PromptStream(PROMPTS, seed=0)
    epochs = [ids(stream, 7 * (epoch + 1), 7 * epoch) for epoch in range(4)]
    assert all(sorted(epoch) == [prompt.id for prompt in PROMPTS] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [stream.epoch(order) for order in (0, 6, 7, 27, 28)] == [0, 0, 1, 3, 4]


def test_a_place_holds_the_same_prompt_whatever_was_asked_for_before() -> None:
    """A resumed run goes back to a place, and must find there what was there."""
    whole = ids(PromptStream(PROMPTS, seed=3), 60)
    stream = PromptStream(PROMPTS, seed=3)
    for order in (59, 0, 30, 7, 6, 58, 14, 13, 0):
        assert stream.at(order).id == whole[order]


def test_seeds_give_different_orders_and_no_shuffle_keeps_that_of_the_file() -> None:
    orders = {tuple(ids(PromptStream(PROMPTS, seed), 7)) for seed in range(20)}
    assert len(orders) > 15
    in_file = [prompt.id for prompt in PROMPTS]
    assert ids(PromptStream(PROMPTS, 0, shuffle=False), 14) == in_file * 2


def test_the_order_is_the_same_on_every_machine_and_python() -> None:
    # Recorded: another order after an upgrade would break the resume of every saved run.
    assert ids(PromptStream(PROMPTS, seed=0), 9) == RECORDED


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
            PromptStream(prompts, seed=0).check_state(state)
    with pytest.raises(
        DataError, match="^the checkpoint was saved with another seed \\(seed 0 there, 1 here\\)"
    ):
        PromptStream(PROMPTS, seed=1).check_state(state)
    with pytest.raises(
        DataError, match="^the checkpoint was saved with another data.shuffle \\(shuffle True"
    ):
        PromptStream(PROMPTS, seed=0, shuffle=False).check_state(state)


def test_a_state_survives_json_and_without_names_it_is_refused() -> None:
    stream = PromptStream(PROMPTS, seed=0)
    stream.check_state(json.loads(json.dumps(stream.state_dict())))
    with pytest.raises(DataError, match="prompts have changed"):
        stream.check_state({})


def test_a_stream_without_prompts_is_refused() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptStream([], seed=0)
