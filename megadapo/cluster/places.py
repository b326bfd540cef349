"""Places for processes on Ray's nodes: slots of a placement group, also for engines that join."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from megadapo.cluster.calls import timeout_error
from megadapo.cluster.config import ClusterConfig
from megadapo.cluster.nodes import (
    NodeFolders,
    answers_of,
    ask,
    check_this_node,
    folder_problems,
    visibility_files,
)
from megadapo.cluster.this_node import node_address
from megadapo.errors import InfraError, MegadapoError

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.util.placement_group import PlacementGroup

POLL_S = 0.2
"""Seconds between two questions about the slots of a start."""
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
    """A request for slots, for which it waits without blocking.

    Args:
        without: ids of nodes to leave out.
        folders: folders that their nodes must see, if a cluster was joined.
        strategy: Ray's strategy for nodes; "STRICT_PACK" takes one node only.
    """

    def __init__(
        self,
        config: ClusterConfig,
        num_slots: int,
        *,
        without: Sequence[str] = (),
        folders: NodeFolders | None = None,
        strategy: Literal["PACK", "STRICT_PACK"] = "STRICT_PACK",
    ) -> None:
        from ray.util.placement_group import placement_group

        self._config = config
        self.num_slots, self.without = num_slots, without
        self._folders = folders if config.address is not None else None
        self._group: PlacementGroup | None = None
        # on a laptop's CPU any number of processes is legal, see `connect_to_ray`
        if config.uses_cuda or config.address is not None:
            others = {"ray.io/node-id": f"!in({','.join(without)})"} if without else {}
            self._group = placement_group(
                [slot_resources(config) for _ in range(num_slots)],
                strategy=strategy,
                bundle_label_selector=[dict(others) for _ in range(num_slots)],
            )
        self.num_cores: dict[str, int] = {}
        """Number of cores by node; empty unless a cluster was joined."""
        self._nodes: list[str] = []
        self._calls: dict[str, ObjectRef[Any]] = {}
        """Questions to the nodes, by the name of the one who answers."""
        self._open = ExitStack()

    @property
    def waits_for(self) -> list[str]:
        """Slots and nodes that have not answered; empty while Ray does not have the slots."""
        import ray

        calls = [*self._calls.values()]
        late = ray.wait(calls, num_returns=len(calls), timeout=0)[1] if calls else []
        return [name for name, call in self._calls.items() if call in late]

    def poll(self) -> Place | None:
        """Return the place once Ray has the slots and their nodes have answered.

        Raise InfraError, and cancel the request, if nodes lack something or are gone again.
        """
        if self._group is None:
            here = node_address()
            return Place(None, [Slot(number, here, None) for number in range(self.num_slots)])
        try:
            if not self._nodes and not self._ask(self._group):
                return None
            return None if self.waits_for else self._answer(self._group)
        except InfraError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Withdraw the request."""
        self._open.close()
        if self._group is not None:
            remove_group(self._group)

    def _ask(self, group: PlacementGroup) -> bool:
        """Ask the nodes once Ray has the slots; return whether it has."""
        import ray
        from ray.util.placement_group import placement_group_table

        table = placement_group_table(group)
        if table["state"] != "CREATED":
            return False
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        ids = [table["bundles_to_node_id"].get(bundle) for bundle in range(self.num_slots)]
        if not addresses.keys() >= set(ids):
            return False  # a node has died since, and Ray looks for another one
        self._nodes = [addresses[node] for node in ids]
        place = Place(group, [Slot(bundle, "", "") for bundle in range(self.num_slots)])
        if self._config.uses_cuda:
            # only a task in the slot can tell its GPU
            for bundle, node in enumerate(self._nodes):
                self._calls[f"slot {bundle} on {node}"] = ask(_own_gpu, place.options(bundle))
        if self._folders is not None:
            self._files = self._open.enter_context(visibility_files(self._folders.shared))
            question = partial(check_this_node, self._folders, self._files)
            for node in dict.fromkeys(self._nodes):
                options = place.options(self._nodes.index(node)) | {"num_gpus": 0}
                self._calls[f"node {node}"] = ask(question, options)
        return True

    def _answer(self, group: PlacementGroup) -> Place:
        """Return the place by the answers to all questions."""
        answers = answers_of(self._calls, doing="the search for what the run needs")
        problems = [
            f"{name}: {answer}"
            for name, answer in answers.items()
            if isinstance(answer, MegadapoError)
        ]
        if self._folders is not None and not problems:
            for node in dict.fromkeys(self._nodes):
                self.num_cores[node], lacks = answers[f"node {node}"]
                problems += folder_problems(node, lacks, self._folders, self._files)
        if problems:
            raise InfraError("\n".join(problems))
        self._open.close()
        names = [f"slot {bundle} on {node}" for bundle, node in enumerate(self._nodes)]
        gpus = [answers.get(name) for name in names]
        return Place(group, list(map(Slot, range(self.num_slots), self._nodes, gpus)))


def wait_for_places(requests: Sequence[PlaceRequest], config: ClusterConfig) -> list[Place]:
    """Return the places of several requests, once Ray has the slots of all.

    Raise InfraError if the cluster has too few slots in time, or a node lacks something.
    """
    import ray

    deadline = time.monotonic() + config.start_timeout_s
    waiting, places, problems = [*requests], dict[PlaceRequest, Place](), list[str]()
    while waiting and time.monotonic() <= deadline:
        for request in [*waiting]:
            try:
                place = request.poll()
            except InfraError as error:
                problems.append(str(error))
            else:
                if place is None:
                    continue
                places[request] = place
            waiting.remove(request)
        # the other nodes that have been asked may lack something too
        if problems and not any(request.waits_for for request in waiting):
            break
        time.sleep(POLL_S if waiting else 0.0)
    if problems:
        raise InfraError("\n".join(dict.fromkeys(problems)))
    if not waiting:
        return [places[request] for request in requests]
    late = [request.waits_for for request in waiting]
    if all(late):
        key = "cluster.start_timeout_s"
        raise timeout_error(sum(late, []), "the start", config.start_timeout_s, key)
    have, without = ray.cluster_resources(), requests[0].without
    left_out = f" ({len(without)} nodes that fail the health check included)" if without else ""
    raise InfraError(
        f"the layout asks for {sum(request.num_slots for request in requests)} slots of "
        f"{slot_resources(config)}, the Ray cluster has {have.get('CPU', 0):g} CPUs and "
        f"{have.get('GPU', 0):g} GPUs{left_out}: start more nodes, or lower trainer.* / rollout.* "
        "parallel sizes or rollout.num_engines (beside which "
        'evaluation.placement = "engine" takes one more)'
    )


def slot_resources(config: ClusterConfig) -> dict[str, float]:
    """Return the resources of one slot."""
    return {"CPU": 1, "GPU": 1} if config.uses_cuda else {"CPU": 1}


def remove_group(group: PlacementGroup) -> None:
    """Return the slots of a group; a group that Ray no longer knows is gone already."""
    from ray.exceptions import RayError
    from ray.util.placement_group import remove_placement_group

    with suppress(RayError, ValueError):
        remove_placement_group(group)


def _own_gpu() -> str:
    import ray

    return str(ray.get_gpu_ids()[0])
