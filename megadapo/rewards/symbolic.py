"""The second opinion: math-verify in processes of its own that can be killed.

math-verify limits its own time with SIGALRM, which works in a main thread only, and some answers
keep it busy for minutes without it. So it never runs in the caller's process: workers get one
comparison at a time, and one that misses the wall-clock limit is killed and replaced. Works from
any thread, a Ray actor's included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megadapo.errors import InfraError
from megadapo.rewards.refusal import refusal

Pair = tuple[str, str]
"""(answer, gold)."""

START_TIMEOUT_S = 120.0
"""A worker imports sympy and tests itself: about a second, and many on a busy machine."""
MAX_FAILED_STARTS = 3
PATIENCE = 30.0
"""Times its limit that an idle worker may take by the clock: it runs when nobody else does."""
HOW_TO_GO_ON = "Set reward.symbolic = false to run without a second opinion"


@dataclass(frozen=True, kw_only=True)
class SymbolicCounts:
    """What became of the comparisons that were asked for since the pool was started."""

    num_checked: int = 0
    """Comparisons that gave a verdict."""
    num_refused: int = 0
    """Answers that could take long by their look, and were not tried."""
    num_unparsed: int = 0
    """Comparisons where math-verify could not read the answer or the gold."""
    num_timeouts: int = 0
    num_crashes: int = 0
    num_skipped: int = 0
    """Comparisons not made because those before them had used up the time there is."""


class SymbolicPool:
    """Worker processes that compare answers symbolically; safe to use from any thread.

    Idle ones run only on cores that nobody else wants, and their limits are of computing time.

    Raises:
        InfraError: a worker cannot start, or does not get known answers right.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        timeout_s: float,
        seconds_per_minute: float,
        memory_bytes: int,
        idle: bool = False,
    ) -> None:
        self._timeout_s = timeout_s
        self._idle = idle
        self._closing = False
        self._seconds_per_minute = seconds_per_minute
        self._memory_bytes = memory_bytes
        self._counts = SymbolicCounts()
        self._num_failed_starts = 0
        self._verdicts: dict[Pair, bool] = {}
        self._busy: deque[tuple[float, float]] = deque()
        self._lock = threading.Lock()
        self._workers = [_Worker(memory_bytes, idle=idle) for _ in range(num_workers)]
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            while not all(worker.ready for worker in self._workers):
                self._wait(until=math.inf)
            on_error.pop_all()

    @property
    def counts(self) -> SymbolicCounts:
        """The counts so far."""
        return self._counts

    def check_batch(self, pairs: Sequence[Pair]) -> list[bool | None]:
        """Compare answers with golds; the same pair is compared once, and counted once.

        Returns:
            For each pair whether they are equal, or None where there is no verdict.

        Raises:
            InfraError: the pool is closed, or workers can no longer be started.
        """
        with self._lock:
            if not self._workers:
                raise InfraError("the symbolic workers have been closed")
            self._verdicts = {}
            self._run(deque(pair for pair in dict.fromkeys(pairs) if self._admits(pair)))
            return [self._verdicts.get(pair) for pair in pairs]

    def close(self) -> None:
        """Kill the workers; a batch that is being compared gets no more verdicts."""
        self._closing = True
        for worker in self._workers:
            worker.stop()
        with self._lock:
            for worker in self._workers:
                worker.kill()
            self._workers = []

    def _admits(self, pair: Pair) -> bool:
        refused = any(refusal(text) for text in pair)
        self._count("num_refused", int(refused))
        return not refused

    def _run(self, queue: deque[Pair]) -> None:
        started = time.monotonic()
        until = started + self._allowance(started)
        while not self._closing and (queue or any(worker.pair for worker in self._workers)):
            if queue and time.monotonic() >= until:
                self._count("num_skipped", len(queue))
                queue.clear()
                until = math.inf
            for worker in self._workers:
                if queue and worker.ready and worker.pair is None:
                    worker.assign(queue.popleft(), self._timeout_s)
            self._wait(until)
        self._busy.append((started, time.monotonic() - started))

    def _allowance(self, now: float) -> float:
        """Seconds that comparisons may still take in the minute that ends now."""
        while self._busy and self._busy[0][0] < now - 60.0:
            self._busy.popleft()
        return self._seconds_per_minute - sum(seconds for _, seconds in self._busy)

    def _wait(self, until: float) -> None:
        """Take in what the workers reply, and replace those that ended or are past their time."""
        waited_for = [worker for worker in self._workers if worker.deadline < math.inf]
        if not waited_for:
            return
        until = min(until, *(worker.deadline for worker in waited_for))
        with selectors.DefaultSelector() as selector:
            for worker in waited_for:
                selector.register(worker.replies, selectors.EVENT_READ, worker)
            events = selector.select(max(0.0, until - time.monotonic()))
        for worker in [key.data for key, _ in events]:
            self._take_reply(worker)
        for worker in self._workers:
            if time.monotonic() >= worker.deadline and worker.used_up():
                self._replace(worker, "num_timeouts")

    def _take_reply(self, worker: _Worker) -> None:
        reply = worker.read()
        if reply is None:
            self._replace(worker, "num_crashes")
        elif "failed" in reply:
            raise InfraError(f"a symbolic worker cannot start: {reply['failed']}. {HOW_TO_GO_ON}")
        elif worker.pair is None:
            self._num_failed_starts = 0
            worker.finish()
        else:
            if reply["verdict"] == "unparsed":
                self._count("num_unparsed")
            else:
                self._count("num_checked")
                self._verdicts[worker.pair] = reply["verdict"] == "equal"
            worker.finish()

    def _replace(self, worker: _Worker, reason: str) -> None:
        """Kill a worker, count why, and start another in its place."""
        if self._closing:
            return
        worker.kill()
        if worker.ready:
            self._count(reason)
        else:
            self._num_failed_starts += 1
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            raise InfraError(
                f"symbolic workers ended {MAX_FAILED_STARTS} times before they were ready, with "
                f"{self._memory_bytes >> 20} MiB of memory each. {HOW_TO_GO_ON}"
            )
        self._workers[self._workers.index(worker)] = _Worker(self._memory_bytes, idle=self._idle)

    def _count(self, name: str, num: int = 1) -> None:
        counts = self._counts
        self._counts = dataclasses.replace(counts, **{name: getattr(counts, name) + num})


class _Worker:
    """One process of `symbolic_worker`: starting, idle, or busy with a pair until a deadline."""

    def __init__(self, memory_bytes: int, *, idle: bool) -> None:
        self.ready = False
        self.pair: Pair | None = None
        self._idle = idle
        self._unread = b""
        program = [sys.executable, "-P", "-m", "megadapo.rewards.symbolic_worker"]
        self._process = subprocess.Popen(
            [*program, str(memory_bytes), "idle" if idle else "normal"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env=_environment(),
            # A Ctrl-C in the terminal is for the run, not for its workers.
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.replies = self._stdout.fileno()
        self._limit(START_TIMEOUT_S)

    def assign(self, pair: Pair, timeout_s: float) -> None:
        """Start a comparison; a worker that has ended is found out by the next `read`."""
        self.pair = pair
        self._limit(timeout_s)
        cpu_s = math.ceil(timeout_s) + 1
        request = json.dumps({"answer": pair[0], "gold": pair[1], "cpu_s": cpu_s}) + "\n"
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(request.encode())

    def _limit(self, seconds: float) -> None:
        self._limit_s = seconds
        self._since = time.monotonic()
        self._computed_before = _computing_seconds(self._process.pid) if self._idle else 0.0
        self.deadline = self._since + seconds

    def finish(self) -> None:
        """Wait for the next pair."""
        self.ready = True
        self.pair = None
        self.deadline = math.inf

    def read(self) -> dict[str, str] | None:
        """Return the reply, or None if the process has ended."""
        while not self._unread.endswith(b"\n"):
            chunk = os.read(self.replies, 65_536)
            if not chunk:
                return None
            self._unread += chunk
        line, self._unread = self._unread, b""
        reply: dict[str, str] = json.loads(line)
        return reply

    def used_up(self) -> bool:
        """Whether the deadline counts; an idle worker's is put off until it has computed as long.

        To be asked at the deadline.
        """
        if not (self._idle and self.ready):
            return True
        left = self._limit_s - (_computing_seconds(self._process.pid) - self._computed_before)
        now = time.monotonic()
        if left <= 0 or now >= self._since + PATIENCE * self._limit_s:
            return True
        self.deadline = now + left
        return False

    def stop(self) -> None:
        """End the process; whoever reads its replies comes to their end."""
        self._process.kill()

    def kill(self) -> None:
        """End the process at once, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        self._stdout.close()


def _computing_seconds(pid: int) -> float:
    """CPU time of a process that has not been waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _environment() -> dict[str, str]:
    """No secrets, one thread, and the same verdicts in every process."""
    paths = [os.path.abspath(path) for path in sys.path]
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return kept | {
        "PATH": os.defpath,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "LANG": "C.UTF-8",
    }
