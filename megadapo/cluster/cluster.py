"""The Ray cluster of a run: one slot per process, reserved in a placement group."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from megadapo.cluster.config import ClusterConfig
from megadapo.cluster.health import nodes_to_leave_out
from megadapo.cluster.nodes import NodeFolders, alive_nodes, lost_nodes
from megadapo.cluster.places import Place, PlaceRequest, Slot, wait_for_places
from megadapo.cluster.ray_connection import connect_to_ray, leave_ray, watch_daemons
from megadapo.errors import InfraError


class Cluster:
    """The running Ray cluster with one slot per trainer rank and per engine rank."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        num_trainer_ranks: int,
        num_engines: int,
        engine_ranks: int,
        tensor_parallel: int = 1,
        folders: NodeFolders | None = None,
    ) -> None:
        """Start or join Ray and reserve the slots.

        Args:
            tensor_parallel: number of neighbouring trainer ranks that must be on one node.
            folders: folders that every node of a joined cluster must see.
        """
        self.uses_cuda = config.uses_cuda
        self._config, self._folders = config, folders
        layout = _layout(config, num_trainer_ranks, num_engines, engine_ranks)
        self._local = connect_to_ray(config, sum(layout))
        self.daemons = watch_daemons(self._local)
        left_out = nodes_to_leave_out(config)
        requests = [
            PlaceRequest(config, size, without=left_out, folders=folders, strategy="PACK")
            for size in layout
        ]
        places = [
            replace(place, slots=sorted(place.slots, key=_sort_key))
            for place in wait_for_places(requests, config)
        ]
        self._trainer = Place(None, [])
        if num_trainer_ranks:
            self._trainer = replace(places[0], slots=places[0].slots[:num_trainer_ranks])
        if config.placement == "colocated":
            starts = [engine_ranks * index for index in range(num_engines)]
            slots = places[0].slots
            engines = [replace(places[0], slots=slots[at : at + engine_ranks]) for at in starts]
        else:
            engines = places[len(places) - num_engines :]
        self._engines = dict(enumerate(engines))
        engine_slots = [engine.slots for engine in engines]
        check_nodes(self._trainer.slots, engine_slots, tensor_parallel=tensor_parallel)
        self._num_cores: dict[str, int] = {}
        """Number of cores by node; empty unless a cluster was joined."""
        for request in requests:
            self._num_cores |= request.num_cores

    def trainer_cores(self) -> list[int]:
        """Return the number of cores of each trainer rank: its share of its node's cores."""
        nodes = [slot.node for slot in self._trainer.slots]
        here = dict.fromkeys(nodes, len(os.sched_getaffinity(0)))
        return share_cores(nodes, self._num_cores or here)

    @contextmanager
    def naming_lost_nodes(self) -> Iterator[None]:
        """Add the names of lost nodes to an InfraError of this block."""
        try:
            yield
        except InfraError as error:
            # asking a control service that does not answer for its nodes would never return
            lost = lost_nodes(self._num_cores) if self.daemons.answers else []
            if not lost:
                raise
            raise InfraError(
                f"lost node {', '.join(lost)} of the Ray cluster: is it up, on the network, and "
                f"does Ray run there? ({error})"
            ) from error

    def trainer_options(self, rank: int) -> dict[str, Any]:
        """Return the Ray actor options of a trainer rank."""
        return self._trainer.options(rank)

    def engine_options(self, index: int) -> dict[str, Any]:
        """Return the Ray actor options of an engine; vLLM starts the engine's ranks beside it."""
        return self._engines[index].options()

    def engine_gpus(self, index: int) -> tuple[str, ...]:
        """Return the node's names of an engine's GPUs, one per rank; empty on a CPU."""
        return self._engines[index].gpus

    def engine_node(self, index: int) -> str:
        """Return the address of an engine's node."""
        return self._engines[index].node

    def alive_nodes(self) -> Collection[str] | None:
        """Return the addresses of the nodes that are up; None if Ray does not answer now."""
        # asking a control service that does not answer would never return
        if not self.daemons.answers:
            return None
        return {node["NodeManagerAddress"] for node in alive_nodes()}

    def trainer_nodes(self) -> list[str]:
        """Return the addresses of the nodes with trainer ranks."""
        return sorted({slot.node for slot in self._trainer.slots})

    def request_engine(self, num_ranks: int, *, without: Collection[str] = ()) -> PlaceRequest:
        """Ask for the slots of another engine, also on a node that has joined since the start.

        `without`: addresses of nodes to leave out.
        """
        alive = alive_nodes() if without else ()
        left_out = [node["NodeID"] for node in alive if node["NodeManagerAddress"] in without]
        left_out += nodes_to_leave_out(self._config)
        return PlaceRequest(self._config, num_ranks, without=left_out, folders=self._folders)

    def add_engine(self, index: int, place: Place) -> None:
        """Give an engine a place."""
        self._engines[index] = place

    def release_engine(self, index: int) -> None:
        """Return the slots of an engine that has ended; those of the trainer stay."""
        place = self._engines.pop(index)
        if self._config.placement == "separate":
            place.release()
        left = {slot.node for one in (self._trainer, *self._engines.values()) for slot in one.slots}
        # it may go without harm
        self._num_cores = {node: num for node, num in self._num_cores.items() if node in left}

    def keep_logs(self, folder: Path) -> None:
        """Copy the logs of a Ray that this process has started."""
        if self._local is not None:
            self._local.keep_logs(folder)

    def shutdown(self) -> None:
        """Release the slots and leave Ray; a joined cluster keeps running."""
        import ray

        self.daemons.close()
        if ray.is_initialized():
            places = (self._trainer, *self._engines.values())
            groups = {place.group.id: place.group for place in places if place.group is not None}
            leave_ray(list(groups.values()), self._local)


def _layout(
    config: ClusterConfig, num_trainer_ranks: int, num_engines: int, engine_ranks: int
) -> list[int]:
    """Return the number of slots of each placement group: the trainer's first."""
    if config.placement == "colocated":
        return [max(num_trainer_ranks, num_engines * engine_ranks)]
    # an engine with a group of its own can return its slots
    trainer = [num_trainer_ranks] if num_trainer_ranks else []
    return trainer + [engine_ranks] * num_engines


def _sort_key(slot: Slot) -> tuple[str, int, str]:
    """Sort by node, then by number of the GPU, so that neighbours share a node."""
    gpu = slot.gpu or ""
    return slot.node, int(gpu) if gpu.isdigit() else -1, gpu


def share_cores(nodes: Sequence[str], num_cores: Mapping[str, int]) -> list[int]:
    """Return the cores of each process, at least one, from the cores of each node."""
    processes = Counter(nodes)
    return [max(1, num_cores[node] // processes[node]) for node in nodes]


def check_nodes(
    trainer: Sequence[Slot], engines: Sequence[Sequence[Slot]], *, tensor_parallel: int
) -> None:
    """Raise InfraError if an engine or a tensor-parallel group spans nodes.

    Its all-reduces of every layer would cross the network.
    """
    keys = "rollout.tensor_parallel x rollout.pipeline_parallel"
    groups = [(f"engine {index}", slots, keys) for index, slots in enumerate(engines)]
    for first in range(0, len(trainer), tensor_parallel):
        slots = trainer[first : first + tensor_parallel]
        ranks = f"trainer ranks {first} to {first + len(slots) - 1}, a tensor-parallel group,"
        groups.append((ranks, slots, "trainer.tensor_parallel"))
    for processes, slots, keys in groups:
        nodes = sorted({slot.node for slot in slots})
        if len(nodes) > 1:
            raise InfraError(
                f"{processes} would span the nodes {', '.join(nodes)}: choose {keys} so that it "
                "divides the GPUs of a node"
            )
