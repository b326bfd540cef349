"""The driver's side of a weight update: from the trainer's ranks into every engine.

An update has a version, a content and rounds, which `run_rounds` moves into idle engines.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from megadapo.errors import InfraError
from megadapo.weights.config import WeightsConfig
from megadapo.weights.sync.buckets import Schedule, max_bundle_bytes, pack
from megadapo.weights.sync.delta import Delta, Encoded, combine
from megadapo.weights.sync.peers import MEETING_S, UpdatableEngines, UpdatePeers, phase
from megadapo.weights.sync.plan import EngineShape, UpdatePlan
from megadapo.weights.sync.planning import find_topology, make_plan, topology_beside_training
from megadapo.weights.sync.sender import SenderInfo

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle


MIB = 1 << 20

Sender = Literal["weight_sender", "pinned_sender", "published_sender"]
"""Method of a trainer rank that calls one of its senders."""
Sums = list[list[list[int]]]
"""[round][trainer rank] -> checksums of the slices in the rank's bucket, if they are compared."""
SPAN = 80
"""Rounds that trainer ranks and engines do in one call, which `weights.deadline_s` limits. The 32B
recipes have up to 66; 80 buckets of the default size are 5 GiB of each rank."""
MAX_DELTA = 0.25
"""Share of a full update's bytes above which a delta is sent as a full update."""
FULL_EVERY = 50
"""Interval of full updates among delta updates."""


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


class UpdateVersions:
    """The versions of a connection's updates: which one every engine has, which were verified.

    A policy version is not enough: it can be published twice, and by two publishers.
    """

    def __init__(self, config: WeightsConfig, *, deltas: bool) -> None:
        self.deltas = deltas
        """Whether updates may send only the changes."""
        self._config = config
        self._num_unverified = 0
        """Updates since the last verified one, over any connection."""
        self.reset()

    def reset(self) -> None:
        """Start the versions of a new connection; random, so that no other one has them."""
        self._newest = secrets.randbits(40) << 20
        self._base: int | None = None
        self._is_first = True
        self._num_since_full = 0

    @property
    def base(self) -> int | None:
        """Version that a delta can be sent from; None if all weights must be sent."""
        is_due = self._num_since_full + 1 >= FULL_EVERY
        return self._base if self.deltas and not is_due else None

    def all_have_base(self, current: Mapping[int, Sequence[int | None]]) -> bool:
        """Return whether every rank of every engine has the base of a delta.

        `current`: version of each rank's weights, by engine.
        """
        return all(version == self.base for ranks in current.values() for version in ranks)

    def verifies(self, *, in_full: bool) -> bool:
        """Return whether the present update compares checksums."""
        mode = self._config.verify
        if mode in ("every", "off"):
            return mode == "every"
        is_due = isinstance(mode, int) and self._num_unverified + 1 >= mode
        return is_due or self._is_first or (self.deltas and in_full)

    def begin(self) -> int:
        """Allocate a version. No engine's base version is trusted until the update completes."""
        self._newest += 1
        self._base = None
        return self._newest

    def finish(self, version: int, *, in_full: bool) -> None:
        """Record that every engine has the version."""
        self._num_unverified = 0 if self.verifies(in_full=in_full) else self._num_unverified + 1
        self._base, self._is_first = version, False
        self._num_since_full = 0 if in_full else self._num_since_full + 1


def combine_if_small(
    plan: UpdatePlan, encoded: Sequence[Encoded | None], *, base: int
) -> tuple[Delta | None, float | None]:
    """Combine the sections of all trainer ranks, given by rank.

    Returns:
        The delta, or None if it exceeds MAX_DELTA of a full update's bytes; and the density, or
        None if a rank has stopped encoding.
    """
    complete = [piece for piece in encoded if piece is not None]
    if len(complete) < len(encoded):
        return None, None
    delta = combine(plan, complete, base)
    num_elements = sum(one.num_elements for one in complete)
    density = sum(one.num_changed for one in complete) / num_elements
    return (delta if sum(delta.sizes) <= MAX_DELTA * plan.num_bytes else None), density


def run_rounds(peers: UpdatePeers, update: Update, sums: Sums) -> None:
    """Move an update into the idle engines round by round, and compare checksums.

    Senders fill the bucket of the next round while engines read the present one. They wait for each
    other, not for the driver.

    Args:
        sums: Checksums of the first round, which is in a bucket; those of the others are appended.
    """
    num_rounds, delta = update.num_rounds, update.delta
    begin = {
        "version": update.version,
        "with_checksums": update.compares_at_end,
        "delta": None if delta is None else asdict(delta),
    }
    peers.call_engines("start_weight_update", doing="start")
    for first in range(0, num_rounds, SPAN):
        rounds = list(range(first, min(first + SPAN, num_rounds)))
        taking = _take(peers, {"rounds": rounds} | ({"begin": begin} if first == 0 else {}))
        if following := [number + 1 for number in rounds if number + 1 < num_rounds]:
            sums += fill(peers, update, following)
        peers.wait_engines(taking, _name(rounds, num_rounds))
    if update.compares_at_end:
        by_sender = [list(rounds) for rounds in zip(*sums, strict=True)]
        peers.wait_engines(_take(peers, {"checksums": by_sender}), "checksums", forgive=False)


def fill(peers: UpdatePeers, update: Update, rounds: Sequence[int]) -> Sums:
    """Fill the buckets of rounds on every trainer rank, and return their checksums."""
    refs = peers.submit_ranks("fill_rounds", rounds, with_checksums=update.compares_at_end)
    sums = peers.wait_ranks(refs, _name(rounds, update.num_rounds))
    return [list(by_rank) for by_rank in zip(*sums, strict=True)]


def _name(rounds: Sequence[int], num_rounds: int) -> str:
    if len(rounds) == 1:
        return f"bucket {rounds[0]} of {num_rounds}"
    return f"buckets {rounds[0]} to {rounds[-1]} of {num_rounds}"


def _take(peers: UpdatePeers, info: dict[str, object]) -> dict[int, ObjectRef[Any]]:
    return peers.submit_engines("update_weights", info)


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


def _nothing_to_stop() -> None:
    """Do nothing: the engines are idle."""


class Publisher:
    """A connection from the trainer to the engines, which repeats the same plan at every update.

    Args:
        trainer_ranks: Ray actors of the trainer, by rank. Each has a method
            `weight_sender(method, *args, **kwargs)` that calls its `WeightSender`, and the other
            methods of `Sender` for senders of pinned weights.
        engines: The rollout engines.
        config: The `[weights]` section.
        tensor_parallel: Ranks of one stage of an engine.
        pipeline_parallel: Stages of an engine.
        expert_parallel: Whether an engine's ranks hold whole experts.
        dtype: Type of the engines' weights.
        sender: The trainer ranks' method. "pinned_sender" keeps a copy of the weights that
            `publish` sends. "published_sender" sends, beside training, the weights that were last
            copied into the main memory of the trainer's nodes, by `pin`; it needs Ray's concurrency
            group `peers.PUBLISHED_GROUP`.
        republisher: A publisher with "published_sender", for engines that join while the trainer
            changes its weights; None: this one's `republish` serves them, at other times.
        deltas: Whether updates may send only the changes; the engines must keep their weights
            from one update to the next.
        logs: Log files of the trainer's ranks, for error messages.
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
        sender: Sender = "weight_sender",
        republisher: Publisher | None = None,
        deltas: bool = False,
        logs: Sequence[Path] = (),
    ) -> None:
        self._engines, self._config, self._dtype = engines, config, dtype
        self._sender, self._republisher = sender, republisher
        self._peers = UpdatePeers(trainer_ranks, sender, engines, config.deadline_s, logs)
        self._engine = EngineShape(
            tp_size=tensor_parallel, pp_size=pipeline_parallel, expert_parallel=expert_parallel
        )
        self._versions = UpdateVersions(config, deltas=deltas)
        self._warnings: list[str] = []
        self._schedule: Schedule | None = None
        """Schedule of full updates over the present connection."""
        self._incarnations: list[Hashable] = []
        """Identities of the connected engine processes."""
        self._is_broken = False
        """Whether an update over the connection has not reached its end."""

    @property
    def plan(self) -> UpdatePlan:
        """The plan of every update; the first use connects to the engines."""
        return self._connect(self._engines.updatable()).plan

    def publish(
        self, policy_version: int, *, stop_generating: Callable[[], None] = _nothing_to_stop
    ) -> PublishReport:
        """Send the trainer's weights to every running engine.

        Afterwards the engines' prefix caches are empty and their samples carry `policy_version`.
        An engine that fails or hangs meanwhile is lost; the others get their update.

        Args:
            stop_generating: called once, when all is prepared; afterwards the engines must be idle
                until this method returns.
        """
        with self._engines.publishing():
            if self._sender == "pinned_sender":
                self.pin()
            report = self._update(self._engines.updatable(), policy_version, stop_generating)
            if self._republisher is not None:
                # the engines generate already; the trainer waits
                self._republisher.pin()
        return report

    def pin(self) -> None:
        """Copy the trainer's weights into the main memory of its nodes."""
        self._peers.call_ranks("pin")

    def republish(self, index: int) -> PublishReport:
        """Send the weights published last, which the trainer still has, to one engine.

        The other engines continue to generate; the next `publish` connects to all of them again.
        Beside training, an engine that fails meanwhile, which breaks the connection for the
        trainer's ranks too, is started again.
        """
        version = self._engines.policy_version
        try:
            return self._update([index], version, _nothing_to_stop)
        except InfraError as error:
            if self._sender != "published_sender":
                raise
            self._schedule = None
            self._engines.fail(index, str(error))
            return PublishReport(policy_version=version, seconds=0.0)

    def fingerprint(self) -> str:
        """Return a hash of every bit of the trainer's present weights.

        It is the same in another process if the trainer is split in the same way.
        """
        sums: list[list[int]] = self._peers.call_ranks("fingerprint")
        return hashlib.sha256(repr(sums).encode()).hexdigest()

    def drain_warnings(self) -> list[str]:
        """Return and clear one line for every delta that an engine could not apply."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def _update(
        self, targets: Sequence[int], policy_version: int, stop_generating: Callable[[], None]
    ) -> PublishReport:
        started = time.monotonic()
        self._peers.target(targets)
        # without a running engine nothing is sent; engines that are starting get the weights later
        update = self._choose(targets) if targets else None
        if update is not None:
            self._is_broken = True
            sums = fill(self._peers, update, [0])
        # up to here the engines generate with their old weights; from here on they refuse to
        paused = time.monotonic()
        stop_generating()
        if update is not None:
            run_rounds(self._peers, update, sums)
        with phase("finish"):
            self._engines.finish_weight_update(
                self._peers.targets,
                policy_version,
                timeout_s=self._config.deadline_s,
                republish=(self._republisher or self).republish,
                any_time=self._republisher is not None or self._sender == "published_sender",
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
            current = self._peers.call_engines("weight_versions", doing="compare versions")
            if not self._versions.all_have_base(current):
                self._warnings.append(
                    f"Engines do not have the weights of the last update ({current}, not {base}), "
                    "so all weights are sent."
                )
                self._schedule, base = None, None
                plan = self._connect(self._peers.targets).plan
        version = self._versions.begin()
        if base is None:
            return self._begin(version)
        encoded = self._peers.call_ranks(
            "encode",
            base=base,
            version=version,
            max_share=MAX_DELTA,
            with_checksums=self._versions.verifies(in_full=False),
        )
        delta, density = combine_if_small(plan, encoded, base=base)
        return self._begin(version, delta, density)

    def _begin(
        self, version: int, delta: Delta | None = None, density: float | None = None
    ) -> Update:
        """Prepare the rounds of an update on every rank."""
        schedule, sizes = self._schedule, None
        assert schedule is not None, "connect first"
        if delta is not None:
            sizes = delta.sizes
        if self._versions.deltas:
            beginning = self._peers.submit_ranks("begin", sizes)
            # all pack the changes at the same time
            schedule = schedule if sizes is None else schedule.repack(sizes)
            self._peers.wait_ranks(beginning, "begin")
        return Update(
            version=version,
            num_bytes=schedule.plan.num_bytes if sizes is None else sum(sizes),
            num_rounds=schedule.num_rounds,
            compares_at_end=delta is None and self._versions.verifies(in_full=True),
            density=density,
            delta=delta,
        )

    def _connect(self, targets: Sequence[int]) -> Schedule:
        """Connect to the engines to update, unless the same processes are connected."""
        self._peers.target(targets)
        incarnations = [self._engines.incarnation(index) for index in targets]
        if self._schedule is None or self._is_broken or incarnations != self._incarnations:
            self._schedule, self._incarnations = None, incarnations
            self._schedule = self._open_buckets()
            self._is_broken = False
            self._versions.reset()
        return self._schedule

    def _open_buckets(self) -> Schedule:
        """Plan the update of the targets, and open the buckets on both sides."""
        import ray

        peers, engines = self._peers, self._engines
        infos: list[SenderInfo] = peers.call_ranks("describe")
        layout, bucket_bytes = infos[0].layout, int(self._config.bucket_mib * MIB)
        nodes = peers.call_engines("node", doing="find engines")
        targets = list(nodes)
        if self._sender == "published_sender":
            topology = topology_beside_training(len(infos), len(targets))
        else:
            topology = find_topology(
                [(info.node, info.gpu) for info in infos],
                [nodes[index] for index in targets],
                [engines.gpus(index) for index in targets],
            )
        transport = peers.transport = topology.transport
        plan = make_plan(
            layout,
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
        both: dict[str, Any] = {
            "bucket_bytes": bucket_bytes,
            "transport": transport,
            "deltas": self._versions.deltas,
        }
        offers = peers.call_ranks(
            "prepare",
            ray.put(plan),
            dtype=self._dtype,
            # the others of an update go on without an engine that hangs, before their own deadline
            patience_s=self._config.deadline_s / 2,
            **both,
        )
        both |= {"plan": plan.to_json(), "shape": asdict(layout.shape), "offers": offers}
        connecting = peers.submit_ranks("connect", offers)
        own = zip(targets, topology.receiver_of, topology.member_of_each, strict=True)
        opening = engines.call(
            "init_weight_transfer",
            {
                index: (both | {"receiver": number, "member": member},)
                for index, number, member in own
            },
        )
        peers.wait_engines(opening, "connect", forgive=False, least_s=MEETING_S)
        peers.wait_ranks(connecting, "connect", least_s=MEETING_S)
        peers.call_ranks("opened")
        return pack(plan, bucket_bytes)
