"""Places for processes on Ray's nodes: slots of a placement group, also for engines that join."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megadapo.cluster.calls import gather, result_of
from megadapo.cluster.config import ClusterConfig
from megadapo.cluster.nodes import (
    NodeFolders,
    ask,
    check_this_node,
    folder_problems,
    visibility_files,
)
from megadapo.cluster.this_node import node_address
from megadapo.errors import InfraError

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.util.placement_group import PlacementGroup

GPU_SHARE = 0.4
"""Ray's bookkeeping share of a GPU per process, so that trainer and engine both fit on one."""


@dataclass(frozen=True)
class Slot:
    """A place for one process: a bundle of a placement group and, with CUDA, its GPU."""

    bundle: int
    node: str
    gpu: str | None
    """Name of the GPU on the node: a number, or a UUID if CUDA_VISIBLE_DEVICES holds UUIDs."""


@dataclass(frozen=True)
class Place:
    """The slots of processes that belong together, such as the ranks of an engine."""

    group: PlacementGroup | None
    """The group that has the slots; None on this machine's CPU, where slots are not counted."""
    slots: Sequence[Slot]

    @property
    def node(self) -> str:
        """Address of the first slot's node."""
        return self.slots[0].node

    @property
    def gpus(self) -> tuple[str, ...]:
        """The node's names of the GPUs, one per slot; empty on a CPU."""
        return tuple(slot.gpu for slot in self.slots if slot.gpu is not None)

    def options(self, number: int = 0) -> dict[str, Any]:
        """Return Ray's options for a process in a slot."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        slot = self.slots[number]
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": GPU_SHARE if slot.gpu is not None else 0,
        }
        if self.group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=slot.bundle
            )
        return options

    def release(self) -> None:
        """Return the slots to Ray, which ends processes that are still in them."""
        if self.group is not None:
            remove_group(self.group)


class PlaceRequest:
    """A request for slots on one node, for which it waits without blocking.

    Args:
        num_slots: slots of the process that joins, all on one node.
        without: ids of nodes to leave out.
        folders: folders that the node must see, if a cluster was joined.
    """

    def __init__(
        self,
        config: ClusterConfig,
        num_slots: int,
        *,
        without: Sequence[str] = (),
        folders: NodeFolders | None = None,
    ) -> None:
        self._config, self._num_slots = config, num_slots
        self._folders = folders if config.address is not None else None
        # on a laptop's CPU any number of processes is legal, see `connect_to_ray`
        is_counted = config.uses_cuda or config.address is not None
        self._group = (
            create_group(config, num_slots, without=without, strategy="STRICT_PACK")
            if is_counted
            else None
        )
        self._calls: list[ObjectRef[Any]] = []
        self._names: list[str] = []
        self._open = ExitStack()

    def poll(self) -> Place | None:
        """Return the place once Ray has the slots and their node has answered.

        Raises:
            InfraError: the node lacks something, or is gone again; the request is cancelled.
        """
        if self._group is None:
            here = node_address()
            return Place(None, [Slot(number, here, None) for number in range(self._num_slots)])
        try:
            if not self._calls and not self._ask(self._group):
                return None
            return self._answer(self._group)
        except InfraError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Withdraw the request."""
        self._open.close()
        if self._group is not None:
            remove_group(self._group)

    def _ask(self, group: PlacementGroup) -> bool:
        """Ask the node once Ray has the slots; return whether it has."""
        from ray.util.placement_group import placement_group_table

        if placement_group_table(group)["state"] != "CREATED":
            return False
        try:
            places = bundle_nodes(group, self._num_slots)
        except KeyError:
            return False  # a node has died since, and Ray looks for another one
        self._slots = [Slot(bundle, node, None) for bundle, node in enumerate(places)]
        self._names = [f"a slot on {node}" for node in places]
        self._calls = locate_gpus(group, self._num_slots) if self._config.uses_cuda else []
        if self._folders is not None:
            self._files = self._open.enter_context(visibility_files(self._folders.shared))
            options = {**Place(group, self._slots).options(), "num_gpus": 0}
            question = partial(check_this_node, self._folders, self._files)
            self._calls.append(ask(question, options))
            self._names.append(f"node {places[0]}")
        return True

    def _answer(self, group: PlacementGroup) -> Place | None:
        """Return the place if all questions are answered."""
        import ray

        calls = self._calls
        if calls and len(ray.wait(calls, num_returns=len(calls), timeout=0)[0]) < len(calls):
            return None
        answers = [
            result_of(call, name=name, doing="get ready for an engine")
            for call, name in zip(calls, self._names, strict=True)
        ]
        if self._folders is not None:
            node = self._slots[0].node
            _, lacks = answers.pop()
            if problems := folder_problems(node, lacks, self._folders, self._files):
                raise InfraError("\n".join(problems))
        slots = self._slots
        if answers:
            slots = [Slot(bundle, node, gpu) for bundle, (node, gpu) in enumerate(answers)]
        self._open.close()
        return Place(group, slots)


def create_group(
    config: ClusterConfig, num_slots: int, *, without: Sequence[str], strategy: str = "PACK"
) -> PlacementGroup:
    """Ask Ray for slots, without waiting for them.

    Args:
        without: ids of nodes to leave out.
        strategy: Ray's strategy; "STRICT_PACK" takes one node only.
    """
    from ray.util.placement_group import placement_group

    others = {"ray.io/node-id": f"!in({','.join(without)})"} if without else {}
    group: PlacementGroup = placement_group(
        [slot_resources(config) for _ in range(num_slots)],
        strategy=strategy,
        bundle_label_selector=[dict(others) for _ in range(num_slots)],
    )
    return group


def slot_resources(config: ClusterConfig) -> dict[str, float]:
    """Return the resources of one slot."""
    return {"CPU": 1, "GPU": 1} if config.uses_cuda else {"CPU": 1}


def remove_group(group: PlacementGroup) -> None:
    """Return the slots of a group; a group that Ray no longer knows is gone already."""
    from ray.exceptions import RayError
    from ray.util.placement_group import remove_placement_group

    with suppress(RayError, ValueError):
        remove_placement_group(group)


def bundle_nodes(group: PlacementGroup, num_slots: int) -> list[str]:
    """Return the address of each bundle's node."""
    import ray
    from ray.util.placement_group import placement_group_table

    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [addresses[nodes[bundle]] for bundle in range(num_slots)]


def locate_gpus(group: PlacementGroup, num_slots: int) -> list[ObjectRef[Any]]:
    """Ask for node and GPU of each slot; only a task on the node can tell the GPU."""
    place = Place(group, [Slot(bundle, "", "") for bundle in range(num_slots)])
    return [ask(_own_gpu, place.options(number)) for number in range(num_slots)]


def _own_gpu() -> tuple[str, str]:
    import ray

    return ray.util.get_node_ip_address(), str(ray.get_gpu_ids()[0])


def locate(group: PlacementGroup, num_slots: int, config: ClusterConfig) -> list[Slot]:
    """Return the slot of each bundle of a group that Ray has placed."""
    places = bundle_nodes(group, num_slots)
    if not config.uses_cuda:
        return [Slot(bundle, node, None) for bundle, node in enumerate(places)]
    answers = gather(
        locate_gpus(group, num_slots),
        names=[f"slot {bundle} on {node}" for bundle, node in enumerate(places)],
        doing="find its GPU",
        timeout_s=config.start_timeout_s,
        limit="cluster.start_timeout_s",
    )
    return [Slot(bundle, node, gpu) for bundle, (node, gpu) in enumerate(answers)]


def alive_nodes() -> Mapping[str, str]:
    """Return the id and the address of each node that Ray counts as alive."""
    import ray

    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
