"""Processes that can be killed, for code that may hang, crash or fill the memory.

Workers get one request at a time, as a line of JSON. A worker that misses its time limit is killed
with its process group and replaced. A pool works from any thread, also in a Ray actor. The program
of each process calls `worker.serve`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from megadapo.errors import InfraError
from megadapo.rewards.workers import cgroup
from megadapo.rewards.workers.worker import MAX_REPLY_BYTES, worker_environment

START_TIMEOUT_S = 120.0
"""Limit on the start: imports take about a second, and much longer on a busy machine."""
MAX_FAILED_STARTS = 3
CRASH_GRACE_S = 1.0
"""Time in which a worker that has closed its pipe may end."""
IDLE_SLOWDOWN = 30.0
"""Factor by which an idle worker may exceed its CPU limit in wall-clock time."""

Reply = Mapping[str, Any]


@dataclass(frozen=True)
class Lost:
    """A request without a reply."""

    kind: Literal["timeout", "crash", "skipped", "closed"]
    """skipped: no time was left; closed: the pool is closing."""
    detail: str = ""
    """Signal or exit code of the process, if it ended."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program of a pool's processes, and its limits."""

    module: str
    """Module whose `main` calls `worker.serve`."""
    what: str
    """Start of messages, as in "WHAT cannot start"."""
    advice: str = ""
    """End of the message that a worker cannot start."""
    memory_bytes: int
    output_bytes: int = 0
    """Bytes that a request may write to any one file, stdout and stderr included. With 0, stdout
    and stderr are discarded and files cannot be written."""
    group: Path | None = None
    """Control group below which each process gets one, if the system allows it."""
    idle: bool = False
    """Run only on cores that are otherwise idle; limits are then of CPU time."""
    fresh: bool = False
    """Use each process for one request only."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the program, as JSON values."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables to pass on, besides the variables of Python itself."""

    def cannot_start(self, reason: str) -> str:
        """Return the message of a worker that does not get ready."""
        return " ".join([f"{self.what} cannot start: {reason}.", self.advice]).strip()


class WorkerProcess:
    """One process of a program: starting, idle, or busy until a deadline.

    Raises:
        InfraError: the system cannot start another process.
    """

    def __init__(self, program: Program) -> None:
        self.ready = False
        self.number: int | None = None
        """Number of the request in progress."""
        self._idle = program.idle
        self._unread = bytearray()
        settings = json.dumps(
            {
                "memory_bytes": program.memory_bytes,
                "output_bytes": program.output_bytes,
                "idle": program.idle,
                **program.arguments,
            }
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", program.module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                env={**worker_environment(), **program.environment},
                # Ctrl-C in the terminal is for the run, not for its workers
                start_new_session=True,
            )
        except OSError as error:
            raise InfraError(program.cannot_start(str(error))) from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.process_id = self._process.pid
        self._group = cgroup.enclose(self.process_id, program.group, program.memory_bytes)
        self.requests, self.replies = self._stdin.fileno(), self._stdout.fileno()
        # a worker that does not read must not block the caller
        os.set_blocking(self.requests, False)
        # options may hold secrets, and arguments of a process are visible to every user
        self.unsent = memoryview(settings.encode() + b"\n")
        """Rest of the settings or a request, which the pipe has not taken yet."""
        self.send()
        self._limit(START_TIMEOUT_S)

    def assign(self, number: int, request: Mapping[str, Any], timeout_s: float) -> None:
        """Start a request; the next `read` notices if the process has ended."""
        self.number = number
        self._limit(timeout_s)
        line = json.dumps({"cpu_s": math.ceil(timeout_s) + 1, "request": request}) + "\n"
        self.unsent = memoryview(line.encode())
        self.send()

    def send(self) -> None:
        """Write as much of the request as the pipe takes now."""
        try:
            self.unsent = self.unsent[os.write(self.requests, self.unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.unsent = memoryview(b"")

    def _limit(self, seconds: float) -> None:
        self._limit_s = seconds
        self._since = time.monotonic()
        self._cpu_before_s = self._cpu_s() if self._idle else 0.0
        self.deadline = self._since + seconds

    def finish(self) -> int:
        """Make the worker idle; return the number of its last request."""
        number, self.number = self.number, None
        self.ready = True
        self.deadline = math.inf
        return -1 if number is None else number

    @property
    def is_writing(self) -> bool:
        """Whether a reply has arrived in part."""
        return bool(self._unread)

    def read(self) -> dict[str, Any] | None:
        """Return the reply if it is complete; None if it is not, or the process has ended."""
        chunk = os.read(self.replies, 1 << 20)
        self._unread += chunk
        if not chunk or len(self._unread) > MAX_REPLY_BYTES:
            self._unread = bytearray()
            return None
        if not self._unread.endswith(b"\n"):
            return None
        line, self._unread = self._unread, bytearray()
        try:
            reply = json.loads(line)
        except ValueError:
            return None
        return reply if isinstance(reply, dict) else None

    def used_up(self) -> bool:
        """Return whether the limit is used up; call at the deadline.

        The deadline of an idle worker is extended until it has used that much CPU time.
        """
        if not (self._idle and self.ready):
            return True
        left = self._limit_s - (self._cpu_s() - self._cpu_before_s)
        now = time.monotonic()
        if left <= 0 or now >= self._since + IDLE_SLOWDOWN * self._limit_s:
            return True
        self.deadline = now + left
        return False

    def _cpu_s(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def stop(self) -> None:
        """Kill the process and its group; readers of its replies see the end of the file."""
        # children can outlive the process, so the group is signalled even if the process has ended
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self, grace_s: float = 0.0) -> str:
        """Kill the process unless it ends by itself in time; return how it ended."""
        if self._process.returncode is None:
            if grace_s:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(grace_s)
            self.stop()
            self._process.wait()
            self._stdin.close()
            self._stdout.close()
            cgroup.remove(self._group)
        code = self._process.returncode
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class ProcessPool:
    """Workers of one program; safe to use from any thread.

    Raises:
        InfraError: a worker cannot start.
    """

    def __init__(self, program: Program, num_workers: int) -> None:
        self._program = program
        self._closing = False
        self._num_failed_starts = 0
        self._lock = threading.Lock()
        self._workers: list[WorkerProcess] = []
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            for _ in range(num_workers):
                self._workers.append(WorkerProcess(program))
            while not all(worker.ready for worker in self._workers):
                self._wait(until=math.inf)
            on_error.pop_all()

    @property
    def process_ids(self) -> list[int]:
        """Pids of the workers, starting ones included."""
        return [worker.process_id for worker in self._workers]

    def run(
        self, requests: Sequence[Reply], timeout_s: float, until: float = math.inf
    ) -> list[Reply | Lost]:
        """Process requests in order, and return the outcome of each.

        Args:
            timeout_s: limit of one request.
            until: time of `time.monotonic` after which no request is started.

        Raises:
            InfraError: the pool is closed, or workers cannot be restarted.
        """
        with self._lock:
            if not self._workers:
                raise InfraError(f"{self._program.what}: its processes have been closed")
            outcomes: dict[int, Reply | Lost] = {}
            queue = deque(enumerate(requests))
            while not self._closing and len(outcomes) < len(requests):
                if queue and time.monotonic() >= until:
                    outcomes.update((number, Lost("skipped")) for number, _ in queue)
                    queue.clear()
                for worker in self._workers:
                    if queue and worker.ready and worker.number is None:
                        worker.assign(*queue.popleft(), timeout_s)
                outcomes.update(self._wait(until if queue else math.inf))
            return [outcomes.get(number, Lost("closed")) for number in range(len(requests))]

    def grow(self, num_more: int) -> None:
        """Start more workers; they get requests as soon as they are ready."""
        with self._lock:
            self._workers += [WorkerProcess(self._program) for _ in range(num_more)]

    def close(self) -> None:
        """Kill the workers; requests in progress get no reply."""
        self._closing = True
        while True:
            # `run` may replace a worker meanwhile, so they are stopped until the lock is free
            for worker in list(self._workers):
                worker.stop()
            if self._lock.acquire(timeout=0.1):
                break
        try:
            for worker in self._workers:
                worker.kill()
            self._workers = []
        finally:
            self._lock.release()

    def _wait(self, until: float) -> dict[int, Reply | Lost]:
        """Collect replies, and replace workers that ended or missed their deadline."""
        outcomes: dict[int, Reply | Lost] = {}
        busy = [worker for worker in self._workers if worker.deadline < math.inf]
        if not busy:
            return outcomes
        until = min(until, *(worker.deadline for worker in busy))
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.replies, selectors.EVENT_READ, worker)
                if worker.unsent:
                    selector.register(worker.requests, selectors.EVENT_WRITE, worker)
            events = selector.select(max(0.0, until - time.monotonic()))
        # writes first, as taking a reply may close the pipe
        for key, _ in sorted(events, key=lambda event: event[1], reverse=True):
            if key.fd == key.data.requests:
                key.data.send()
            else:
                outcomes.update(self._take_reply(key.data))
        for worker in list(self._workers):
            if time.monotonic() >= worker.deadline and worker.used_up():
                outcomes.update(self._replace(worker, "timeout"))
        return outcomes

    def _take_reply(self, worker: WorkerProcess) -> dict[int, Reply | Lost]:
        reply = worker.read()
        if reply is None:
            return {} if worker.is_writing else self._replace(worker, "crash")
        if not worker.ready:
            if "failed" in reply:
                raise InfraError(self._program.cannot_start(reply["failed"]))
            self._num_failed_starts = 0
            worker.finish()
            return {}
        number = worker.finish()
        if self._program.fresh:
            self._renew(worker)
        return {number: reply}

    def _replace(
        self, worker: WorkerProcess, kind: Literal["timeout", "crash"]
    ) -> dict[int, Reply | Lost]:
        """Kill a worker and start another; return its lost request, if it had one."""
        if self._closing:
            return {}
        # one that crashes closes its pipe before it ends, and its own end tells the cause
        detail = worker.kill(CRASH_GRACE_S if kind == "crash" else 0.0)
        number = worker.number
        self._num_failed_starts += not worker.ready
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            raise InfraError(
                self._program.cannot_start(
                    f"its process ended {MAX_FAILED_STARTS} times before it was ready ({detail}), "
                    f"with {self._program.memory_bytes >> 20} MiB of memory"
                )
            )
        self._renew(worker)
        return {} if number is None else {number: Lost(kind, detail)}

    def _renew(self, worker: WorkerProcess) -> None:
        worker.kill()
        self._workers[self._workers.index(worker)] = WorkerProcess(self._program)
