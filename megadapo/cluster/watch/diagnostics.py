"""Records what hung processes do, before they are killed: stacks and NCCL's last operations."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megadapo.cluster.process_log import STACK_SIGNAL
from megadapo.cluster.watch.guard import marked_processes, start_time

WRITING_S = 1.0
"""Seconds that the signal handlers have; they need milliseconds on an idle machine."""
RECORDING_S = 4.0
"""Seconds that NCCL's watchdog has; it checks its pipe every second."""
ANSWER_S = 15.0
"""Seconds that a node may take before its processes are killed anyway."""


@dataclass(frozen=True, kw_only=True)
class ProcessLocation:
    """The node and pid of a process."""

    node: str
    pid: int
    started: str | None
    """Result of `guard.start_time`, to recognize a later process with the same pid."""

    @classmethod
    def here(cls) -> ProcessLocation:
        """Return the location of this process, which must be one of Ray's."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return cls(node=node, pid=os.getpid(), started=start_time(os.getpid()))


@dataclass(kw_only=True)
class HungProcesses:
    """Processes of one node that may hang."""

    options: Mapping[str, Any]
    """Ray options that schedule a task on that node."""
    processes: list[ProcessLocation] = field(default_factory=list)
    mark: str | None = None
    """Mark of further processes (`guard.MARK`)."""
    pipes: list[Path] = field(default_factory=list)
    """Pipes that request NCCL's record (`flight_pipe`)."""


def flight_recorder(folder: Path) -> dict[str, str]:
    """Return the environment that makes NCCL's groups record their last operations.

    Rank 3 writes them to `nccl-rank-3`, when an operation times out or `flight_pipe` is written to.
    The file is torch's pickle, for its own `torchfrtrace`.
    """
    stem = str(folder / "nccl-rank-")
    return {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": stem,
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": stem,
    }


def flight_pipe(folder: Path, rank: int) -> Path:
    """Return the pipe that requests the record of a rank with `flight_recorder`.

    It exists only with NCCL.
    """
    return folder / f"nccl-rank-{rank}.pipe"


def save_stacks(hung: Sequence[HungProcesses]) -> None:
    """Make every process write its stacks into its log, on all nodes at once; never fails.

    Stopped processes are continued, since they are about to be killed.
    """
    import ray

    if not hung or not ray.is_initialized():
        return
    task: Any = ray.remote(write_stacks)
    calls = [
        # no share of a GPU: the hung processes still hold it
        task.options(**{**process.options, "num_cpus": 0, "num_gpus": 0}).remote(
            process.processes, process.mark, process.pipes
        )
        for process in hung
    ]
    ray.wait(calls, num_returns=len(calls), timeout=ANSWER_S)


def write_stacks(
    processes: Sequence[ProcessLocation], mark: str | None, pipes: Sequence[Path] = ()
) -> None:
    """Run `save_stacks` for one node, on that node."""
    pids = [process.pid for process in processes if start_time(process.pid) == process.started]
    if mark is not None:
        pids += [pid for pid in marked_processes(mark) if pid not in pids]
    signalled = [pid for pid in pids if pid != os.getpid() and _signal(pid)]
    recording = [pipe for pipe in pipes if _request_record(pipe)]
    if signalled or recording:
        time.sleep(RECORDING_S if recording else WRITING_S)


def _signal(pid: int) -> bool:
    """Send STACK_SIGNAL if the process handles it; it would kill any other process."""
    with contextlib.suppress(OSError, ValueError):
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        if caught >> (STACK_SIGNAL - 1) & 1:
            os.kill(pid, STACK_SIGNAL)
            os.kill(pid, signal.SIGCONT)
            return True
    return False


def _request_record(pipe: Path) -> bool:
    with contextlib.suppress(OSError):
        # opening fails if the process has ended or has no NCCL group
        end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(end, b"1\n")
        finally:
            os.close(end)
        return True
    return False
