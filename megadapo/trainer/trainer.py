"""The driver's handle on all trainer ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megadapo.cluster.calls import gather
from megadapo.cluster.cpu_process import cpu_environment
from megadapo.cluster.gpu_process import full_precision
from megadapo.data.batch import PackedBatch
from megadapo.errors import InfraError, MegadapoError
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.result import RankUpdate, UpdateResult
from megadapo.trainer.settings import TrainerSettings
from megadapo.trainer.worker import TrainerWorker
from megadapo.weights.disk.hashed_files import Files

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from megadapo.cluster.cluster import Cluster
    from megadapo.trainer.save_report import RankReport

CUDA_VARIABLES = {
    # keeps sequence-parallel communication in front of the matrix product it overlaps with
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # both of a rank's passes over the same tokens must give the same bits: sums inside the
    # switch, and products whose workspace depends on the stream, do not
    "NCCL_NVLS_ENABLE": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}

LEAVE_TIMEOUT_S = 10.0
"""How long a rank may take to leave in good order before it is killed."""

POLL_S = 0.1
"""Between two questions whether a save has been written."""
SLOWEST_STORAGE = 50e6
"""Bytes per second that a rank's storage takes or gives at least, or it has failed."""
LONGEST_WORK_S = 7 * 24 * 3600.0


class Trainer:
    """All ranks of the trainer as one; after an error it is shut down and of no more use."""

    def __init__(
        self, ranks: list[ActorHandle[Any]], *, timeout_s: float, offloads: bool = False
    ) -> None:
        """`offloads`: whether anything of the ranks' memory leaves it between updates."""
        self.ranks = ranks
        """One actor handle per rank."""
        self.watch: Callable[[], None] | None = None
        """Called every few seconds while the ranks work; may raise what ends the run."""
        self._timeout_s, self._offloads = timeout_s, offloads
        self._pings: list[Any] = []

    @classmethod
    def start(cls, settings: TrainerSettings, cluster: Cluster) -> Trainer:
        """Start the ranks that the settings ask for on the cluster's trainer slots.

        Raises:
            MegadapoError: the model cannot be read or does not fit the layout, or a rank failed.
        """
        options = [cluster.trainer_options(rank) for rank in range(settings.trainer.num_ranks)]
        return cls.start_ranks(
            settings,
            options,
            uses_cuda=cluster.uses_cuda,
            num_cores=cluster.trainer_cores(),
        )

    @classmethod
    def start_ranks(
        cls,
        settings: TrainerSettings,
        options: list[dict[str, Any]],
        *,
        uses_cuda: bool,
        num_cores: Sequence[int] = (),
    ) -> Trainer:
        """Start one rank for each entry of Ray actor `options` and wait until all are ready.

        Args:
            num_cores: of each rank; none: an equal share of this machine's.
        """
        import ray

        here = max(1, len(os.sched_getaffinity(0)) // len(options))
        environments = [
            rank_environment(
                settings.trainer, uses_cuda=uses_cuda, dtype=settings.model.dtype, num_cores=cores
            )
            for cores in num_cores or [here] * len(options)
        ]
        actor: Any = ray.remote(TrainerWorker)  # with options, Ray loses its type
        ranks: list[ActorHandle[Any]] = [
            actor.options(**entry, runtime_env={"env_vars": environment}).remote(rank)
            for rank, (entry, environment) in enumerate(zip(options, environments, strict=True))
        ]
        trainer = cls(
            ranks,
            timeout_s=settings.trainer.timeout_s,
            offloads=settings.trainer.offload.is_on,
        )
        limit = ("start", settings.trainer.start_timeout_s, "trainer.start_timeout_s")
        (meeting,) = trainer._gather([ranks[0].find_rendezvous.remote(len(ranks))], *limit)
        calls = [
            handle.start.remote(settings, replace(meeting, rank=rank), uses_cuda)
            for rank, handle in enumerate(ranks)
        ]
        trainer._gather(calls, *limit)
        return trainer

    def update(
        self,
        batch: PackedBatch,
        *,
        policy_version: int,
        step: int,
        kl_reward_coef: float | None = None,
        texts: PackedBatch | None = None,
        record: Sequence[int] = (),
    ) -> UpdateResult:
        """One optimizer update per mini-batch of the batch.

        Args:
            policy_version: of the present weights; engine and trainer log-probs are compared on
                the tokens it sampled.
            step: rollout step, counted from 1: it decides the learning rate.
            kl_reward_coef: of the KL divergence in the reward, in place of the objective's.
            texts: as many mini-batches of texts, whose language-model loss is part of the updates.
            record: sequences of the batch, ascending, whose log-probs the result holds.
        """
        updates: list[RankUpdate] = self.call_all(
            "update",
            _shared(batch),
            policy_version,
            step,
            kl_reward_coef,
            None if texts is None else _shared(texts),
            record,
            num_deadlines=len(batch.mini_batches),
        )
        recorded = [update.recorded for update in updates if update.recorded is not None]
        return replace(
            updates[0].result,
            shares=tuple(update.share for update in updates),
            recorded=recorded[0].merged(recorded[1:]) if recorded else None,
        )

    def logprobs(self, batch: PackedBatch) -> np.ndarray:
        """[T] fp32 log-probs of the response tokens under the present weights, NaN on prompts.

        Same head and micro-batching as `update`; sequences in no mini-batch stay NaN.
        """
        answers: list[np.ndarray | None] = self.call_all("logprobs", _shared(batch))
        parts = [part for part in answers if part is not None]
        merged = parts[0].copy()
        for part in parts[1:]:
            np.copyto(merged, part, where=np.isfinite(part))
        return merged

    def checkpoint_bytes(self) -> int:
        """About how large a checkpoint's shards are."""
        return sum(self.call_all("checkpoint_bytes"))

    def begin_save(self, folder: Path) -> Callable[[], Files]:
        """Copy weights and optimizer to the hosts, and begin to write them into an empty folder.

        Returns:
            Waits until all ranks have written, in any thread, beside other calls; then the files
            are all there, and those that it returns are all there should be.

            Raises CheckpointError where a rank could not write, InfraError where one is gone.
        """
        num_bytes = sum(self.call_all("begin_save", folder.absolute()))
        deadline = time.monotonic() + self._timeout_s + num_bytes / SLOWEST_STORAGE
        return partial(wait_for_save, self.ranks, folder.absolute(), deadline=deadline)

    def load(self, folder: Path, files: Files) -> None:
        """Read what was saved, at this or any other split; every file must be as listed.

        Raises:
            DamageError: one is not.
            CheckpointError: the state is of another model.
        """
        # twice: files are hashed, then read
        reading_s = 2 * sum(file.bytes for file in files.values()) / SLOWEST_STORAGE
        self.call_all("load", folder.absolute(), files, more_s=reading_s)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder with the present weights, config and tokenizer."""
        self.call_all("export", folder.absolute())

    def leave_to_engines(self) -> None:
        """Free the memory of GPUs that trainer.offload leaves to engines while they generate."""
        if self._offloads:
            self.call_all("leave_to_engines")

    def call_all(
        self, method: str, *args: Any, num_deadlines: int = 1, more_s: float = 0.0
    ) -> list[Any]:
        """Call a method of TrainerWorker on all ranks at once and return the results by rank.

        Args:
            num_deadlines: how many things it does that may each take as long as a call.
            more_s: may be spent beyond that.

        Raises:
            MegadapoError: what a rank raised; InfraError where one died or gave no answer in time.
        """
        if not self.ranks:
            raise InfraError(f"the trainer cannot {method}: its ranks have ended")
        calls = [getattr(rank, method).remote(*args) for rank in self.ranks]
        timeout_s = max(1, num_deadlines) * self._timeout_s + more_s
        return self._gather(calls, method, timeout_s, "trainer.timeout_s")

    def check(self) -> None:
        """Look after the ranks while nobody waits for them.

        Raises:
            InfraError: one has died.
        """
        import ray

        if not self._pings:
            self._pings = [rank.__ray_ready__.remote() for rank in self.ranks]
        answered, _ = ray.wait(self._pings, num_returns=len(self._pings), timeout=0)
        for number, ping in enumerate(self._pings):
            if ping in answered:
                gather([ping], names=[f"trainer rank {number}"], doing="rollout", timeout_s=0)
        if len(answered) == len(self._pings):
            self._pings = []

    def shutdown(self) -> None:
        """End all ranks; safe to call again, and after an error."""
        import ray

        ranks, self.ranks = self.ranks, []
        if ranks and ray.is_initialized():
            ray.wait(
                [rank.leave.remote() for rank in ranks],
                num_returns=len(ranks),
                timeout=LEAVE_TIMEOUT_S,
            )
            _kill(ranks)

    def _gather(self, calls: list[Any], method: str, timeout_s: float, limit: str) -> list[Any]:
        """Results in order; the first failure ends all ranks, as the others wait for that one."""
        names = [f"trainer rank {rank}" for rank in range(len(calls))]
        try:
            return gather(
                calls,
                names=names,
                doing=method,
                timeout_s=timeout_s,
                limit=limit,
                watch=self.watch,
            )
        except MegadapoError:
            ranks, self.ranks = self.ranks, []
            _kill(ranks)
            raise


def wait_for_save(ranks: list[ActorHandle[Any]], folder: Path, *, deadline: float) -> Files:
    """Ask the ranks until all have written, and say where everything lies.

    `deadline`: on the monotonic clock, when a rank that answers must have written.

    Raises:
        CheckpointError: a rank could not write; none is writing any more.
        InfraError: one is gone, or still writing at the deadline.
    """
    from megadapo.trainer.save_report import complete_save

    reports: dict[int, RankReport] = {}
    while True:
        asked = [number for number in range(len(ranks)) if number not in reports]
        answers: list[RankReport | None] = gather(
            [ranks[number].save_report.remote() for number in asked],
            names=[f"trainer rank {number}" for number in asked],
            doing="save",
            # between other work; whoever waits for that finds a rank that hangs
            timeout_s=LONGEST_WORK_S,
        )
        reports |= {n: report for n, report in zip(asked, answers, strict=True) if report}
        if len(reports) == len(ranks):
            break
        if time.monotonic() > deadline:
            late = ", ".join(str(number) for number in asked if number not in reports)
            raise InfraError(
                f"trainer ranks {late} are still writing to {folder}: is it reachable?"
            )
        time.sleep(POLL_S)
    return complete_save(folder, list(reports.values()))


def rank_environment(
    trainer: TrainerConfig, *, uses_cuda: bool, dtype: str, num_cores: int
) -> dict[str, str]:
    """Environment of a rank's process, which has so many cores; fixed before it loads torch."""
    environment = cpu_environment(trainer.num_threads or num_cores)
    if not uses_cuda:
        return environment | {"CUDA_VISIBLE_DEVICES": ""}
    environment |= full_precision(dtype) | CUDA_VARIABLES
    if trainer.deterministic:
        environment["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    return environment


def _shared(batch: PackedBatch) -> Any:
    """The batch in Ray's object store: written once, read by all ranks."""
    import ray

    return ray.put(batch)


def _kill(ranks: list[ActorHandle[Any]]) -> None:
    import ray

    for rank in ranks:
        ray.kill(rank)
