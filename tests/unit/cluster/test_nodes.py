"""Where processes may be: what must stay on one node, and over which interface nodes talk."""

from __future__ import annotations

import os

import pytest

from megadapo.cluster.cluster import Slot, check_nodes
from megadapo.cluster.network import INTERFACE_VARIABLES, interface_towards, use_interface_towards
from megadapo.errors import InfraError


def slots(num: int, *, per_node: int) -> list[Slot]:
    return [Slot(n, f"node-{n // per_node}", str(n % per_node)) for n in range(num)]


def test_tensor_parallel_groups_and_engines_stay_on_one_node() -> None:
    """Catches all-reduces of every layer that cross the network, in the trainer or in an engine."""
    trainer = slots(12, per_node=6)
    check_nodes(trainer, [trainer[:6], trainer[6:]], tensor_parallel=2)
    with pytest.raises(InfraError, match=r"ranks 4 to 7, .* nodes node-0, node-1: .*trainer\.tens"):
        check_nodes(trainer, [], tensor_parallel=4)
    with pytest.raises(InfraError, match=r"engine 1 .* nodes node-0, node-1: .*rollout\.tens"):
        check_nodes(trainer, [trainer[:4], trainer[4:8]], tensor_parallel=1)


def test_the_interface_that_leads_to_an_address_is_found() -> None:
    """Catches collectives that try an interface from which the other nodes are not reached."""
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("::1") is None
    assert interface_towards("not an address") is None


def test_an_interface_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches overriding a cluster's own settings."""
    for variable in INTERFACE_VARIABLES:
        monkeypatch.setenv(variable, "ib0")
    use_interface_towards("127.0.0.1")
    assert [os.environ[variable] for variable in INTERFACE_VARIABLES] == ["ib0", "ib0"]
