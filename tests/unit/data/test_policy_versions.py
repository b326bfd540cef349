"""Versions that came back wrong would train stale tokens as if they were fresh."""

from __future__ import annotations

import numpy as np
import pytest

from megadapo.data.policy_versions import decode_versions, encode_versions


@pytest.mark.parametrize(
    "versions", [[], [7], [3, 3, 3], [3, 4, 4, 6, 3], [-1, 0, -1, -1, 2], [0, 0, 2**31 - 1]]
)
def test_versions_come_back_as_they_were(versions: list[int]) -> None:
    array = np.array(versions, dtype=np.int32)
    runs = encode_versions(array)
    assert all(before[0] != after[0] for before, after in zip(runs, runs[1:], strict=False))
    back = decode_versions(runs, len(versions))
    assert back.tolist() == versions and back.dtype == np.int32


def test_one_number_is_the_version_of_all_tokens() -> None:
    assert decode_versions(5, 3).tolist() == [5, 5, 5]
    assert decode_versions(5, 0).tolist() == []


@pytest.mark.parametrize("runs", [[], [[1, 2]], [[1, 4]], [[1, 4], [2, -1]]])
def test_runs_of_another_number_of_tokens_are_refused(runs: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="3 tokens"):
        decode_versions(runs, 3)


@pytest.mark.parametrize(
    "runs", [None, "4", [4], [[4]], [[4, 1, 1]], [[2**31, 3]], [[-2, 3]], [["a", 3]]]
)
def test_what_is_no_list_of_runs_is_refused(runs: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        decode_versions(runs, 3)
