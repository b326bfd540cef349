"""The Ray cluster of a run: one slot per process, reserved in a placement group."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megadapo.cluster.calls import gather
from megadapo.cluster.config import ClusterConfig
from megadapo.cluster.health import nodes_to_leave_out
from megadapo.cluster.nodes import Needs, check_needs, lost_nodes
from megadapo.cluster.ray_connection import connect_to_ray
from megadapo.cluster.watch.ray_daemons import RayDaemonWatch, has_node, leave_ray
from megadapo.errors import InfraError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

GPU_SHARE = 0.4
"""Ray's bookkeeping share of a GPU per process, so that trainer and engine both fit on one."""


@dataclass(frozen=True)
class Slot:
    """A place for one process: a bundle of the placement group and, with CUDA, its GPU."""

    bundle: int
    node: str
    gpu: str | None
    """Name of the GPU on the node: a number, or a UUID if CUDA_VISIBLE_DEVICES holds UUIDs."""


class Cluster:
    """The running Ray cluster with one slot per trainer rank and per engine rank."""

    def __init__(
        self,
        placement_group: PlacementGroup,
        trainer: list[Slot],
        engines: list[list[Slot]],
        *,
        uses_cuda: bool,
        daemons: Mapping[int, str | None] = {},
    ) -> None:
        """`daemons`: start time by pid of Ray's daemons, if they serve this process alone."""
        import ray

        self.uses_cuda = uses_cuda
        self.daemons = RayDaemonWatch(partial(has_node, ray.get_runtime_context().get_node_id()))
        self._own_daemons = daemons
        self._placement_group = placement_group
        self._trainer = trainer
        self._engines = engines
        self._num_cores: dict[str, int] = {}
        """Number of cores by node; empty unless a cluster was joined."""

    @classmethod
    def start(
        cls,
        config: ClusterConfig,
        *,
        num_trainer_ranks: int,
        num_engines: int,
        engine_ranks: int,
        tensor_parallel: int = 1,
        needs: Needs | None = None,
    ) -> Cluster:
        """Start or join Ray and reserve the slots.

        Args:
            tensor_parallel: number of neighbouring trainer ranks that must be on one node.
            needs: folders that every node of a joined cluster must see.

        Raises:
            ConfigError: the cluster to join needs no token, or `cluster.device` is auto and the
                nodes differ from this machine.
            InfraError: the cluster has too few slots in time, an engine or a tensor-parallel group
                would span nodes, or a node lacks a folder.
        """
        num_engine_ranks = num_engines * engine_ranks
        shared = config.placement == "colocated"
        num_slots = (
            max(num_trainer_ranks, num_engine_ranks)
            if shared
            else num_trainer_ranks + num_engine_ranks
        )
        daemons = connect_to_ray(config, num_slots)
        group = reserve(config, num_slots, without=nodes_to_leave_out(config))
        slots = sorted(_locate(group, num_slots, config), key=_sort_key)
        offset = 0 if shared else num_trainer_ranks
        engines = [
            slots[offset + i * engine_ranks : offset + (i + 1) * engine_ranks]
            for i in range(num_engines)
        ]
        trainer = slots[:num_trainer_ranks]
        check_nodes(trainer, engines, tensor_parallel=tensor_parallel)
        cluster = cls(group, trainer, engines, uses_cuda=config.uses_cuda, daemons=daemons)
        if needs is not None and config.address is not None:
            one_of_each = {slot.node: slot for slot in reversed(slots)}
            options = {node: cluster._options(slot) for node, slot in one_of_each.items()}
            cluster._num_cores = check_needs(options, needs)
        return cluster

    def trainer_cores(self) -> list[int]:
        """Return the number of cores of each trainer rank: its share of its node's cores."""
        nodes = [slot.node for slot in self._trainer]
        here = dict.fromkeys(nodes, len(os.sched_getaffinity(0)))
        return share_cores(nodes, self._num_cores or here)

    @contextmanager
    def naming_lost_nodes(self) -> Iterator[None]:
        """Add the names of lost nodes to an error of this block.

        Raises:
            InfraError: raised in the block.
        """
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
        return self._options(self._trainer[rank])

    def engine_options(self, index: int) -> dict[str, Any]:
        """Return the Ray actor options of an engine; vLLM starts the engine's ranks beside it."""
        return self._options(self._engines[index][0])

    def engine_gpus(self, index: int) -> tuple[str, ...]:
        """Return the node's names of an engine's GPUs, one per rank; empty on a CPU."""
        return tuple(slot.gpu for slot in self._engines[index] if slot.gpu is not None)

    def shutdown(self) -> None:
        """Release the slots and leave Ray; a joined cluster keeps running."""
        import ray

        self.daemons.close()
        if ray.is_initialized():
            leave_ray(self._placement_group, self._own_daemons)

    def _options(self, slot: Slot) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "num_cpus": 0,
            "num_gpus": GPU_SHARE if slot.gpu is not None else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._placement_group, placement_group_bundle_index=slot.bundle
            ),
        }


def reserve(config: ClusterConfig, num_slots: int, *, without: Sequence[str]) -> PlacementGroup:
    """Reserve slots on nodes of the cluster.

    Args:
        without: ids of nodes to leave out.

    Raises:
        InfraError: the cluster has too few slots in time.
    """
    import ray
    from ray.util.placement_group import placement_group

    bundle = {"CPU": 1, "GPU": 1} if config.uses_cuda else {"CPU": 1}
    others = {"ray.io/node-id": f"!in({','.join(without)})"} if without else {}
    group: PlacementGroup = placement_group(
        [dict(bundle) for _ in range(num_slots)],
        strategy="PACK",
        bundle_label_selector=[dict(others) for _ in range(num_slots)],
    )
    if not group.wait(timeout_seconds=config.start_timeout_s):
        have = ray.cluster_resources()
        left_out = f" ({len(without)} nodes that fail the health check included)" if without else ""
        raise InfraError(
            f"the layout asks for {num_slots} slots of {bundle}, the Ray cluster has "
            f"{have.get('CPU', 0):g} CPUs and {have.get('GPU', 0):g} GPUs{left_out}: start more "
            "nodes, or lower trainer.* / rollout.* parallel sizes or rollout.num_engines (beside "
            'which evaluation.placement = "engine" takes one more)'
        )
    return group


def _locate(group: PlacementGroup, num_slots: int, config: ClusterConfig) -> list[Slot]:
    """Return the slot of each bundle; only a task on the node can tell the GPU.

    Raises:
        InfraError: a node did not run its task in time, as when it died after the reservation.
    """
    import ray
    from ray.util.placement_group import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = placement_group_table(group)["bundles_to_node_id"]
    places = [addresses[nodes[bundle]] for bundle in range(num_slots)]
    if not config.uses_cuda:
        return [Slot(bundle, node, None) for bundle, node in enumerate(places)]

    @ray.remote(num_cpus=0, num_gpus=GPU_SHARE)
    def locate() -> tuple[str, str]:
        return ray.util.get_node_ip_address(), str(ray.get_gpu_ids()[0])

    answers = gather(
        [
            locate.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle
                )
            ).remote()
            for bundle in range(num_slots)
        ],
        names=[f"slot {bundle} on {node}" for bundle, node in enumerate(places)],
        doing="find its GPU",
        timeout_s=config.start_timeout_s,
        limit="cluster.start_timeout_s",
    )
    return [Slot(bundle, node, gpu) for bundle, (node, gpu) in enumerate(answers)]


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
    """Check that no engine and no tensor-parallel group spans nodes.

    Raises:
        InfraError: one would, and its all-reduces of every layer would cross the network.
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
