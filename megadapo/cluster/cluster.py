"""Ray, placement groups and which process sits on which device."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megadapo.cluster.config import ClusterConfig
from megadapo.cluster.join import QUIET, admits_strangers, join_cluster
from megadapo.cluster.nodes import Needs, ask_nodes, lost_nodes
from megadapo.cluster.watch.control import ControlWatch, has_node, leave_ray
from megadapo.cluster.watch.orphans import descendants, kill_after_this_process, start_time
from megadapo.errors import ConfigError, InfraError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

GPU_SHARE = 0.4
"""Ray's bookkeeping share of a GPU per process, so that trainer and engine both fit on one."""


@dataclass(frozen=True)
class Slot:
    """One place for a process: a bundle of the placement group and, with CUDA, its GPU."""

    bundle: int
    node: str
    gpu: str | None
    """As the node calls it: a number, or a UUID where CUDA_VISIBLE_DEVICES holds such."""


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
        """`daemons`: Ray's, where they were started for this process alone, and when."""
        import ray

        self.uses_cuda = uses_cuda
        self.control = ControlWatch(partial(has_node, ray.get_runtime_context().get_node_id()))
        self._daemons = daemons
        self._placement_group = placement_group
        self._trainer = trainer
        self._engines = engines
        self._num_cores: dict[str, int] = {}
        """Of the nodes of a cluster that was joined."""

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
            tensor_parallel: neighbouring trainer ranks that must be on one node.
            needs: what every node of a cluster that is joined must see.

        Raises:
            ConfigError: a cluster is to be joined that lets in whoever reaches it; or
                `cluster.device` is auto, and its nodes differ from this machine.
            InfraError: the cluster does not have what the layout asks for in time, or not so that
                engines and tensor-parallel groups stay on one node; or a node lacks something.
        """
        num_engine_ranks = num_engines * engine_ranks
        shared = config.placement == "colocated"
        num_slots = (
            max(num_trainer_ranks, num_engine_ranks)
            if shared
            else num_trainer_ranks + num_engine_ranks
        )
        daemons = _start_ray(config, num_slots)
        group = _reserve(config, num_slots)
        slots = sorted(_locate(group, num_slots, uses_cuda=config.uses_cuda), key=_place)
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
            cluster._num_cores = ask_nodes(options, needs)
        return cluster

    def trainer_cores(self) -> list[int]:
        """Cores of each trainer rank: those of its node, shared out among its ranks there."""
        nodes = [slot.node for slot in self._trainer]
        here = dict.fromkeys(nodes, len(os.sched_getaffinity(0)))
        return share_cores(nodes, self._num_cores or here)

    @contextmanager
    def naming_lost_nodes(self) -> Iterator[None]:
        """Say of a failure in this block which nodes are gone, if any are.

        Raises:
            InfraError: the failure's.
        """
        try:
            yield
        except InfraError as error:
            # who asks a silent service which nodes there are waits for it
            lost = lost_nodes(self._num_cores) if self.control.answers else []
            if not lost:
                raise
            raise InfraError(
                f"lost node {', '.join(lost)} of the Ray cluster: is it up, on the network, and "
                f"does Ray run there? ({error})"
            ) from error

    def trainer_options(self, rank: int) -> dict[str, Any]:
        """Ray actor options for trainer rank `rank`."""
        return self._options(self._trainer[rank])

    def engine_options(self, index: int) -> dict[str, Any]:
        """Ray actor options for the engine; its own ranks are processes of vLLM beside it."""
        return self._options(self._engines[index][0])

    def engine_gpus(self, index: int) -> tuple[str, ...]:
        """What the engine's node calls its GPUs, one per engine rank; empty on a CPU."""
        return tuple(slot.gpu for slot in self._engines[index] if slot.gpu is not None)

    def shutdown(self) -> None:
        """Give the slots back and leave Ray; a cluster that was only joined keeps running."""
        import ray

        self.control.close()
        if ray.is_initialized():
            leave_ray(self._placement_group, self._daemons)

    def _options(self, slot: Slot) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "num_cpus": 0,
            "num_gpus": GPU_SHARE if slot.gpu is not None else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._placement_group, placement_group_bundle_index=slot.bundle
            ),
        }


def _start_ray(config: ClusterConfig, num_slots: int) -> dict[int, str | None]:
    """Start or join Ray; returns the daemons that end with this process, and when they started."""
    import ray

    if ray.is_initialized():
        return {}
    if config.address is not None:
        with _own_sigterm_handler():
            join_cluster(config.address)
        if not config.allow_unauthenticated and admits_strangers():
            ray.shutdown()
            raise ConfigError(
                f"cluster.address = {config.address}: this Ray cluster asks for no token, so "
                "whoever reaches it runs code on its nodes: start Ray with RAY_AUTH_MODE=token "
                "(docs/clusters.md), or set cluster.allow_unauthenticated = true where nobody else "
                "is in its network"
            )
        check_device(config, ray.cluster_resources().get("GPU", 0))
        return {}
    _stay_on_loopback()
    # a process without a GPU share sees no GPU, instead of all of them
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    # nobody asks this cluster what every call took, which its control service would keep
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # Ray's default of 15 lets trainer and engines starve beside any other program
    os.environ.setdefault("RAY_worker_niceness", "0")
    # slots are logical: more processes than cores is legal on a laptop
    before = set(descendants(os.getpid()))
    # without "local" Ray would join any cluster that this machine happens to be a node of
    num_cpus = max(num_slots, os.cpu_count() or 1)
    with _own_sigterm_handler():
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **QUIET)
    daemons = set(descendants(os.getpid())) - before
    kill_after_this_process(daemons)
    return {pid: start_time(pid) for pid in daemons}


def check_device(config: ClusterConfig, num_gpus: float) -> None:
    """Make sure that `auto`, which asks this machine, holds for a cluster that it has joined.

    Args:
        num_gpus: that the cluster hands out.

    Raises:
        ConfigError: this machine has a GPU and the cluster has none, or the other way round.
    """
    if config.device == "auto" and config.uses_cuda != (num_gpus > 0):
        here = "has a GPU" if config.uses_cuda else "has no GPU that torch can use"
        raise ConfigError(
            f'cluster.device = "auto" asks this machine, which {here}, but the nodes of the Ray '
            f'cluster hand out {num_gpus:g}: say "cpu" or "cuda"'
        )


@contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Keep the program's handler, if it has one; the one Ray puts in its place ends the process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if callable(before):
        signal.signal(signal.SIGTERM, before)


def _stay_on_loopback() -> None:
    """Let Ray bind 127.0.0.1, as it does on desktops; otherwise it takes the network's address."""
    from ray._private import ray_constants

    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # for the processes it starts
    ray_constants.ENABLE_RAY_CLUSTER = False  # this process has read the variable already


def _reserve(config: ClusterConfig, num_slots: int) -> PlacementGroup:
    import ray
    from ray.util.placement_group import placement_group

    bundle = {"CPU": 1, "GPU": 1} if config.uses_cuda else {"CPU": 1}
    group: PlacementGroup = placement_group(
        [dict(bundle) for _ in range(num_slots)], strategy="PACK"
    )
    if not group.wait(timeout_seconds=config.start_timeout_s):
        have = ray.cluster_resources()
        raise InfraError(
            f"the layout asks for {num_slots} slots of {bundle}, the Ray cluster has "
            f"{have.get('CPU', 0):g} CPUs and {have.get('GPU', 0):g} GPUs: start more nodes, or "
            "lower trainer.* / rollout.* parallel sizes or rollout.num_engines (beside which "
            'evaluation.placement = "engine" takes one more)'
        )
    return group


def _locate(group: PlacementGroup, num_slots: int, *, uses_cuda: bool) -> list[Slot]:
    """Where each bundle is; its GPU is known on its node only, by a task."""
    import ray
    from ray.util.placement_group import placement_group_table

    if not uses_cuda:
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        nodes = placement_group_table(group)["bundles_to_node_id"]
        return [Slot(bundle, addresses[nodes[bundle]], None) for bundle in range(num_slots)]
    return _locate_gpus(group, num_slots)


def _locate_gpus(group: PlacementGroup, num_slots: int) -> list[Slot]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    @ray.remote(num_cpus=0, num_gpus=GPU_SHARE)
    def whereabouts() -> tuple[str, str]:
        return ray.util.get_node_ip_address(), str(ray.get_gpu_ids()[0])

    answers = ray.get(
        [
            whereabouts.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle
                )
            ).remote()
            for bundle in range(num_slots)
        ]
    )
    return [Slot(bundle, node, gpu) for bundle, (node, gpu) in enumerate(answers)]


def _place(slot: Slot) -> tuple[str, int, str]:
    """Sorts slots so that neighbours share a node, and those of a node by their GPU's number."""
    gpu = slot.gpu or ""
    return slot.node, int(gpu) if gpu.isdigit() else -1, gpu


def share_cores(nodes: Sequence[str], num_cores: Mapping[str, int]) -> list[int]:
    """Cores of each process, given the node of each and the cores of each node; at least one."""
    processes = Counter(nodes)
    return [max(1, num_cores[node] // processes[node]) for node in nodes]


def check_nodes(
    trainer: Sequence[Slot], engines: Sequence[Sequence[Slot]], *, tensor_parallel: int
) -> None:
    """Make sure that what talks all the time is on one node.

    Raises:
        InfraError: an engine, or a tensor-parallel group of the trainer, would span nodes.
    """
    for index, slots in enumerate(engines):
        _check_one_node(
            slots, f"engine {index}", "rollout.tensor_parallel x rollout.pipeline_parallel"
        )
    for first in range(0, len(trainer), tensor_parallel):
        slots = trainer[first : first + tensor_parallel]
        ranks = f"trainer ranks {first} to {first + len(slots) - 1}, a tensor-parallel group,"
        _check_one_node(slots, ranks, "trainer.tensor_parallel")


def _check_one_node(slots: Sequence[Slot], who: str, keys: str) -> None:
    nodes = sorted({slot.node for slot in slots})
    if len(nodes) > 1:
        raise InfraError(
            f"{who} would span the nodes {', '.join(nodes)}: choose {keys} so that it divides the "
            "GPUs of a node"
        )
