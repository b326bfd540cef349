"""The JSON form of groups: numbers that change on their way."""

import json
import math

import numpy as np
import pytest

from megadapo.codec import decode, encode
from megadapo.data.group import (
    Group,
    Response,
    decode_experts,
    decode_versions,
    encode_experts,
    encode_versions,
    repeated_share,
)
from tests.support.rollout.groups import make_group


@pytest.mark.parametrize("readable", [False, True])
def test_group_survives_json_exactly(readable: bool) -> None:
    group = make_group(2)
    text = json.dumps(encode(group, readable=readable), allow_nan=False)
    found = decode(Group, json.loads(text))
    for name in ("prompt_index", "prompt", "prompt_ids", "scores", "seconds"):
        assert getattr(found, name) == getattr(group, name)
    for one, two in zip(group.responses, found.responses, strict=True):
        for name in ("token_ids", "logprobs", "policy_versions", "experts"):
            before, after = getattr(one, name), getattr(two, name)
            assert before.dtype == after.dtype
            if name == "logprobs" and readable:
                before = np.where(np.isfinite(before), before, np.nan)
            np.testing.assert_array_equal(before, after)
        for name in ("text", "finish_reason", "entropy"):
            assert getattr(one, name) == getattr(two, name)
        assert [call.end for call in one.turns] == [call.end for call in two.turns]
        assert math.isnan(two.turns[0].entropy) and two.turns[1].entropy == 0.25


def test_problem_has_its_place_and_is_one_line() -> None:
    entry = encode(make_group(1))
    entry["responses"][1]["turns"][0][1] = "much"
    with pytest.raises(ValueError, match=r"^responses\.1\.turns\.0\.entropy: Input should be .*$"):
        decode(Group, entry)


@pytest.mark.parametrize("num_tokens", [0, 7, 8, 9, 40, 300])
@pytest.mark.parametrize("num_different", [1, 2, 3, 50_000])
def test_repeated_share_is_counted_over_the_sampled_tokens(num_tokens, num_different) -> None:
    """The output of a tool may repeat itself, and its log-probs are NaN."""
    rng = np.random.default_rng(num_tokens)
    ids = rng.integers(0, num_different, num_tokens).astype(np.int32)
    ids[num_tokens // 2 :] = ids[: num_tokens - num_tokens // 2]
    runs = [tuple(ids[start : start + 8].tolist()) for start in range(max(0, num_tokens - 7))]
    expected = 1 - len(set(runs)) / len(runs) if runs else 0.0
    assert repeated_share(ids) == pytest.approx(expected, abs=1e-15)
    output = np.full(100, 3, dtype=np.int32)
    response = Response(
        text="",
        token_ids=np.concatenate([ids[:5], output, ids[5:]]),
        logprobs=np.where(np.arange(num_tokens + 100) < 5, -2.0, -1.0).astype(np.float32),
        finish_reason="stop",
        policy_versions=np.repeat([4, -1, 4], [min(5, num_tokens), 100, max(0, num_tokens - 5)]),
    )
    assert response.repetition == repeated_share(ids)
    mean = -1.0 - min(5, num_tokens) / num_tokens if num_tokens else math.nan
    assert response.mean_logprob == pytest.approx(mean, nan_ok=True)


@pytest.mark.parametrize(
    "versions", [[], [7], [3, 3, 3], [3, 4, 4, 6, 3], [-1, 0, -1, -1, 2], [0, 0, 2**31 - 1]]
)
def test_versions_survive(versions: list[int]) -> None:
    array = np.array(versions, dtype=np.int32)
    runs = encode_versions(array)
    assert all(before[0] != after[0] for before, after in zip(runs, runs[1:], strict=False))
    back = decode_versions(runs, len(versions))
    assert back.tolist() == versions and back.dtype == np.int32


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
