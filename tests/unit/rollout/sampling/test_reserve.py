"""The reserve: groups that are used too late, forgotten, or changed by saving."""

import json

import numpy as np
import pytest

from megadapo.data.group import Group, Response
from megadapo.data.group_codec import encode_group
from megadapo.errors import CheckpointError
from megadapo.rollout.sampling.reserve import Reserve, decode_unfinished, encode_unfinished
from tests.support.rollout.groups import EXPERTS, make_group


def take(reserve: Reserve, num_groups: int) -> list[Group]:
    groups, expired = reserve.take(num_groups, oldest_version=0)
    assert expired == []
    return groups


def indices(groups: list[Group]) -> list[int]:
    return [group.prompt_index for group in groups]


def test_groups_are_taken_in_prompt_order():
    reserve = Reserve(limit=10)
    reserve.put([make_group(0), make_group(1)])
    reserve.put([make_group(2)])
    assert indices(take(reserve, 2)) == [0, 1]
    assert indices(take(reserve, 5)) == [2]
    assert take(reserve, 1) == []


def test_stale_groups_are_returned_as_expired():
    reserve = Reserve(limit=10)
    reserve.put([make_group(index) for index in range(3)])
    oldest = make_group(0).oldest_version
    assert reserve.take(1, oldest_version=oldest + 1)[0] == []
    reserve.put([make_group(3)])
    usable, expired = reserve.take(1, oldest_version=oldest + 1)
    assert (usable, indices(expired), len(reserve)) == ([], [3], 0)


def test_put_respects_limit_and_returns_number_kept():
    reserve = Reserve(limit=3)
    assert reserve.put([make_group(i) for i in range(2)]) == 2
    assert reserve.put([make_group(i) for i in range(2, 6)]) == 1
    assert indices(take(reserve, 9)) == [0, 1, 2]
    assert Reserve(limit=0).put([make_group(0)]) == 0


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
    entries = json.loads(json.dumps(encode_unfinished({9: responses}), allow_nan=False))
    after = decode_unfinished(entries)
    assert after.keys() == {9}
    assert [one.oldest_version for one in after[9]] == [float("inf"), 4, 4]
    for one, two in zip(responses, after[9], strict=True):
        assert (one.text, one.finish_reason) == (two.text, two.finish_reason)
        for name in ("token_ids", "logprobs", "policy_versions", "experts"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


def test_group_is_encoded_once_over_several_states():
    """A reserve of long responses is megabytes, and every step saves a state."""
    reserve = Reserve(limit=5)
    reserve.put([make_group(i) for i in range(3)])
    first = reserve.state_dict()
    take(reserve, 1)
    reserve.put([make_group(9)])
    second = reserve.state_dict()
    assert [entry["prompt_index"] for entry in second] == [1, 2, 9]
    assert second[0] is first[1] and second[1] is first[2]


def test_smaller_limit_after_resume_keeps_first_groups():
    reserve, smaller = Reserve(limit=5), Reserve(limit=2)
    reserve.put([make_group(i) for i in range(4)])
    smaller.load_state_dict(reserve.state_dict())
    assert indices(take(smaller, 5)) == [0, 1]


def test_damaged_state_is_rejected():
    entry = encode_group(make_group(1))
    del entry["responses"]
    with pytest.raises(CheckpointError, match="reserve"):
        Reserve(limit=3).load_state_dict([entry])
