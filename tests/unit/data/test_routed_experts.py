"""Catches experts that change on their way through a file, and files that would break a trainer."""

import base64
import json

import numpy as np
import pytest

from megadapo.data.routed_experts import decode_experts, encode_experts


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
def test_what_is_no_choice_of_experts_is_refused(changes: dict) -> None:
    """A token that goes to one expert twice has fewer than its experts, and dispatchers hang."""
    experts = np.tile(np.arange(4, dtype=np.uint8), (2, 3, 1))
    with pytest.raises((KeyError, TypeError, ValueError)):
        decode_experts({**encode_experts(experts), **changes})
