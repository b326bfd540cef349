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
from megadapo.cluster.environment import cpu_environment, full_precision
from megadapo.cluster.watch.diagnostics import flight_recorder
from megadapo.data.batch import PackedBatch
from megadapo.errors import InfraError
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.processes import RankProcesses
from megadapo.trainer.types import RankUpdate, TrainerSettings, UpdateResult
from megadapo.weights.disk.files import Files

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from megadapo.cluster.cluster import Cluster
    from megadapo.trainer.checkpoint.save import RankReport

CUDA_VARIABLES = {
    # keeps sequence-parallel communication in front of the matrix product it overlaps with
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # both of a rank's passes over the same tokens must give the same bits: sums inside the
    # switch, and products whose workspace depends on the stream, do not
    "NCCL_NVLS_ENABLE": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}

POLL_S = 0.1
"""Between two questions whether a save has been written."""
SLOWEST_STORAGE = 50e6
"""Bytes per second that a rank's storage takes or gives at least, or it has failed."""
LONGEST_WORK_S = 7 * 24 * 3600.0
"""Of what is watched as it gets on."""


class Trainer:
    """All ranks of the trainer as one; after an error it is shut down and of no more use."""

    def __init__(self, processes: RankProcesses, config: TrainerConfig) -> None:
        """`processes`: whose ranks have started."""
        self.processes = processes
        processes.watch_over(config.progress_timeout_s)
        self.watch: Callable[[], None] | None = None
        """Called every few seconds while the ranks work; may raise what ends the run."""
        self._config = config

    @property
    def ranks(self) -> list[ActorHandle[Any]]:
        """One actor handle per rank; none once they have ended."""
        return self.processes.actors

    @classmethod
    def start(cls, settings: TrainerSettings, cluster: Cluster, *, log_folder: Path) -> Trainer:
        """Start the ranks that the settings ask for on the cluster's trainer slots.

        `log_folder`: where each rank writes its log.

        Raises:
            MegadapoError: the model cannot be read or does not fit the layout, or a rank failed.
        """
        options = [cluster.trainer_options(rank) for rank in range(settings.trainer.num_ranks)]
        return cls.start_ranks(
            settings,
            options,
            log_folder=log_folder,
            uses_cuda=cluster.uses_cuda,
            num_cores=cluster.trainer_cores(),
        )

    @classmethod
    def start_ranks(
        cls,
        settings: TrainerSettings,
        options: list[dict[str, Any]],
        *,
        log_folder: Path,
        uses_cuda: bool,
        num_cores: Sequence[int] = (),
    ) -> Trainer:
        """Start one rank for each entry of Ray actor `options` and wait until all are ready.

        Args:
            num_cores: of each rank; none: an equal share of this machine's.
        """
        here = max(1, len(os.sched_getaffinity(0)) // len(options))
        recorder = flight_recorder(log_folder.resolve()) if uses_cuda else {}
        environments = [
            recorder
            | rank_environment(
                settings.trainer, uses_cuda=uses_cuda, dtype=settings.model.dtype, num_cores=cores
            )
            for cores in num_cores or [here] * len(options)
        ]
        processes = RankProcesses(options, environments, log_folder)
        limit = (settings.trainer.start_timeout_s, "trainer.start_timeout_s")
        processes.find(*limit)
        call: Any = processes.actors[0].find_rendezvous.remote(len(options))
        (meeting,) = processes.gather([call], "start", *limit)
        calls = [
            handle.start.remote(settings, replace(meeting, rank=rank), uses_cuda)
            for rank, handle in enumerate(processes.actors)
        ]
        processes.gather(calls, "start", *limit)
        return cls(processes, settings.trainer)

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
            timeout_s=LONGEST_WORK_S,
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
        answers: list[np.ndarray | None] = self.call_all(
            "logprobs", _shared(batch), timeout_s=LONGEST_WORK_S
        )
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
        deadline = time.monotonic() + self._config.timeout_s + num_bytes / SLOWEST_STORAGE
        heartbeats = self.processes.heartbeat_watch(self._config.progress_timeout_s)
        return partial(
            wait_for_save,
            list(self.ranks),
            self.processes,
            folder.absolute(),
            deadline=deadline,
            watch=heartbeats.check,
        )

    def load(self, folder: Path, files: Files) -> None:
        """Read what was saved, at this or any other split; every file must be as listed.

        Raises:
            CorruptCheckpointError: one is not.
            CheckpointError: the state is of another model.
        """
        # twice: files are hashed, then read
        reading_s = 2 * sum(file.bytes for file in files.values()) / SLOWEST_STORAGE
        timeout_s = self._config.timeout_s + reading_s
        self.call_all("load", folder.absolute(), files, timeout_s=timeout_s)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder with the present weights, config and tokenizer."""
        self.call_all("export", folder.absolute())

    def leave_to_engines(self) -> None:
        """Free the memory of GPUs that trainer.offload leaves to engines while they generate."""
        if self._config.offload.is_on:
            self.call_all("leave_to_engines")

    def call_all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method of TrainerWorker on all ranks at once and return the results by rank.

        `timeout_s`: for what takes other than trainer.timeout_s.

        Raises:
            MegadapoError: what a rank raised; InfraError where one died, hangs, or gave no answer
                in time.
        """
        calls = self.processes.call_all(method, *args)
        allowed_s = self._config.timeout_s if timeout_s is None else timeout_s
        return self.processes.gather(calls, method, allowed_s, "trainer.timeout_s", self.watch)

    def check(self) -> None:
        """Look after the ranks while nobody waits for them.

        Raises:
            InfraError: one has died, or hangs.
        """
        self.processes.check()

    def shutdown(self) -> None:
        """End all ranks; safe to call again, and after an error."""
        self.processes.end()


def wait_for_save(
    ranks: Sequence[ActorHandle[Any]],
    processes: RankProcesses,
    folder: Path,
    *,
    deadline: float,
    watch: Callable[[], None],
) -> Files:
    """Ask the ranks until all have written, and say where everything lies.

    Args:
        ranks: that write, though they may have ended since.
        processes: theirs.
        deadline: on the monotonic clock, when a rank that answers must have written.
        watch: raises where a rank hangs.

    Raises:
        CheckpointError: a rank could not write; none is writing any more.
        InfraError: one is gone, or still writing at the deadline.
    """
    from megadapo.trainer.checkpoint.save import complete_save

    reports: dict[int, RankReport] = {}
    while True:
        asked = [number for number in range(len(ranks)) if number not in reports]
        answers: list[RankReport | None] = gather(
            [ranks[number].save_report.remote() for number in asked],
            names=[processes.names[number] for number in asked],
            doing="save",
            logs=[processes.logs[number] for number in asked],
            # between other work
            timeout_s=LONGEST_WORK_S,
            watch=watch,
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
