"""The driver's side of a weight update: from the trainer's ranks into every engine.

An update has a version, a content and rounds, which `Publisher` moves into idle engines.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megadapo.cluster.calls import gather
from megadapo.errors import InfraError, MegadapoError
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.pool.handle import EngineIncarnation
from megadapo.weights.config import PUBLISHED_GROUP, SenderName, WeightsConfig
from megadapo.weights.sync.buckets import Schedule, max_bundle_bytes, pack
from megadapo.weights.sync.delta import MAX_DELTA, Delta, Encoded, UpdateVersions, combine
from megadapo.weights.sync.plan import EngineShape, UpdatePlan
from megadapo.weights.sync.planning import (
    Topology,
    find_topology,
    make_plan,
    topology_beside_training,
)
from megadapo.weights.sync.sender import SenderInfo
from megadapo.weights.sync.transports.interface import Transport

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle


MIB = 1 << 20

Checksums = list[list[list[int]]]
"""[round][trainer rank] -> checksums of the slices in the rank's bucket, if they are compared."""
ROUNDS_PER_CALL = 80
"""Rounds that trainer ranks and engines do in one call, which `weights.deadline_s` limits. The 32B
recipes have up to 66; 80 buckets of the default size are 5 GiB of each rank."""
DEADLINE = "weights.deadline_s"
MEETING_S = 600.0
"""Seconds that all ranks and engines have to meet, if `weights.deadline_s` is shorter: the first
meeting of hundreds of processes is slower than any bucket."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """The content of one update."""

    version: int
    num_bytes: int
    num_rounds: int
    compares_at_end: bool
    """Whether checksums are compared after the last round. A delta carries its own checksums, and
    engines compare them as it arrives."""
    density: float | None = None
    """Share of the elements that changed; None if unknown."""
    delta: Delta | None = None
    """Header of the changes; None if all weights are sent."""


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """The size and duration of one update."""

    policy_version: int
    seconds: float
    num_bytes: int = 0
    """Bytes that the trainer's ranks put into buckets."""
    num_rounds: int = 0
    verified: bool = False
    in_full: bool = True
    """Whether all weights were sent, not only the changes."""
    density: float | None = None
    """Share of the elements that changed; None if unknown."""
    pause_seconds: float = 0.0
    """Time in which no engine generated, from the stop of generation on."""


class Publisher:
    """A connection from the trainer to the engines, which repeats the same plan at every update.

    Args:
        trainer_ranks: Ray actors of the trainer, by rank. Each has a method
            `weight_sender(sender, method, *args, **kwargs)` that calls one of its `WeightSender`s.
        engines: The rollout engines.
        config: The `[weights]` section.
        tensor_parallel: Ranks of one stage of an engine.
        pipeline_parallel: Stages of an engine.
        expert_parallel: Whether an engine's ranks hold whole experts.
        dtype: Type of the engines' weights.
        sender: The trainer ranks' senders. "published" ones send beside training, and need Ray's
            concurrency group `PUBLISHED_GROUP`; an engine that fails then is started again.
        republisher: A publisher with "published" senders, for engines that join while the trainer
            changes its weights; None: this one's `republish` serves them, at other times.
        deltas: Whether updates may send only the changes; the engines must keep their weights
            from one update to the next.
        logs: Log files of the trainer's ranks, for error messages.
    """

    def __init__(
        self,
        trainer_ranks: Sequence[ActorHandle[Any]],
        engines: Engines,
        config: WeightsConfig,
        *,
        tensor_parallel: int,
        pipeline_parallel: int = 1,
        expert_parallel: bool = False,
        dtype: torch.dtype,
        sender: SenderName = "live",
        republisher: Publisher | None = None,
        deltas: bool = False,
        logs: Sequence[Path] = (),
    ) -> None:
        self._ranks, self._logs = list(trainer_ranks), logs
        self._engines, self._config, self._dtype = engines, config, dtype
        self._sender, self._republisher = sender, republisher
        self._engine = EngineShape(
            tp_size=tensor_parallel, pp_size=pipeline_parallel, expert_parallel=expert_parallel
        )
        self._versions = UpdateVersions(config, deltas=deltas)
        self._warnings: list[str] = []
        self._targets: dict[int, EngineIncarnation] = {}
        """Number and process of the engines that are being updated."""
        self._transport: Transport | None = None
        self._schedule: Schedule | None = None
        """Schedule of full updates over the present connection."""
        self._connected: dict[int, EngineIncarnation] = {}
        """The connected engine processes."""
        self._is_broken = False
        """Whether an update over the connection has not reached its end."""

    @property
    def plan(self) -> UpdatePlan:
        """The plan of every update; the first use connects to the engines."""
        return self._connect(self._engines.updatable()).plan

    def publish(
        self, policy_version: int, *, stop_generating: Callable[[], None] = lambda: None
    ) -> PublishReport:
        """Send the trainer's weights to every running engine.

        Afterwards the engines' prefix caches are empty and their samples carry `policy_version`.
        An engine that fails or hangs meanwhile is lost; the others get their update.

        Args:
            stop_generating: called once, when all is prepared; afterwards the engines must be idle
                until this method returns.
        """
        with self._engines.publishing():
            if self._sender == "pinned":
                self.pin()
            report = self._update(self._engines.updatable(), policy_version, stop_generating)
            if self._republisher is not None:
                # the engines generate already; the trainer waits
                self._republisher.pin()
        return report

    def pin(self) -> None:
        """Copy the trainer's weights into the main memory of its nodes."""
        self._call_ranks("pin")

    def republish(self, index: int) -> PublishReport:
        """Send the weights published last, which the trainer still has, to one engine.

        The other engines continue to generate; the next `publish` connects to all of them again.
        An engine that fails meanwhile breaks the connection for the trainer's ranks too. Beside
        training it is started again, otherwise this is an error.
        """
        version = self._engines.policy_version
        try:
            return self._update([index], version, lambda: None)
        except InfraError as error:
            if self._sender != "published":
                raise
            self._schedule = None
            self._engines.mark_dead(self._engines.handles[index], str(error), hangs=True)
            return PublishReport(policy_version=version, seconds=0.0)

    def fingerprint(self) -> str:
        """Return a hash of every bit of the trainer's present weights.

        It is the same in another process if the trainer is split in the same way.
        """
        sums: list[list[int]] = self._call_ranks("fingerprint")
        return hashlib.sha256(repr(sums).encode()).hexdigest()

    def drain_warnings(self) -> list[str]:
        """Return and clear one line for every delta that an engine could not apply."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def _update(
        self, targets: Sequence[int], policy_version: int, stop_generating: Callable[[], None]
    ) -> PublishReport:
        started = time.monotonic()
        self._targets = self._incarnations(targets)
        # without a running engine nothing is sent; engines that are starting get the weights later
        update = self._choose(targets) if targets else None
        if update is not None:
            self._is_broken = True
            sums = self._fill(update, [0])
        # up to here the engines generate with their old weights; from here on they refuse to
        paused = time.monotonic()
        stop_generating()
        if update is not None:
            self._run_rounds(update, sums)
        with _phase("finish"):
            self._engines.finish_weight_update(
                self._updating,
                policy_version,
                timeout_s=self._config.deadline_s,
                republish=(self._republisher or self).republish,
                any_time=self._republisher is not None or self._sender == "published",
            )
        ended = time.monotonic()
        report = PublishReport(
            policy_version=policy_version, seconds=ended - started, pause_seconds=ended - paused
        )
        if update is None:
            self._versions.reset()
            return report
        in_full = update.delta is None
        verified = self._versions.verifies(in_full=in_full)
        self._versions.finish(update.version, in_full=in_full)
        self._is_broken = False
        return replace(
            report,
            num_bytes=update.num_bytes,
            num_rounds=update.num_rounds,
            verified=verified,
            in_full=in_full,
            density=update.density,
        )

    def _choose(self, targets: Sequence[int]) -> Update:
        """Connect, and decide whether to send all weights or only the changes."""
        plan = self._connect(targets).plan
        base = self._versions.base
        if base is not None:
            current = self._call_engines("weight_versions", doing="compare versions")
            if not self._versions.all_have_base(current):
                self._warnings.append(
                    f"Engines do not have the weights of the last update ({current}, not {base}), "
                    "so all weights are sent."
                )
                self._schedule, base = None, None
                self._connect(self._updating)
        version = self._versions.begin()
        if base is None:
            return self._begin(version)
        encoded: list[Encoded | None] = self._call_ranks(
            "encode",
            base=base,
            version=version,
            max_share=MAX_DELTA,
            with_checksums=self._versions.verifies(in_full=False),
        )
        complete = [one for one in encoded if one is not None]
        if len(complete) < len(encoded):
            return self._begin(version)
        delta = combine(plan, complete, base)
        num_changed = sum(one.num_changed for one in complete)
        density = num_changed / sum(one.num_elements for one in complete)
        is_small = sum(delta.sizes) <= MAX_DELTA * plan.num_bytes
        return self._begin(version, delta if is_small else None, density)

    def _begin(
        self, version: int, delta: Delta | None = None, density: float | None = None
    ) -> Update:
        """Prepare the rounds of an update on every rank."""
        schedule, sizes = self._schedule, None
        assert schedule is not None, "connect first"
        if delta is not None:
            sizes = delta.sizes
        if self._versions.deltas:
            beginning = self._submit_ranks("begin", sizes)
            # all pack the changes at the same time
            schedule = schedule if sizes is None else schedule.repack(sizes)
            self._wait_ranks(beginning, "begin")
        return Update(
            version=version,
            num_bytes=schedule.plan.num_bytes if sizes is None else sum(sizes),
            num_rounds=schedule.num_rounds,
            compares_at_end=delta is None and self._versions.verifies(in_full=True),
            density=density,
            delta=delta,
        )

    def _run_rounds(self, update: Update, sums: Checksums) -> None:
        """Move an update into the idle engines round by round, and compare checksums.

        Senders fill the bucket of the next round while engines read the present one. They wait for
        each other, not for the driver.

        Args:
            sums: Checksums of the first round, which is in a bucket; those of the others are
                appended.
        """
        num_rounds, delta = update.num_rounds, update.delta
        begin = {
            "version": update.version,
            "with_checksums": update.compares_at_end,
            "delta": None if delta is None else asdict(delta),
        }
        self._call_engines("start_weight_update", doing="start")
        for first in range(0, num_rounds, ROUNDS_PER_CALL):
            rounds = list(range(first, min(first + ROUNDS_PER_CALL, num_rounds)))
            info = {"rounds": rounds} | ({"begin": begin} if first == 0 else {})
            taking = self._submit_engines("update_weights", info)
            if following := [number + 1 for number in rounds if number + 1 < num_rounds]:
                sums += self._fill(update, following)
            self._wait_engines(taking, _name(rounds, num_rounds))
        if update.compares_at_end:
            by_sender = [list(rounds) for rounds in zip(*sums, strict=True)]
            taking = self._submit_engines("update_weights", {"checksums": by_sender})
            self._wait_engines(taking, "checksums", forgive=False)

    def _fill(self, update: Update, rounds: Sequence[int]) -> Checksums:
        """Fill the buckets of rounds on every trainer rank, and return their checksums."""
        refs = self._submit_ranks("fill_rounds", rounds, with_checksums=update.compares_at_end)
        sums = self._wait_ranks(refs, _name(rounds, update.num_rounds))
        return [list(by_rank) for by_rank in zip(*sums, strict=True)]

    def _connect(self, targets: Sequence[int]) -> Schedule:
        """Connect to the engines to update, unless the same processes are connected."""
        self._targets = self._incarnations(targets)
        if self._schedule is None or self._is_broken or self._targets != self._connected:
            self._schedule, self._connected = None, dict(self._targets)
            self._schedule = self._open_buckets()
            self._is_broken = False
            self._versions.reset()
        return self._schedule

    def _open_buckets(self) -> Schedule:
        """Plan the update of the targets, and open the buckets on both sides."""
        import ray

        infos: list[SenderInfo] = self._call_ranks("describe")
        nodes = self._call_engines("node", doing="find engines")
        bucket_bytes = int(self._config.bucket_mib * MIB)
        topology, plan = self._make_plan(infos, nodes, bucket_bytes)
        self._transport = topology.transport
        both: dict[str, Any] = {
            "bucket_bytes": bucket_bytes,
            "transport": topology.transport,
            "deltas": self._versions.deltas,
        }
        offers = self._call_ranks(
            "prepare",
            ray.put(plan),
            dtype=self._dtype,
            # the others of an update go on without an engine that hangs, before their own deadline
            patience_s=self._config.deadline_s / 2,
            **both,
        )
        both |= {"plan": plan.to_json(), "shape": asdict(infos[0].layout.shape), "offers": offers}
        connecting = self._submit_ranks("connect", offers)
        own = zip(nodes, topology.receiver_of, topology.member_of_each, strict=True)
        opening = self._engines.call(
            "init_weight_transfer",
            {
                index: (both | {"receiver": number, "member": member},)
                for index, number, member in own
            },
        )
        self._wait_engines(opening, "connect", forgive=False, least_s=MEETING_S)
        self._wait_ranks(connecting, "connect", least_s=MEETING_S)
        self._call_ranks("opened")
        return pack(plan, bucket_bytes)

    def _make_plan(
        self, infos: Sequence[SenderInfo], nodes: Mapping[int, str], bucket_bytes: int
    ) -> tuple[Topology, UpdatePlan]:
        """Decide which engines read what from which trainer ranks, and over which transport.

        `nodes`: Node of each engine that is updated.
        """
        if self._sender == "published":
            topology = topology_beside_training(len(infos), len(nodes))
        else:
            topology = find_topology(
                [(info.node, info.gpu) for info in infos],
                list(nodes.values()),
                [self._engines.handles[index].spec.gpus for index in nodes],
            )
        plan = make_plan(
            infos[0].layout,
            [info.position for info in infos],
            replace(
                self._engine,
                nodes=tuple(topology.receivers),
                engines_per_receiver=topology.engines_per_receiver,
            ),
            itemsize=self._dtype.itemsize,
            max_bundle_bytes=max_bundle_bytes(bucket_bytes),
            source_nodes=topology.sources,
            hosts=topology.hosts,
        )
        return topology, plan

    @property
    def _updating(self) -> list[int]:
        """Numbers of the engines that are being updated, without lost ones."""
        # another thread may have started a lost engine again, which is not connected
        return [
            index
            for index, incarnation in self._targets.items()
            if self._engines.incarnation(index) == incarnation
        ]

    def _incarnations(self, indices: Sequence[int]) -> dict[int, EngineIncarnation]:
        return {index: self._engines.incarnation(index) for index in indices}

    def _call_ranks(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every trainer rank's sender and wait for all."""
        return self._wait_ranks(self._submit_ranks(method, *args, **kwargs), method)

    def _submit_ranks(self, method: str, *args: Any, **kwargs: Any) -> list[ObjectRef[Any]]:
        calls: list[Any] = [rank.weight_sender for rank in self._ranks]
        if self._sender == "published":
            # in a thread of its own, beside the calls that train
            calls = [call.options(concurrency_group=PUBLISHED_GROUP) for call in calls]
        return [call.remote(self._sender, method, *args, **kwargs) for call in calls]

    def _wait_ranks(
        self, refs: Sequence[ObjectRef[Any]], doing: str, *, least_s: float = 0.0
    ) -> list[Any]:
        """Return the results of one call per trainer rank; raise an error after the deadline.

        `least_s`: seconds to wait if the deadline is shorter.
        """
        with _phase(doing):
            return gather(
                refs,
                names=[f"trainer rank {rank}" for rank in range(len(refs))],
                doing=doing,
                timeout_s=max(self._config.deadline_s, least_s),
                limit=DEADLINE,
                logs=self._logs,
            )

    def _call_engines(self, method: str, *, doing: str) -> dict[int, Any]:
        """Call a method of every target and wait for all."""
        return self._wait_engines(self._submit_engines(method), doing)

    def _submit_engines(self, method: str, *args: object) -> dict[int, ObjectRef[Any]]:
        return self._engines.call(method, dict.fromkeys(self._updating, args))

    def _wait_engines(
        self,
        refs: Mapping[int, ObjectRef[Any]],
        doing: str,
        *,
        forgive: bool = True,
        least_s: float = 0.0,
    ) -> dict[int, Any]:
        """Return the results of one call per target; remove engines that were lost from targets."""
        with _phase(doing):
            results = self._engines.gather(
                refs,
                doing=doing,
                timeout_s=max(self._config.deadline_s, least_s),
                limit=DEADLINE,
                forgive=forgive,
            )
        lost = [index for index in self._targets if index not in results]
        if lost and self._transport == "nccl":
            raise InfraError(
                f"weights: {doing}: rollout engine {lost[0]} is lost, and the other ranks of its "
                f"process group cannot continue without it (log: logs/engine-{lost[0]}.log)"
            )
        for index in lost:
            del self._targets[index]
        return results


def _name(rounds: Sequence[int], num_rounds: int) -> str:
    if len(rounds) == 1:
        return f"bucket {rounds[0]} of {num_rounds}"
    return f"buckets {rounds[0]} to {rounds[-1]} of {num_rounds}"


@contextmanager
def _phase(doing: str) -> Iterator[None]:
    """Add the phase of the update to errors of ranks and engines."""
    try:
        yield
    except MegadapoError as error:
        raise type(error)(f"weights: {doing}: {error}") from None
