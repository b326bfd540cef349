"""Placement on nodes, what each node must have, and the network interface between them."""

import os
import socket
from pathlib import Path

import pytest

from megadapo.cluster.cluster import Slot, check_nodes, share_cores
from megadapo.cluster.config import ClusterConfig
from megadapo.cluster.nodes import (
    NodeFolders,
    check_this_node,
    folder_problems,
    listens,
    visibility_files,
)
from megadapo.cluster.places import Place, PlaceRequest, wait_for_places
from megadapo.cluster.ray_connection import check_device
from megadapo.cluster.this_node import INTERFACE_VARIABLES, interface_towards, use_interface_towards
from megadapo.errors import ConfigError, InfraError


def slots(num: int, *, per_node: int) -> list[Slot]:
    return [Slot(n, f"node-{n // per_node}", str(n % per_node)) for n in range(num)]


def test_groups_and_engines_stay_on_one_node() -> None:
    """All-reduces of every layer would cross the network, in the trainer or in an engine."""
    trainer = slots(12, per_node=6)
    check_nodes(trainer, [trainer[:6], trainer[6:]], tensor_parallel=2)
    with pytest.raises(InfraError, match=r"ranks 4 to 7, .* nodes node-0, node-1: .*trainer\.tens"):
        check_nodes(trainer, [], tensor_parallel=4)
    with pytest.raises(InfraError, match=r"engine 1 .* nodes node-0, node-1: .*rollout\.tens"):
        check_nodes(trainer, [trainer[:4], trainer[4:8]], tensor_parallel=1)


def test_ranks_share_the_cores_of_their_node() -> None:
    nodes = ["big", "big", "small", "small", "small"]
    assert share_cores(nodes, {"big": 96, "small": 2}) == [48, 48, 1, 1, 1]


def test_auto_device_must_match_the_nodes() -> None:
    """A driver without a GPU would make a whole GPU cluster compute on its CPUs."""
    auto = ClusterConfig()
    if not auto.uses_cuda:
        with pytest.raises(ConfigError, match=r"cluster.device.* no GPU .* offer 16:"):
            check_device(auto, 16.0)
    check_device(auto, float(auto.uses_cuda))


def test_gpus_of_nodes_may_still_join(monkeypatch) -> None:
    """A configuration error would never be restarted."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(InfraError, match=r"cluster.device.* has a GPU.* offer 0:"):
        check_device(ClusterConfig(), 0.0)


def test_device_that_is_named_is_not_compared() -> None:
    check_device(ClusterConfig(device="cpu"), 16.0)


def test_error_names_node_without_run_folder_or_model(tmp_path: Path) -> None:
    """Otherwise each node saves checkpoints on its own disk, or only the driver has the model."""
    run, model = tmp_path / "run", tmp_path / "model"
    folders = NodeFolders(shared=run, present={"model.path": model})
    with visibility_files(run) as files:
        _, lacks = check_this_node(folders, tmp_path / files.name, "10.0.0.7")
        lacks_folder, lacks_model = folder_problems("10.0.0.7", lacks, folders, files, wait_s=0.0)
        assert lacks_folder.startswith("node 10.0.0.7: ") and f"{run} (run.folder)" in lacks_folder
        assert lacks_model.startswith(f"node 10.0.0.7: {model} (model.path) does not exist")
        # the folder is not mounted there
        check_this_node(folders, tmp_path / "missing" / files.name, "10.0.0.8")
        assert len(folder_problems("10.0.0.8", (), folders, files, wait_s=0.0)) == 1
        model.mkdir()
        _, lacks = check_this_node(folders, files, "10.0.0.9")
        assert folder_problems("10.0.0.9", lacks, folders, files, wait_s=0.0) == []
    assert not list(run.iterdir())


class Scripted(PlaceRequest):
    """A request whose polls return or raise what a test says, the last of it again."""

    num_slots, without, waits_for = 1, (), ["node late"]

    def __init__(self, *answers: Place | InfraError | None) -> None:
        self._answers = list(answers)

    def poll(self) -> Place | None:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, InfraError):
            raise answer
        return answer


def test_start_names_every_node_that_lacks_something_or_is_late() -> None:
    """Otherwise a user mends one node at each start."""
    config, place = ClusterConfig(start_timeout_s=1), Place(None, slots(1, per_node=1))
    assert wait_for_places([Scripted(None, place), Scripted(place)], config) == [place, place]
    lacking = [Scripted(InfraError("node a: no model")), Scripted(None, InfraError("node b: too"))]
    with pytest.raises(InfraError, match="^node a: no model\nnode b: too$"):
        wait_for_places([Scripted(place), *lacking], config)
    with pytest.raises(InfraError, match=r"^node late did not .* 1 s \(cluster.start_timeout_s\)"):
        wait_for_places([Scripted(place), Scripted(None)], config)


def test_dead_daemon_accepts_no_connection() -> None:
    """Ray reports a dead node as alive for a while."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listens("127.0.0.1", port)
    assert not listens("127.0.0.1", port)


def test_interface_towards_an_address() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("::1") is None
    assert interface_towards("not an address") is None


def test_users_interface_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in INTERFACE_VARIABLES:
        monkeypatch.setenv(variable, "ib0")
    use_interface_towards("127.0.0.1")
    assert [os.environ[variable] for variable in INTERFACE_VARIABLES] == ["ib0", "ib0"]
