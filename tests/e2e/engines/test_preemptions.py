"""An engine whose cache is too small for its responses."""

import pytest

from megadapo.rollout.types import response_seeds
from tests.support.rollout.engine_checks import (
    Reference,
    ask,
    group_request,
    running_engines,
    worst_error,
)

pytestmark = [pytest.mark.slow, pytest.mark.full]

BLOCK_TOKENS, TOKEN_BYTES = 128, 1024
"""Size of a block of the CPU's key-value cache, and of the tiny model's token in it."""


def test_preemptions_are_counted_and_change_no_response(tiny_model, tmp_path):
    """Eight responses start with one block each and soon need another."""
    cache_gib = 9 * BLOCK_TOKENS * TOKEN_BYTES / 2**30
    prompt = (7,) * (BLOCK_TOKENS - 8)
    seeds = [response_seeds(8, "small", key) for key in range(2)]
    crowd = [group_request(key, prompt, seeds[key]) for key in range(2)]
    few = [group_request(key, prompt, seeds[key][:2]) for key in range(2)]
    with running_engines(tiny_model, tmp_path, kv_cache_gib=cache_gib) as engines:
        crowded = ask(engines, crowd)
        (activity,) = engines.activity()
        assert activity.num_preemptions > 0 and activity.max_kv_use > 0.9
        alone = ask(engines, few)
        (activity,) = engines.activity()
        assert activity.num_preemptions == 0
    assert worst_error(Reference(tiny_model), crowd, crowded) < 1e-5
    for key, responses in alone.items():
        for before, after in zip(responses, crowded[key], strict=False):
            assert before.token_ids.tolist() == after.token_ids.tolist()
