"""Which updates compare checksums: weights that went wrong unnoticed would be sampled from."""

from __future__ import annotations

import pytest

from megadapo.errors import ConfigError
from megadapo.weights.config import WeightsConfig
from megadapo.weights.sync.delta.state import Delta
from megadapo.weights.sync.update import Sending, Versions


def verified(versions: Versions, *, in_full: bool) -> bool:
    """Send one update, and say whether it was compared."""
    number = versions.begin()
    delta = None if in_full else Delta(base=0, sizes=[], checksums=[])
    compares = versions.verifies(in_full=in_full)
    versions.ended(Sending(version=number, num_bytes=1, delta=delta))
    return compares


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
def test_a_number_compares_the_first_update_and_one_in_so_many(verify, expected):
    versions = Versions(WeightsConfig(verify=verify), deltas=False)
    assert [int(verified(versions, in_full=True)) for _ in expected] == expected


def test_what_changed_is_compared_too_and_a_new_connection_begins_with_a_comparison():
    """Catches a count that starts anew with each connection, and updates of changes that are left
    out: with engines that come and go nothing would be compared for long."""
    versions = Versions(WeightsConfig(verify=4, full_every=100), deltas=True)
    ways = [True, False, False, False, False, True, False]
    assert [verified(versions, in_full=way) for way in ways] == [
        *(True, False, False, False, True),
        *(True, False),
    ]
    versions.connected()
    assert verified(versions, in_full=True)


@pytest.mark.parametrize("value", [0, -1, True, "seldom", 2.5])
def test_what_is_no_number_of_updates_is_refused(value):
    with pytest.raises(ConfigError, match="weights.verify"):
        WeightsConfig(verify=value)
