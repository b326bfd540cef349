"""The JSON form of groups: numbers that change on their way, and damage that is accepted."""

import base64
import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from megadapo.data.group import (
    decode_experts,
    decode_group,
    decode_response,
    decode_versions,
    encode_experts,
    encode_group,
    encode_response,
    encode_versions,
)
from tests.support.rollout.groups import make_group


def test_group_survives_json_exactly() -> None:
    group = make_group(2)
    found = decode_group(json.loads(json.dumps(encode_group(group), allow_nan=False)))
    for name in ("prompt_index", "prompt", "prompt_ids", "scores"):
        assert getattr(found, name) == getattr(group, name)
    for one, two in zip(group.responses, found.responses, strict=True):
        for name in ("token_ids", "logprobs", "policy_versions", "experts"):
            before, after = getattr(one, name), getattr(two, name)
            assert before.dtype == after.dtype
            np.testing.assert_array_equal(before, after)
        for name in ("text", "finish_reason", "entropy"):
            assert getattr(one, name) == getattr(two, name)
        assert [call.end for call in one.turns] == [call.end for call in two.turns]
        assert math.isnan(two.turns[0].entropy) and two.turns[1].entropy == 0.25


def test_turns_of_older_files_are_read() -> None:
    """Rollouts that were saved before turns had rewards, or metrics, could not be shown."""
    entry = encode_response(make_group(2).responses[0])
    expected = decode_response(entry).turns
    assert expected and all(turn.reward == 0.0 and not turn.metrics for turn in expected)
    for num_values in (2, 5):
        turns = [values[:num_values] for values in entry["turns"]]
        found = decode_response({**entry, "turns": turns}).turns
        assert str(found) == str(expected)


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry.pop("responses"),
        lambda entry: entry["responses"][0].update(token_ids="not base64!"),
        lambda entry: entry["responses"][0].update(token_ids="AA!AAAA=="),
        lambda entry: entry["responses"][0].update(logprobs_rollout="AAAA"),
        lambda entry: entry.update(prompt=None),
        lambda entry: entry["responses"][0].update(policy_versions=[[4, 2]]),
        lambda entry: entry["responses"][0].update(correct=1),
        lambda entry: entry["responses"][1].update(steps=[[7, 0.1], [3, 0.1]]),
        lambda entry: entry["responses"][0].update(branch=[0, 0]),
    ],
)
def test_damaged_group_is_rejected(damage: Callable[[dict], object]) -> None:
    entry = encode_group(make_group(1))
    assert decode_group(entry).prompt_index == 1
    damage(entry)
    with pytest.raises((AttributeError, KeyError, TypeError, ValueError)):
        decode_group(entry)


@pytest.mark.parametrize(
    "versions", [[], [7], [3, 3, 3], [3, 4, 4, 6, 3], [-1, 0, -1, -1, 2], [0, 0, 2**31 - 1]]
)
def test_versions_survive(versions: list[int]) -> None:
    array = np.array(versions, dtype=np.int32)
    runs = encode_versions(array)
    assert all(before[0] != after[0] for before, after in zip(runs, runs[1:], strict=False))
    back = decode_versions(runs, len(versions))
    assert back.tolist() == versions and back.dtype == np.int32


@pytest.mark.parametrize("runs", [[], [[1, 2]], [[1, 4]], [[1, 4], [2, -1]]])
def test_versions_of_another_length_are_rejected(runs: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="3 tokens"):
        decode_versions(runs, 3)


@pytest.mark.parametrize(
    "runs", [None, "4", [4], [[4]], [[4, 1, 1]], [[2**31, 3]], [[-2, 3]], [["a", 3]]]
)
def test_malformed_versions_are_rejected(runs: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        decode_versions(runs, 3)


@pytest.mark.parametrize(("dtype", "num_experts"), [("uint8", 256), ("uint16", 384)])
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_experts_survive_json_exactly(dtype: str, num_experts: int, num_tokens: int) -> None:
    draw = np.random.default_rng(0)
    rows = np.tile(np.arange(num_experts), (num_tokens, 3, 1))
    experts = draw.permuted(rows, axis=-1)[..., :4].astype(dtype)
    found = decode_experts(json.loads(json.dumps(encode_experts(experts))))
    assert found is not None and found.dtype == experts.dtype
    np.testing.assert_array_equal(found, experts)
    assert decode_experts(encode_experts(None)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [2, 3, 5]},
        {"shape": [-2, -3, 4]},
        {"shape": [24]},
        {"dtype": "object"},
        {"data": "?"},
        {"data": base64.b64encode(bytes(24)).decode()},
    ],
)
def test_malformed_experts_are_rejected(changes: dict) -> None:
    """A token with one expert twice makes dispatchers hang."""
    experts = np.tile(np.arange(4, dtype=np.uint8), (2, 3, 1))
    with pytest.raises((KeyError, TypeError, ValueError)):
        decode_experts({**encode_experts(experts), **changes})
