"""The driver's side of a weight update: from the trainer's ranks into every engine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megadapo.errors import InfraError
from megadapo.weights.config import WeightsConfig
from megadapo.weights.sync.buckets import num_rounds, repack
from megadapo.weights.sync.changes import Sending, Versions, all_have, sending_of
from megadapo.weights.sync.connect import Connected, connect
from megadapo.weights.sync.folder_update import complete
from megadapo.weights.sync.parties import Parties, UpdatableEngines, phase
from megadapo.weights.sync.plan import EngineShape, Plan, plan_bytes

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """What one update moved."""

    policy_version: int
    seconds: float
    num_bytes: int = 0
    """Bytes that the trainer's ranks put into buckets."""
    num_rounds: int = 0
    verified: bool = False
    in_full: bool = True
    """Whether all weights were sent, not only what changed."""
    density: float | None = None
    """Share of the elements that changed; None where that was not looked at."""
    pause_seconds: float = 0.0
    """How long engines refused to generate, because they had neither old nor new weights."""


class Publisher:
    """Moves the trainer's weights into the engines; connects once, then repeats the same plan.

    Args:
        trainer_ranks: Ray actors of the trainer, by rank. Each has a method
            `weight_sender(method, *args, **kwargs)` that calls its `WeightSender`, and where
            `held` is asked for a `held_sender` that does so with its `HeldWeightSender`.
        engines: The rollout engines.
        config: The `[weights]` section.
        tensor_parallel: Ranks of one stage of an engine.
        pipeline_parallel: Stages of an engine.
        expert_parallel: Whether an engine's ranks hold whole experts.
        dtype: Type of the engines' weights.
        held: Send what the ranks `hold` in the place of their present weights.
        deltas: Whether updates may send only what changed; the engines must keep their weights
            from one update to the next.
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
        held: bool = False,
        deltas: bool = False,
    ) -> None:
        sender = "held_sender" if held else "weight_sender"
        self._engines, self._config, self._dtype = engines, config, dtype
        self._parties = Parties(trainer_ranks, sender, engines, config.deadline_s)
        self._engine = EngineShape(
            tp_size=tensor_parallel, pp_size=pipeline_parallel, expert_parallel=expert_parallel
        )
        self._versions = Versions(config, deltas=deltas)
        self._folder: Path | None = None
        if config.folder is not None:
            # each publisher removes what it has written before
            self._folder = config.folder.absolute() / ("held" if held else "live")
        self._patience_s = config.deadline_s / 2
        self._notes: list[str] = []
        self._connected: Connected | None = None
        self._places: list[Hashable] = []
        """The engine processes that are connected."""
        self._is_new = True
        """Whether nothing has been sent over the present connection."""

    @property
    def plan(self) -> Plan:
        """The plan of every update; made and handed out at the first call."""
        return self._reach(self._engines.updatable()).plan

    def publish(self, policy_version: int) -> PublishReport:
        """Put the trainer's weights into every engine that is there. The engines must be idle.

        Afterwards the engines' prefix caches are empty and their samples carry `policy_version`.
        An engine that fails or hangs meanwhile is lost; the others get their update.

        Raises:
            InfraError: A rank failed, missed `weights.deadline_s`, or an engine found a checksum
                that differs; the message names the bucket and the rank, or the parameter. The
                engines then either still have their old weights, or refuse to generate.
        """
        return self._update(self._engines.updatable(), policy_version)

    def republish(self, index: int) -> PublishReport:
        """Put the weights published last, which the trainer still has, into one engine.

        The others go on generating; the next `publish` connects all of them anew.
        """
        return self._update([index], self._engines.policy_version)

    def take_notes(self) -> list[str]:
        """One line for every engine since the last call that did not have what it was sent."""
        notes, self._notes = self._notes, []
        return notes

    def _update(self, targets: Sequence[int], policy_version: int) -> PublishReport:
        started = time.monotonic()
        self._parties.targets = list(targets)
        # without engines, those that are being started get the weights when they are there
        sending = self._choose(targets) if targets else None
        if sending is not None:
            sums: list[list[list[int]]] = []
            if self._folder is not None:
                sending, sums = self._write(sending, self._folder)
            paused = self._move(sending, sums)
        with phase("finish"):
            self._engines.finish_weight_update(
                self._parties.targets, policy_version, timeout_s=self._config.deadline_s
            )
        ended = time.monotonic()
        verified = sending is not None and self._verifies(sending)
        self._is_new = sending is None
        report = PublishReport(policy_version=policy_version, seconds=ended - started)
        if sending is None:
            return report
        self._versions.ended(sending)
        return replace(
            report,
            num_bytes=sending.num_bytes,
            num_rounds=self._num_rounds,
            verified=verified,
            in_full=sending.delta is None,
            density=sending.density,
            pause_seconds=ended - paused,
        )

    def _choose(self, targets: Sequence[int]) -> Sending:
        """Connect, and decide whether all weights are sent or only what changed."""
        plan = self._reach(targets).plan
        base = self._versions.base
        if base is not None:
            held = self._parties.gather(
                self._parties.call_engines("held_versions"), "compare versions"
            )
            if not all_have(base, held):
                self._notes.append(
                    f"Engines have weights of other updates than the last ({held}, not {base}), "
                    "so all weights are sent."
                )
                self._connected, base = None, None
                plan = self._reach(self._parties.targets).plan
        if base is None:
            return self._begin_in_full()
        version = self._versions.begin()
        encoded = self._parties.call(
            "encode",
            base=base,
            version=version,
            max_share=self._config.max_delta,
            with_checksums=self._config.verify == "every",
        )
        sending = sending_of(
            plan, encoded, base=base, version=version, max_delta=self._config.max_delta
        )
        self._begin(sending)
        return sending

    def _begin_in_full(self) -> Sending:
        assert self._connected is not None, "reach first"
        num_bytes = plan_bytes(self._connected.plan)
        sending = Sending(version=self._versions.begin(), num_bytes=num_bytes)
        self._begin(sending)
        return sending

    def _begin(self, sending: Sending) -> None:
        """Tell the ranks which rounds there are to be."""
        connected, delta = self._connected, sending.delta
        assert connected is not None, "reach first"
        schedule = connected.schedule
        if delta is not None:
            schedule = repack(connected.plan, connected.room, delta.sizes)
        self._num_rounds = num_rounds(schedule)
        if self._versions.deltas or self._folder is not None:
            sizes = None if delta is None else delta.sizes
            self._parties.call("begin", sizes, sending.version)

    def _verifies(self, sending: Sending) -> bool:
        """Whether checksums are compared."""
        mode = self._config.verify
        often = self._versions.deltas and sending.delta is None
        return mode == "every" or (mode == "first" and (self._is_new or often))

    def hold(self) -> None:
        """Have the ranks keep a copy of their present weights, which is sent from now on."""
        self._parties.call("hold")

    def fingerprint(self) -> str:
        """Return a name of the trainer's present weights that depends on every bit of them.

        Equal weights have it again in another process, where the trainer is split alike.
        """
        sums: list[list[int]] = self._parties.call("fingerprint")
        return hashlib.sha256(repr(sums).encode()).hexdigest()

    def _write(self, sending: Sending, folder: Path) -> tuple[Sending, list[list[list[int]]]]:
        """Write an update as files, and in full where an engine cannot take up what there is.

        Returns:
            What was sent, and the checksums of every round.
        """
        for is_last in (False, True):
            rounds = range(self._num_rounds)
            sums_apart = self._compares_apart(sending)
            sums = [self._filled(number, self._fill(number, sums_apart)) for number in rounds]
            problem = complete(self._parties, folder, sending, patience_s=self._patience_s)
            if problem is None:
                return sending, sums
            if not is_last:
                self._notes.append(f"{problem} All weights are sent.")
                sending = self._begin_in_full()
        raise InfraError(f"weights.folder = {self._config.folder}: {problem}")

    def _compares_apart(self, sending: Sending) -> bool:
        """Whether checksums are compared at the end.

        What changed carries its checksums, and engines compare them as it arrives.
        """
        return sending.delta is None and self._verifies(sending)

    def _move(self, sending: Sending, sums: list[list[list[int]]]) -> float:
        """All rounds, two buckets in flight, and the comparison of checksums.

        Args:
            sums: Checksums of the rounds that are written already; those of the others join them.

        Returns:
            When the engines ceased to generate.
        """
        sums_apart = self._compares_apart(sending)
        begin = {
            "version": sending.version,
            "with_checksums": sums_apart,
            "delta": None if sending.delta is None else asdict(sending.delta),
        }
        if not sums:
            sums.append(self._filled(0, self._fill(0, sums_apart)))
        # Until here the engines kept their old weights; from here on they refuse to generate.
        paused = time.monotonic()
        self._parties.gather(self._parties.call_engines("start_weight_update"), "start")
        for number in range(self._num_rounds):
            taking = self._take({"round": number} | ({"begin": begin} if number == 0 else {}))
            if len(sums) < self._num_rounds:
                # Written into the other bucket while this one is read.
                sums.append(self._filled(number + 1, self._fill(number + 1, sums_apart)))
            self._parties.gather(taking, f"bucket {number} of {self._num_rounds}")
        if sums_apart:
            by_feeder = [list(rounds) for rounds in zip(*sums, strict=True)]
            comparing = self._take({"checksums": by_feeder})
            self._parties.gather(comparing, "checksums", forgive=False)
        return paused

    def _reach(self, targets: Sequence[int]) -> Connected:
        """Connect with the engines that are to be updated, unless that has been done."""
        self._parties.targets = list(targets)
        places = [self._engines.place(index) for index in targets]
        if self._connected is None or places != self._places:
            self._connected, self._places = None, places
            self._connected = connect(
                self._parties,
                self._engines,
                self._config,
                self._engine,
                dtype=self._dtype,
                deltas=self._versions.deltas,
                folder=self._folder,
            )
            self._versions.connected()
            self._is_new = True
        return self._connected

    def _fill(self, number: int, verify: bool) -> list[ObjectRef[Any]]:
        return self._parties.submit("fill", number, with_checksums=verify)

    def _filled(self, number: int, refs: Sequence[ObjectRef[Any]]) -> list[list[int]]:
        return self._parties.wait(refs, f"bucket {number} of {self._num_rounds}")

    def _take(self, info: dict[str, object]) -> dict[int, ObjectRef[Any]]:
        return self._parties.call_engines("update_weights", info)
