"""The order of prompts, which a resumed run must repeat exactly."""

import hashlib
import json

import pytest

from megadapo.data.prompts import Prompt, PromptStream
from megadapo.errors import DataError

PROMPTS = [Prompt(f"{i:02d}", (("user", f"question {i}"),), str(i), "test") for i in range(7)]
RECORDED = ["06", "01", "02", "04", "03", "00", "05", "01", "05"]


def ids(stream: PromptStream, stop: int, start: int = 0) -> list[str]:
    return [stream.at(index).id for index in range(start, stop)]


def test_each_epoch_is_a_new_permutation() -> None:
    stream = PromptStream(PROMPTS, seed=0)
    epochs = [ids(stream, 7 * (epoch + 1), 7 * epoch) for epoch in range(4)]
    assert all(sorted(epoch) == [prompt.id for prompt in PROMPTS] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [stream.epoch(index) for index in (0, 6, 7, 27, 28)] == [0, 0, 1, 3, 4]


def test_prompt_depends_on_the_position_alone() -> None:
    """A resumed run returns to earlier positions."""
    whole = ids(PromptStream(PROMPTS, seed=3), 60)
    stream = PromptStream(PROMPTS, seed=3)
    for index in (59, 0, 30, 7, 6, 58, 14, 13, 0):
        assert stream.at(index).id == whole[index]


def test_seed_and_shuffle() -> None:
    orders = {tuple(ids(PromptStream(PROMPTS, seed), 7)) for seed in range(20)}
    assert len(orders) > 15
    in_file = [prompt.id for prompt in PROMPTS]
    assert ids(PromptStream(PROMPTS, 0, shuffle=False), 14) == in_file * 2


def test_order_is_recorded() -> None:
    # another order after an upgrade would break the resume of every saved run
    assert ids(PromptStream(PROMPTS, seed=0), 9) == RECORDED


def test_fingerprint_is_recorded() -> None:
    """Another fingerprint after an upgrade would block the resume of every saved run."""
    fingerprint = hashlib.sha256(b"00010203040506").hexdigest()
    assert PromptStream(PROMPTS, seed=0).state_dict()["fingerprint"] == fingerprint


def test_state_of_another_stream_is_rejected() -> None:
    state = PromptStream(PROMPTS, seed=0).state_dict()
    changed = r"^the prompts have changed since the checkpoint was saved \(finger"
    saved_with = "^the checkpoint was saved with another"
    for other, message in [
        (PromptStream(PROMPTS[:-1], seed=0), changed),
        (PromptStream(PROMPTS[::-1], seed=0), changed),
        (PromptStream([*PROMPTS, PROMPTS[0]], seed=0), changed),
        (PromptStream(PROMPTS, seed=1), rf"{saved_with} seed \(seed 0 there, 1 here\)"),
        (PromptStream(PROMPTS, 0, shuffle=False), rf"{saved_with} data.shuffle \(shuffle True"),
    ]:
        with pytest.raises(DataError, match=message):
            other.check_state(state)


def test_state_survives_json() -> None:
    stream = PromptStream(PROMPTS, seed=0)
    stream.check_state(json.loads(json.dumps(stream.state_dict())))
    with pytest.raises(DataError, match="prompts have changed"):
        stream.check_state({})


def test_empty_stream_is_rejected() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptStream([], seed=0)
