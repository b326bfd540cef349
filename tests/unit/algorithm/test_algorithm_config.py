"""The keys of `[algorithm]` that exclude each other."""

from __future__ import annotations

import pytest

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.errors import ConfigError


def test_filtered_responses_cannot_be_punished_too() -> None:
    """One token of a buffer is one too many; the user is told both ways out, word for word."""
    with pytest.raises(ConfigError) as caught:
        AlgorithmConfig(overlong_filtering=True, overlong_buffer=1)
    assert str(caught.value) == (
        "algorithm.overlong_filtering = true leaves truncated responses out of the loss, so the "
        "soft punishment cannot reach them: set algorithm.overlong_buffer = 0, or turn "
        "algorithm.overlong_filtering off"
    )


@pytest.mark.parametrize(("filtering", "buffer"), [(True, 0), (False, 1)])
def test_one_of_them_alone_is_fine(filtering: bool, buffer: int) -> None:
    settings = AlgorithmConfig(overlong_filtering=filtering, overlong_buffer=buffer)
    assert (settings.overlong_filtering, settings.overlong_buffer) == (filtering, buffer)
