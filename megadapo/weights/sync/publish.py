"""The driver's side of a weight update: from the trainer's ranks into every engine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megadapo.cluster.calls import gather
from megadapo.errors import MegadapoError
from megadapo.weights.config import WeightsConfig
from megadapo.weights.sync.buckets import num_rounds, pack, piece_bytes
from megadapo.weights.sync.places import find_places
from megadapo.weights.sync.plan import EngineShape, Plan
from megadapo.weights.sync.planning import make_plan
from megadapo.weights.sync.sender import SenderInfo

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

MIB = 1 << 20
DEADLINE = "weights.deadline_s"


class UpdatableEngines(Protocol):
    """What an update needs of the rollout engines; `rollout.engines.Engines` is one."""

    @property
    def actors(self) -> list[ActorHandle[Any]]:
        """One actor handle per engine."""
        ...

    @property
    def gpus(self) -> list[tuple[int, ...]]:
        """GPU numbers of each engine on its node; empty on a CPU."""
        ...

    def init_weight_transfer(
        self, init_infos: Sequence[dict[str, Any]], *, timeout_s: float
    ) -> None: ...

    def start_weight_update(self, *, timeout_s: float) -> None: ...

    def submit_update(self, update_infos: Sequence[Any]) -> list[ObjectRef[Any]]: ...

    def finish_weight_update(self, policy_version: int, *, timeout_s: float) -> None: ...

    def collect(
        self, refs: Sequence[ObjectRef[Any]], *, doing: str, timeout_s: float, limit: str = ""
    ) -> list[Any]: ...


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """What one update moved."""

    policy_version: int
    seconds: float
    num_bytes: int
    """Bytes that the trainer's ranks put into buckets."""
    num_rounds: int
    verified: bool


class Publisher:
    """Moves the trainer's weights into the engines; connects once, then repeats the same plan.

    Args:
        trainer_ranks: Ray actors of the trainer, by rank. Each has a method
            `weight_sender(method, *args, **kwargs)` that calls its `WeightSender`.
        engines: The rollout engines.
        config: The `[weights]` section.
        tensor_parallel: Ranks of one stage of an engine.
        pipeline_parallel: Stages of an engine.
        expert_parallel: Whether an engine's ranks hold whole experts.
        dtype: Type of the engines' weights.
    """

    def __init__(
        self,
        trainer_ranks: Sequence[ActorHandle[Any]],
        engines: UpdatableEngines,
        config: WeightsConfig,
        *,
        tensor_parallel: int,
        pipeline_parallel: int = 1,
        expert_parallel: bool = False,
        dtype: torch.dtype,
    ) -> None:
        self._ranks, self._engines, self._config = list(trainer_ranks), engines, config
        self._dtype = dtype
        self._engine = EngineShape(
            tp_size=tensor_parallel, pp_size=pipeline_parallel, expert_parallel=expert_parallel
        )
        self._plan: Plan | None = None
        self._num_published = 0

    @property
    def plan(self) -> Plan:
        """The plan of every update; made and handed out at the first call."""
        if self._plan is None:
            self._plan = self._connect()
        return self._plan

    def publish(self, policy_version: int) -> PublishReport:
        """Put the trainer's present weights into every engine. The engines must be idle.

        Afterwards the engines' prefix caches are empty and their samples carry `policy_version`.

        Raises:
            InfraError: A rank or engine failed, missed `weights.deadline_s`, or found a checksum
                that differs; the message names the bucket and the rank, or the parameter. The
                engines then either still have their old weights, or refuse to generate.
        """
        started = time.monotonic()
        plan = self.plan
        verify = self._config.verify == "every" or (
            self._config.verify == "first" and self._num_published == 0
        )
        deadline = self._config.deadline_s
        sums = self._move(verify)
        if verify:
            refs = self._engines.submit_update([{"checksums": sums}] * self._num_engines)
            self._collect(refs, "checksums")
        with _phase("finish"):
            self._engines.finish_weight_update(policy_version, timeout_s=deadline)
        self._num_published += 1
        return PublishReport(
            policy_version=policy_version,
            seconds=time.monotonic() - started,
            num_bytes=plan_bytes(plan),
            num_rounds=self._num_rounds,
            verified=verify,
        )

    def fingerprint(self) -> str:
        """Return a name of the trainer's present weights that depends on every bit of them.

        Equal weights have it again in another process, where the trainer is split alike.
        """
        sums: list[list[int]] = self._call("fingerprint")
        return hashlib.sha256(repr(sums).encode()).hexdigest()

    def _move(self, verify: bool) -> list[list[list[int]]]:
        """All rounds, two buckets in flight; the trainer's checksums as [feeder][round]."""
        sums = [self._filled(0, self._fill(0, verify))]
        # Until here the engines kept their old weights; from here on they refuse to generate.
        with _phase("start"):
            self._engines.start_weight_update(timeout_s=self._config.deadline_s)
        for number in range(self._num_rounds):
            taking = self._take(number, verify)
            if number + 1 < self._num_rounds:
                # Written into the other bucket while this one is read.
                sums.append(self._filled(number + 1, self._fill(number + 1, verify)))
            self._taken(number, taking)
        return [list(rounds) for rounds in zip(*sums, strict=True)]

    @property
    def _num_engines(self) -> int:
        return len(self._engines.actors)

    def _connect(self) -> Plan:
        """Plan the update, and let trainer ranks and engines open their buckets."""
        import ray

        infos: list[SenderInfo] = self._call("describe")
        places = find_places(
            self._config.transport,
            [(info.node, info.gpu) for info in infos],
            self._engine_nodes(),
            self._engines.gpus,
        )
        bucket_bytes = int(self._config.bucket_mib * MIB)
        plan = make_plan(
            infos[0].layout,
            [info.position for info in infos],
            replace(self._engine, nodes=tuple(places.receivers)),
            itemsize=self._dtype.itemsize,
            max_bundle_bytes=piece_bytes(bucket_bytes),
            source_nodes=places.sources,
        )
        self._num_rounds = num_rounds(pack(plan, bucket_bytes))
        offers = self._call(
            "prepare",
            ray.put(plan),
            bucket_bytes=bucket_bytes,
            dtype=self._dtype,
            transport=places.transport,
        )
        common = {
            "plan": plan.to_json(),
            "shape": asdict(infos[0].layout.shape),
            "bucket_bytes": bucket_bytes,
            "transport": places.transport,
            "offers": offers,
        }
        connecting = self._submit("connect", offers)
        with _phase("connect"):
            self._engines.init_weight_transfer(
                [common | {"engine": number} for number in places.numbers],
                timeout_s=self._config.deadline_s,
            )
        self._wait(connecting, "connect")
        self._call("opened")
        return plan

    def _engine_nodes(self) -> list[str]:
        refs = [actor.__ray_call__.remote(_host_name) for actor in self._engines.actors]
        return self._collect(refs, "find engines")

    def _call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every trainer rank's sender and wait for all."""
        return self._wait(self._submit(method, *args, **kwargs), method)

    def _submit(self, method: str, *args: Any, **kwargs: Any) -> list[ObjectRef[Any]]:
        return [rank.weight_sender.remote(method, *args, **kwargs) for rank in self._ranks]

    def _fill(self, number: int, verify: bool) -> list[ObjectRef[Any]]:
        return self._submit("fill", number, with_checksums=verify)

    def _filled(self, number: int, refs: Sequence[ObjectRef[Any]]) -> list[list[int]]:
        return self._wait(refs, f"bucket {number} of {self._num_rounds}")

    def _take(self, number: int, verify: bool) -> list[ObjectRef[Any]]:
        info = {"round": number, "with_checksums": verify}
        return self._engines.submit_update([info] * self._num_engines)

    def _taken(self, number: int, refs: Sequence[ObjectRef[Any]]) -> None:
        self._collect(refs, f"bucket {number} of {self._num_rounds}")

    def _wait(self, refs: Sequence[ObjectRef[Any]], what: str) -> list[Any]:
        """Results of one call per trainer rank, in time or not at all."""
        with _phase(what):
            return gather(
                refs,
                names=[f"trainer rank {rank}" for rank in range(len(refs))],
                doing=what,
                timeout_s=self._config.deadline_s,
                limit=DEADLINE,
            )

    def _collect(self, refs: Sequence[ObjectRef[Any]], what: str) -> list[Any]:
        """Results of one call per engine, in time or not at all."""
        with _phase(what):
            return self._engines.collect(
                refs, doing=what, timeout_s=self._config.deadline_s, limit=DEADLINE
            )


def plan_bytes(plan: Plan) -> int:
    """Bytes of all slices of a plan, without alignment."""
    per_bundle = [
        [sum(copy.numel for copy in bundle.copies) for bundle in template]
        for template in plan.templates
    ]
    return plan.itemsize * sum(
        per_bundle[plan.blocks[transfer.block].template][transfer.bundle]
        for transfer in plan.transfers
    )


@contextmanager
def _phase(what: str) -> Iterator[None]:
    """Say in which phase of an update a rank or an engine failed or did not answer."""
    try:
        yield
    except MegadapoError as error:
        raise type(error)(f"weights: {what}: {error}") from None


def _host_name(actor: object) -> str:
    import socket

    return socket.gethostname()
