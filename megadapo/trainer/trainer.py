"""The driver's handle on all trainer ranks: their processes, calls, saves, and their end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megadapo.cluster.calls import GRACE_S, Watch, gather
from megadapo.cluster.config import START_TIMEOUT_S
from megadapo.cluster.process_log import trainer_log
from megadapo.cluster.processes import cpu_environment, fp32_products, full_precision
from megadapo.cluster.watch.diagnostics import (
    HungProcesses,
    ProcessLocation,
    flight_pipe,
    flight_recorder,
    save_stacks,
)
from megadapo.cluster.watch.heartbeat import HeartbeatWatch, all_alive, heartbeat_file
from megadapo.data.batch import PackedBatch
from megadapo.errors import (
    CheckpointError,
    InfraError,
    MegadapoError,
    NodeDiedError,
    ProcessHungError,
)
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.types import RankReport, TrainerSettings, UpdateRequest, UpdateResult
from megadapo.trainer.worker import TrainerWorker
from megadapo.weights.config import PUBLISHED_GROUP
from megadapo.weights.disk.files import Files

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from megadapo.cluster.cluster import Cluster


CUDA_VARIABLES = {
    # sums inside the switch, and products whose workspace depends on the stream, would give
    # other bits in a rank's second pass over the same tokens
    "NCCL_NVLS_ENABLE": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}

SLOWEST_STORAGE = 50e6
"""Lowest bandwidth of a rank's storage in bytes per second; a slower one counts as failed."""
LEAVE_TIMEOUT_S = 10.0
"""Seconds that a rank has to leave its groups before it is killed."""
POLL_S = 0.1
"""Seconds between two questions whether a save is written."""
LONGEST_WORK_S = 7 * 24 * 3600.0
"""Time limit of calls that a heartbeat watches."""


class Trainer:
    """All ranks of the trainer, one process each. An error ends them all: start a new trainer."""

    def __init__(
        self,
        settings: TrainerSettings,
        cluster: Cluster,
        *,
        log_folder: Path,
        start_timeout_s: float = START_TIMEOUT_S,
        watch: Watch | None = None,
        sends_while_training: bool = False,
    ) -> None:
        """Start the ranks on the cluster's trainer slots; return when all are ready.

        Args:
            watch: checks of the run's other processes, called every few seconds while ranks work.
            sends_while_training: whether the ranks can send published weights while they train.
        """
        self._config, self._watch = settings.trainer, watch or Watch()
        numbers, folder = range(settings.trainer.num_ranks), log_folder.resolve()
        self.logs = [trainer_log(folder, rank) for rank in numbers]
        self._names = [f"trainer rank {rank}" for rank in numbers]
        self._options = [cluster.trainer_options(rank) for rank in numbers]
        self._locations: list[ProcessLocation] = []
        self._pings: list[ObjectRef[Any]] = []
        self._heartbeats: HeartbeatWatch | None = None
        self._heartbeat_lock = threading.Lock()
        recorder = flight_recorder(folder) if cluster.uses_cuda else {}
        environment = partial(
            rank_environment,
            settings.trainer,
            uses_cuda=cluster.uses_cuda,
            dtype=settings.model.dtype,
        )
        environments = [recorder | environment(num_cores=n) for n in cluster.trainer_cores()]
        self.ranks = self._new_processes(environments, sends_while_training=sends_while_training)
        """One actor handle per rank; empty after they have ended."""
        limit = "cluster.start_timeout_s"
        start = partial(self._gather, doing="start", timeout_s=start_timeout_s, limit=limit)
        self._locations = start([rank.location.remote() for rank in self.ranks])
        (first,) = start([self.ranks[0].find_rendezvous.remote(len(numbers))])
        sizes = start(
            [
                handle.start.remote(settings, replace(first, rank=rank), cluster.uses_cuda)
                for rank, handle in enumerate(self.ranks)
            ]
        )
        self.checkpoint_bytes: int = sum(sizes)
        """Approximate size of a checkpoint's shards."""
        self._heartbeats = self._watch_heartbeats()

    def _new_processes(
        self, environments: Sequence[dict[str, str]], *, sends_while_training: bool
    ) -> list[ActorHandle[Any]]:
        import ray

        # Ray takes the threads of an actor from its class only
        group: dict[str, Any] = {"concurrency_groups": {PUBLISHED_GROUP: 1}}
        decorate: Any = ray.remote(**group) if sends_while_training else ray.remote
        actor: Any = decorate(TrainerWorker)
        return [
            actor.options(**options, runtime_env={"env_vars": environment}).remote(rank, log)
            for rank, (options, environment, log) in enumerate(
                zip(self._options, environments, self.logs, strict=True)
            )
        ]

    def check_others(self) -> None:
        """Check what the ranks work with, before an update that its end would make useless."""
        self._watch.check(without=self.check)

    def update(self, request: UpdateRequest) -> UpdateResult:
        """Apply one optimizer update per mini-batch of the request's batch."""
        return UpdateResult.joined(
            self.call_all("update", _shared(request), timeout_s=LONGEST_WORK_S)
        )

    def logprobs(self, batch: PackedBatch) -> np.ndarray:
        """Return [T] fp32 log-probs of the response tokens, NaN on prompts.

        Head and micro-batches are those of `update`; sequences in no mini-batch stay NaN.
        """
        answers: list[np.ndarray | None] = self.call_all(
            "logprobs", _shared(batch), timeout_s=LONGEST_WORK_S
        )
        parts = [part for part in answers if part is not None]
        merged = parts[0].copy()
        for part in parts[1:]:
            np.copyto(merged, part, where=np.isfinite(part))
        return merged

    def scores(self, batch: PackedBatch) -> np.ndarray:
        """Return [S] float64 scores of a batch of pairs; the trainer trains a reward model."""
        answers = self.call_all("scores", _shared(batch), timeout_s=LONGEST_WORK_S)
        scores: np.ndarray = answers[0]
        return scores

    def begin_save(self, folder: Path) -> Callable[[], Files]:
        """Copy weights and optimizer to the hosts and start to write them into an empty folder.

        Return a function that waits until all ranks have written and returns all files. Any thread
        may call it, also beside other calls. It raises CheckpointError if a rank could not write
        and InfraError if one is gone.
        """
        num_bytes = sum(self.call_all("begin_save", folder.absolute()))
        return partial(
            wait_for_save,
            list(self.ranks),
            self._names,
            self.logs,
            folder.absolute(),
            deadline=time.monotonic() + self._config.timeout_s + num_bytes / SLOWEST_STORAGE,
            # a new watch, as the function may run in another thread and a watch serves one thread
            watch=self._watch_heartbeats().check,
        )

    def load(self, folder: Path, files: Files) -> None:
        """Read a checkpoint, saved at any split, whose files must be as listed."""
        # files are read twice: to hash them and to load them
        reading_s = 2 * sum(file.bytes for file in files.values()) / SLOWEST_STORAGE
        timeout_s = self._config.timeout_s + reading_s
        self.call_all("load", folder.absolute(), files, timeout_s=timeout_s)

    def leave_to_engines(self) -> None:
        """Free the memory of shared GPUs; until `take_gpus` nothing may be loaded to them."""
        self.call_all("leave_to_engines")

    def take_gpus(self) -> None:
        """Allow the ranks to load their state: the engines on their GPUs sleep."""
        self.call_all("take_gpu")

    def call_all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method of TrainerWorker on all ranks at once and return the results by rank.

        Raise the MegadapoError of a rank, or InfraError if one died, hangs, or was too slow.
        `timeout_s`: by default trainer.timeout_s.
        """
        if not self.ranks:
            raise InfraError(f"the trainer cannot {method}: its ranks have ended")
        calls = [getattr(rank, method).remote(*args) for rank in self.ranks]
        limit_s = self._config.timeout_s if timeout_s is None else timeout_s
        return self._gather(calls, method, limit_s, "trainer.timeout_s")

    def check(self) -> None:
        """Check the ranks while no call is waiting for them."""
        import ray

        self._check_heartbeats()
        if not self._pings:
            self._pings = [rank.__ray_ready__.remote() for rank in self.ranks]
        answered, _ = ray.wait(self._pings, num_returns=len(self._pings), timeout=0)
        for number, ping in enumerate(self._pings):
            if ping in answered:
                names, logs = [self._names[number]], [self.logs[number]]
                gather([ping], names=names, doing="rollout", timeout_s=0, logs=logs)
        if len(answered) == len(self._pings):
            self._pings = []

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches that all ranks have computed so far."""
        return 0 if self._heartbeats is None else self._heartbeats.progress

    def all_alive(self) -> bool:
        """Return whether the processes of all ranks still send heartbeats."""
        return all_alive([heartbeat_file(log) for log in self.logs])

    def shutdown(self) -> None:
        """End all ranks; safe to call again, and after an error."""
        import ray

        if not self.ranks or not ray.is_initialized():
            return
        calls: list[ObjectRef[Any]] = [rank.leave.remote() for rank in self.ranks]
        left, _ = ray.wait(calls, num_returns=len(calls), timeout=LEAVE_TIMEOUT_S)
        self._kill(writes_stacks=len(left) < len(calls))

    def _gather(
        self, calls: Sequence[ObjectRef[Any]], doing: str, timeout_s: float, limit: str
    ) -> list[Any]:
        """Return results in order. The first failure ends all ranks, as others wait for it."""

        def look() -> None:
            self._check_heartbeats()
            self._watch.check(without=self.check, during_update=doing != "start")

        try:
            return gather(
                calls,
                names=self._names,
                doing=doing,
                timeout_s=timeout_s,
                limit=limit,
                logs=self.logs,
                watch=look,
            )
        except MegadapoError as error:
            self._kill(writes_stacks=isinstance(error, ProcessHungError))
            if isinstance(error, NodeDiedError):
                # a daemon of Ray that has ended explains it, and its watch needs a moment
                time.sleep(GRACE_S)
                self._watch.check(without=self.check)
            raise

    def _watch_heartbeats(self) -> HeartbeatWatch:
        return HeartbeatWatch(
            self._names,
            [heartbeat_file(log) for log in self.logs],
            self.logs,
            # they count the micro-batches that are done
            with_progress=("update", "logprobs", "scores"),
            limit_s=self._config.progress_timeout_s,
            limit="a third of trainer.timeout_s",
        )

    def _check_heartbeats(self) -> None:
        """Raise ProcessHungError if a rank hangs; any thread may call it."""
        if self._heartbeats is None or not self.ranks:
            return
        if self._heartbeat_lock.acquire(blocking=False):
            try:
                self._heartbeats.check()
            finally:
                self._heartbeat_lock.release()

    def _kill(self, *, writes_stacks: bool) -> None:
        """End all processes; `writes_stacks` into their logs first."""
        import ray

        ranks, self.ranks = self.ranks, []
        if writes_stacks:
            by_node: dict[str, HungProcesses] = {}
            for rank, process in enumerate(self._locations):
                hung = by_node.setdefault(process.node, HungProcesses(options=self._options[rank]))
                hung.processes.append(process)
                hung.pipes.append(flight_pipe(self.logs[rank].parent, rank))
            save_stacks(list(by_node.values()))
        for actor in ranks:
            ray.kill(actor)


def rank_environment(
    trainer: TrainerConfig, *, uses_cuda: bool, dtype: str, num_cores: int
) -> dict[str, str]:
    """Return the environment of a rank's process; it must be set before torch is imported."""
    environment = cpu_environment(num_cores)
    if not uses_cuda:
        return environment | fp32_products(dtype) | {"CUDA_VISIBLE_DEVICES": ""}
    environment |= full_precision(dtype) | CUDA_VARIABLES
    if trainer.tensor_parallel * trainer.context_parallel > 1:
        # one queue keeps communication in front of the product that it overlaps with; elsewhere
        # the copies of trainer.offload, on a stream of their own, would share it with all kernels
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if trainer.deterministic:
        environment["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    return environment


def _shared(value: UpdateRequest | PackedBatch) -> Any:
    """Put a value into Ray's object store: written once, read by all ranks."""
    import ray

    return ray.put(value)


def wait_for_save(
    ranks: Sequence[ActorHandle[Any]],
    names: Sequence[str],
    logs: Sequence[Path],
    folder: Path,
    *,
    deadline: float,
    watch: Callable[[], None],
) -> Files:
    """Ask the ranks until all have written; return all files of the checkpoint.

    Args:
        ranks: writing ranks, which may have ended meanwhile.
        deadline: on the monotonic clock, when every rank must have written.
        watch: raises if a rank hangs.
    """
    reports: dict[int, RankReport] = {}
    while True:
        missing = [number for number in range(len(ranks)) if number not in reports]
        answers: list[RankReport | None] = gather(
            [ranks[number].save_report.remote() for number in missing],
            names=[names[number] for number in missing],
            doing="save",
            logs=[logs[number] for number in missing],
            # a rank answers between other work
            timeout_s=LONGEST_WORK_S,
            watch=watch,
        )
        reports |= {n: report for n, report in zip(missing, answers, strict=True) if report}
        if len(reports) == len(ranks):
            return complete_save(folder, list(reports.values()))
        if time.monotonic() > deadline:
            late = ", ".join(str(number) for number in missing if number not in reports)
            raise InfraError(
                f"trainer ranks {late} are still writing to {folder}: is it reachable?"
            )
        time.sleep(POLL_S)


def complete_save(folder: Path, reports: Sequence[RankReport]) -> Files:
    """Write the metadata of all pieces into `folder`; return all files of the checkpoint.

    Raise CheckpointError if a rank could not write, or a piece was written twice or not at all.
    """
    # it imports torch, which the driver does not need before a save
    from megadapo.weights.disk.torch_checkpoint import write_metadata

    if errors := [report.error for report in reports if report.error]:
        raise CheckpointError("; ".join(errors))
    files: Files = {}
    for report in reports:
        if twice := files.keys() & report.files.keys():
            raise CheckpointError(f"{folder / min(twice)} was written by two ranks")
        files |= report.files
    for name in reports[0].pieces:
        pieces = (piece for report in reports for piece in report.pieces[name])
        written = write_metadata(folder / name, pieces)
        files |= {str(Path(name) / file): entry for file, entry in written.items()}
    return files
