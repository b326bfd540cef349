"""Processes that can be killed, for code that may hang, crash or fill the memory.

Workers get one request at a time, as a line of JSON, and one that misses its time limit is killed
and replaced, with whatever it started in its process group. Works from any thread, a Ray actor's
included. What such a process does is `worker.serve`.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megadapo.errors import InfraError
from megadapo.rewards.workers.worker_process import Program, WorkerProcess

MAX_FAILED_STARTS = 3


@dataclass(frozen=True)
class Lost:
    """A request without a reply."""

    kind: Literal["timeout", "crash", "skipped", "closed"]
    """skipped: those before it had used up the time there was; closed: nobody waits any more."""
    detail: str = ""
    """How the process ended, where it did."""


Reply = Mapping[str, Any]


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
        """Of the workers there are, those that still start included."""
        return [worker.process_id for worker in self._workers]

    def run(
        self, requests: Sequence[Reply], timeout_s: float, until: float = math.inf
    ) -> list[Reply | Lost]:
        """Have requests worked on in their order, and return what became of each.

        Args:
            timeout_s: limit of one request.
            until: on the clock `time.monotonic`; what was not begun by then is skipped.

        Raises:
            InfraError: the pool is closed, or workers can no longer be started.
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
                self._assign(queue, timeout_s)
                outcomes.update(self._wait(until if queue else math.inf))
            return [outcomes.get(number, Lost("closed")) for number in range(len(requests))]

    def grow(self, num_more: int) -> None:
        """Start more workers; they get requests as soon as they are ready."""
        with self._lock:
            self._workers += [WorkerProcess(self._program) for _ in range(num_more)]

    def close(self) -> None:
        """Kill the workers; requests that are being worked on get no reply."""
        self._closing = True
        while True:
            # one that has just been replaced is another one by now
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

    def _assign(self, queue: deque[tuple[int, Reply]], timeout_s: float) -> None:
        for worker in self._workers:
            if queue and worker.ready and worker.number is None:
                worker.assign(*queue.popleft(), timeout_s)

    def _wait(self, until: float) -> dict[int, Reply | Lost]:
        """Take in what the workers reply, and replace those that ended or are past their time."""
        outcomes: dict[int, Reply | Lost] = {}
        waited_for = [worker for worker in self._workers if worker.deadline < math.inf]
        if not waited_for:
            return outcomes
        until = min(until, *(worker.deadline for worker in waited_for))
        with selectors.DefaultSelector() as selector:
            for worker in waited_for:
                selector.register(worker.replies, selectors.EVENT_READ, worker)
            events = selector.select(max(0.0, until - time.monotonic()))
        for worker in [key.data for key, _ in events]:
            outcomes.update(self._take_reply(worker))
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
        """Kill a worker, say what that cost, and start another in its place."""
        if self._closing:
            return {}
        number, detail = worker.number, worker.kill()
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
