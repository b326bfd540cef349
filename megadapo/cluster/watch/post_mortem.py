"""What a process that hangs was doing: written into the run's folder before it is killed."""

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
from megadapo.cluster.watch.orphans import start_time
from megadapo.cluster.watch.reaper import marked_processes

WRITING_S = 1.0
"""A handler writes within milliseconds, on a machine with nothing else to do."""
RECORDING_S = 4.0
"""NCCL's watchdog looks every second whether it is asked for its record."""
ANSWER_S = 15.0
"""How long a node may take over it before the processes are killed all the same."""


@dataclass(frozen=True, kw_only=True)
class ProcessLocation:
    """Where a process is: its node and its number there."""

    node: str
    pid: int
    started: str | None
    """Tells the number's owner from a later one: `orphans.start_time`."""

    @classmethod
    def here(cls) -> ProcessLocation:
        """Of this process, which is one of Ray's."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return cls(node=node, pid=os.getpid(), started=start_time(os.getpid()))


@dataclass(kw_only=True)
class HungProcesses:
    """Processes of one node that may hang."""

    options: Mapping[str, Any]
    """Ray's, which put a task on that node."""
    processes: list[ProcessLocation] = field(default_factory=list)
    mark: str | None = None
    """Of further processes: `reaper.MARK`."""
    pipes: list[Path] = field(default_factory=list)
    """Which ask for NCCL's record: `flight_pipe`."""


def flight_recorder(folder: Path) -> dict[str, str]:
    """Environment that lets NCCL's groups keep their last operations, and write them down.

    Rank 3 does so into `nccl-rank-3`, when an operation runs out of time and when `flight_pipe` is
    written to. It is torch's pickle, for its own `torchfrtrace`.
    """
    stem = str(folder / "nccl-rank-")
    return {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": stem,
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": stem,
    }


def flight_pipe(folder: Path, rank: int) -> Path:
    """Where a rank with `flight_recorder` is asked for its record; there only with NCCL."""
    return folder / f"nccl-rank-{rank}.pipe"


def save_stacks(suspects: Sequence[HungProcesses]) -> None:
    """Let every process write its stacks into its log, on all nodes at once; never fails.

    Those that are stopped go on: they are to be killed.
    """
    import ray

    if not suspects or not ray.is_initialized():
        return
    task: Any = ray.remote(write_stacks)
    calls = [
        # no share of a GPU, which the processes still hold
        task.options(**{**one.options, "num_cpus": 0, "num_gpus": 0}).remote(
            one.processes, one.mark, one.pipes
        )
        for one in suspects
    ]
    ray.wait(calls, num_returns=len(calls), timeout=ANSWER_S)


def write_stacks(
    processes: Sequence[ProcessLocation], mark: str | None, pipes: Sequence[Path] = ()
) -> None:
    """`save_stacks` on one node."""
    pids = [one.pid for one in processes if start_time(one.pid) == one.started]
    if mark is not None:
        pids += [pid for pid in marked_processes(mark) if pid not in pids]
    asked = [pid for pid in pids if pid != os.getpid() and _ask(pid)]
    recording = [pipe for pipe in pipes if _ask_for_record(pipe)]
    if asked or recording:
        time.sleep(RECORDING_S if recording else WRITING_S)


def _ask(pid: int) -> bool:
    """Send the signal to a process that handles it; another one would die of it."""
    with contextlib.suppress(OSError, ValueError):
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        if caught >> (STACK_SIGNAL - 1) & 1:
            os.kill(pid, STACK_SIGNAL)
            os.kill(pid, signal.SIGCONT)
            return True
    return False


def _ask_for_record(pipe: Path) -> bool:
    with contextlib.suppress(OSError):
        # nobody reads where the process is gone, or has no group of NCCL's
        end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(end, b"1\n")
        finally:
            os.close(end)
        return True
    return False
