"""Checksums of updates: without them engines could sample from wrong weights unnoticed."""

from contextlib import nullcontext

import pytest
import torch

from megadapo.errors import ConfigError
from megadapo.weights.config import WeightsConfig
from megadapo.weights.sync.publish import Publisher, UpdateVersions


def send_update(versions: UpdateVersions, *, in_full: bool) -> bool:
    """Send one update; return whether it was verified."""
    version = versions.begin()
    verified = versions.verifies(in_full=in_full)
    versions.finish(version, in_full=in_full)
    return verified


@pytest.mark.parametrize(
    ("verify", "expected"),
    [
        ("off", [0, 0, 0, 0, 0, 0, 0]),
        ("first", [1, 0, 0, 0, 0, 0, 0]),
        (3, [1, 0, 0, 1, 0, 0, 1]),
        (1, [1, 1, 1, 1, 1, 1, 1]),
        ("every", [1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_number_verifies_first_and_every_nth_update(verify, expected):
    versions = UpdateVersions(WeightsConfig(verify=verify), deltas=False)
    assert [int(send_update(versions, in_full=True)) for _ in expected] == expected


def test_deltas_count_and_new_connection_starts_with_verification():
    """Catches uncounted deltas, and a count that each new connection restarts."""
    versions = UpdateVersions(WeightsConfig(verify=4), deltas=True)
    full = [True, False, False, False, False, True, False]
    expected = [True, False, False, False, True, True, False]
    assert [send_update(versions, in_full=one) for one in full] == expected
    versions.reset()
    assert send_update(versions, in_full=True)


def test_delta_needs_its_base_on_every_rank_of_every_engine():
    """Catches a delta that is added to other weights on one rank: wrong weights, unnoticed."""
    versions = UpdateVersions(WeightsConfig(), deltas=True)
    version = versions.begin()
    versions.finish(version, in_full=True)
    assert versions.base == version
    assert versions.all_have_base({0: [version, version], 2: [version, version]})
    for other in (version - 1, version + 1, None):
        assert not versions.all_have_base({0: [version, version], 2: [version, other]})
        assert not versions.all_have_base({0: [other, version], 2: [version, version]})
        assert not versions.all_have_base({0: [other, other], 2: [version, version]})


def test_update_after_a_failed_one_sends_all_weights():
    """Catches trust in the old base, which some engines have lost in the middle of the update."""
    versions = UpdateVersions(WeightsConfig(), deltas=True)
    first = versions.begin()
    versions.finish(first, in_full=True)
    failed = versions.begin()
    assert versions.base is None
    again = versions.begin()
    assert len({first, failed, again}) == 3
    versions.finish(again, in_full=True)
    assert versions.base == again


@pytest.mark.parametrize("value", [0, -1, True, "seldom", 2.5])
def test_invalid_verify_is_refused(value):
    with pytest.raises(ConfigError, match="weights.verify"):
        WeightsConfig(verify=value)


class StartingEngines:
    """Engines of which none can take weights yet."""

    policy_version = 0

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def publishing(self):
        return nullcontext()

    def updatable(self):
        return []

    def finish_weight_update(self, indices, policy_version, *, timeout_s, republish, any_time):
        self._calls.append(f"version {policy_version}")


def test_generation_is_stopped_also_without_an_engine_to_update():
    """The caller makes its cut there: without the call the cut would be missing."""
    calls: list[str] = []
    config = WeightsConfig()
    publisher = Publisher([], StartingEngines(calls), config, tensor_parallel=1, dtype=torch.int8)
    publisher.publish(3, stop_generating=lambda: calls.append("stop"))
    assert calls == ["stop", "version 3"]
