"""The driver's side of a weight update: from the trainer's ranks into every engine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megadapo.errors import InfraError
from megadapo.weights.config import WeightsConfig
from megadapo.weights.sync.buckets import num_rounds, repack
from megadapo.weights.sync.connect import Connected, connect
from megadapo.weights.sync.moving import Sums, Update, move, write
from megadapo.weights.sync.peers import Parties, UpdatableEngines, phase
from megadapo.weights.sync.plan import EngineShape, Plan, plan_bytes
from megadapo.weights.sync.update import Sending, Versions, all_have, sending_of

if TYPE_CHECKING:
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
        logs: Of the trainer's ranks, for messages.
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
        logs: Sequence[Path] = (),
    ) -> None:
        sender = "held_sender" if held else "weight_sender"
        self._engines, self._config, self._dtype = engines, config, dtype
        self._parties = Parties(trainer_ranks, sender, engines, config.deadline_s, logs)
        self._engine = EngineShape(
            tp_size=tensor_parallel, pp_size=pipeline_parallel, expert_parallel=expert_parallel
        )
        self._versions = Versions(config, deltas=deltas)
        self._folder: Path | None = None
        if config.folder is not None:
            # each publisher removes what it has written before
            self._folder = config.folder.absolute() / ("held" if held else "live")
        self._notes: list[str] = []
        self._connected: Connected | None = None
        self._incarnations: list[Hashable] = []
        """The engine processes that are connected."""

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

    def drain_warnings(self) -> list[str]:
        """One line for every engine since the last call that did not have what it was sent."""
        notes, self._notes = self._notes, []
        return notes

    def _update(self, targets: Sequence[int], policy_version: int) -> PublishReport:
        started = time.monotonic()
        self._parties.targets = list(targets)
        # without engines, those that are being started get the weights when they are there
        update = self._choose(targets) if targets else None
        if update is not None:
            sums: Sums = []
            if self._folder is not None:
                update, sums = self._write(update, self._folder)
            paused = move(self._parties, update, sums)
        with phase("finish"):
            self._engines.finish_weight_update(
                self._parties.targets, policy_version, timeout_s=self._config.deadline_s
            )
        ended = time.monotonic()
        report = PublishReport(policy_version=policy_version, seconds=ended - started)
        if update is None:
            self._versions.connected()
            return report
        sending = update.sending
        verified = self._versions.verifies(in_full=sending.delta is None)
        self._versions.ended(sending)
        return replace(
            report,
            num_bytes=sending.num_bytes,
            num_rounds=update.num_rounds,
            verified=verified,
            in_full=sending.delta is None,
            density=sending.density,
            pause_seconds=ended - paused,
        )

    def _choose(self, targets: Sequence[int]) -> Update:
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
            with_checksums=self._versions.verifies(in_full=False),
        )
        sending = sending_of(
            plan, encoded, base=base, version=version, max_delta=self._config.max_delta
        )
        return self._begin(sending)

    def _begin_in_full(self) -> Update:
        assert self._connected is not None, "reach first"
        num_bytes = plan_bytes(self._connected.plan)
        return self._begin(Sending(version=self._versions.begin(), num_bytes=num_bytes))

    def _begin(self, sending: Sending) -> Update:
        """Tell the ranks which rounds there are to be."""
        connected, delta = self._connected, sending.delta
        assert connected is not None, "reach first"
        schedule = connected.schedule
        if delta is not None:
            schedule = repack(connected.plan, connected.room, delta.sizes)
        if self._versions.deltas or self._folder is not None:
            sizes = None if delta is None else delta.sizes
            self._parties.call("begin", sizes, sending.version)
        compares_at_end = delta is None and self._versions.verifies(in_full=True)
        return Update(sending, num_rounds(schedule), compares_at_end)

    def hold(self) -> None:
        """Have the ranks keep a copy of their present weights, which is sent from now on."""
        self._parties.call("hold")

    def fingerprint(self) -> str:
        """Return a name of the trainer's present weights that depends on every bit of them.

        Equal weights have it again in another process, where the trainer is split alike.
        """
        sums: list[list[int]] = self._parties.call("fingerprint")
        return hashlib.sha256(repr(sums).encode()).hexdigest()

    def _write(self, update: Update, folder: Path) -> tuple[Update, Sums]:
        """Write an update as files, and in full where an engine cannot take up what there is.

        Returns:
            What was written, and the checksums of every round.
        """
        for is_last in (False, True):
            patience_s = self._config.deadline_s / 2
            sums, problem = write(self._parties, update, folder, patience_s=patience_s)
            if problem is None:
                return update, sums
            if not is_last:
                self._notes.append(f"{problem} All weights are sent.")
                update = self._begin_in_full()
        raise InfraError(f"weights.folder = {self._config.folder}: {problem}")

    def _reach(self, targets: Sequence[int]) -> Connected:
        """Connect with the engines that are to be updated, unless that has been done."""
        self._parties.targets = list(targets)
        incarnations = [self._engines.incarnation(index) for index in targets]
        if self._connected is None or incarnations != self._incarnations:
            self._connected, self._incarnations = None, incarnations
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
        return self._connected
