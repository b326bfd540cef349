"""Processes that can be killed, for code that may hang, crash or fill the memory.

A worker answers calls, which are lines of JSON with a number. Its program uses `worker.Host`. A
pool gives its workers one request at a time, and replaces a worker that misses its time limit.
Needs only the standard library, as the process of an environment starts workers too.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from megadapo.errors import InfraError
from megadapo.rewards.workers import cgroup
from megadapo.rewards.workers.worker import MAX_REPLY_BYTES, command, worker_environment

START_TIMEOUT_S = 120.0
"""Limit on the start: a program may import large packages, on a busy machine."""
MAX_FAILED_STARTS = 3
"""Number of starts in a row whose process is lost, after which it cannot be started."""
CRASH_GRACE_S = 1.0
"""Time in which a worker that has closed its pipe may end."""
END_S = 5.0
"""Time that children of an ended process may keep its log open."""
IDLE_SLOWDOWN = 30.0
"""Factor by which an idle worker may exceed its CPU limit in wall-clock time."""
MAX_LOG_BYTES = 16 << 20
"""Size of what a process prints, above which the rest is dropped."""
_SHOWN_LINES, _SHOWN_BYTES = 3, 300
"""Size of the end of the printed text that a message shows."""
LOST, TIMEOUT = "lost process", "timeout"

Reply = Mapping[str, Any]
Value = TypeVar("Value")


class CallError(Exception):
    """A call without a result; its text is "CAUSE: details".

    The cause is "lost process", "timeout", "skipped" and "closed" in a pool, or the program's own.
    """

    def __init__(self, cause: str, details: str) -> None:
        super().__init__(f"{cause}: {details}")
        self.cause = cause
        self.details = details


CLOSED = CallError("closed", "its processes are closed")


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program of a process, and its limits."""

    module: str
    """Module whose `main` uses `worker.Host`."""
    memory_bytes: int
    output_bytes: int | None = 0
    """Bytes that a request may write to any one file, stdout and stderr included. With 0, stdout
    and stderr are discarded and files cannot be written; None: no limit, and they are logged."""
    max_reply_bytes: int = MAX_REPLY_BYTES
    """Size of a reply above which the process is ended."""
    group: Path | None = None
    """Control group below which each process gets one, if the system allows it."""
    idle: bool = False
    """Run only on cores that are otherwise idle; limits are then of CPU time."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the program, as JSON values."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, besides those of `worker_environment`."""
    python: str | None = None
    """Python that runs it; none: this one."""
    folder: str | None = "/"
    """Working directory; none: the one of this process."""
    log_path: Path | None = None


class TimeLimit:
    """The time of one or several calls: of the CPU, if they may take `slowdown` times as long."""

    def __init__(self, seconds: float, slowdown: float = 1.0) -> None:
        self.seconds, self.used_s, self.is_of_cpu = seconds, 0.0, slowdown > 1.0
        self._end = time.monotonic() + slowdown * seconds

    def left_s(self) -> float:
        """Return the time for which calls need not be stopped."""
        # code must not fail because others use the cores
        return min(self.seconds - self.used_s, self._end - time.monotonic())


class WorkerProcess:
    """A process of a program; everything here belongs to one event loop."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: list[asyncio.BaseTransport] = []
        self._reader: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        """Calls in progress by their number; 0 is the start."""
        self._numbers = itertools.count(1)
        self._printed = b""
        self._end = self._ending = ""
        """Reason why it was ended on purpose, and the one why it has ended."""

    @property
    def lost(self) -> str:
        """Reason why it has ended; empty while it has not."""
        return self._end or self._ending

    @property
    def is_alive(self) -> bool:
        return self._reader is not None and not self.lost

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start the process, again if it is lost, and wait until it is ready.

        Raises:
            CallError: the cause is "cannot start" if the program cannot, and "lost process" if the
                process did not get ready.
        """
        for _ in range(MAX_FAILED_STARTS):
            self._ending = ""
            try:
                return await self._start()
            except CallError as error:
                failure = error
                if self._end or error.cause not in (LOST, TIMEOUT):
                    await self.end()
                    raise
        raise CallError(
            LOST,
            f"its process could not be started {MAX_FAILED_STARTS} times in a row: "
            f"{failure.details}, with {self._program.memory_bytes >> 20} MiB of memory",
        )

    async def _start(self) -> None:
        if self._end:
            raise CallError(LOST, self._end)
        program = self._program
        try:
            self._process = process = subprocess.Popen(
                command(program.module, program.python),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=program.folder,
                env={**worker_environment(), **program.variables},
                # Ctrl-C in the terminal is for the run, not for its workers
                start_new_session=True,
            )
        except OSError as error:
            # an error without a filename: the system has no process left
            name = error.filename or "another process"
            raise CallError("cannot start", f"{name}: {error.strerror}") from error
        group = cgroup.enclose(process.pid, program.group, program.memory_bytes)
        replies = await self._reader_of(process.stdout, program.max_reply_bytes)
        log = await self._reader_of(process.stderr, 1 << 16)
        loop = asyncio.get_running_loop()
        self._requests, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        self._pipes.append(self._requests)
        self._reader = asyncio.create_task(self._read(process, replies, log, group))
        settings = {
            "memory_bytes": program.memory_bytes,
            "output_bytes": program.output_bytes,
            "idle": program.idle,
            **program.settings,
        }
        # options may hold secrets, and arguments of a process are visible to every user
        await self._ask(0, "start", TimeLimit(START_TIMEOUT_S), settings)

    async def call(self, name: str, limit: TimeLimit, **arguments: Any) -> Any:
        """Make a call and return its value.

        Raises:
            CallError: it failed, the process has ended, or there was no reply in time.
        """
        number = next(self._numbers)
        return await self._ask(number, name, limit, {"number": number, "call": name, **arguments})

    async def end(self, reason: str = "") -> None:
        """Kill the process with all that it started; calls in progress fail."""
        self._end = self._end or reason
        self._kill()
        if self._reader is not None:
            await asyncio.wait([self._reader])

    async def _give_up(self, message: Mapping[str, Any]) -> None:
        """End the process, because a call has missed its limit."""
        await self.end()

    async def _ask(
        self, number: int, name: str, limit: TimeLimit, message: Mapping[str, Any]
    ) -> Any:
        if not self.is_alive:
            raise CallError(LOST, self.lost)
        try:
            # the end of the process is noticed by the reader
            self._requests.write(json.dumps(message).encode() + b"\n")
        except (TypeError, ValueError) as error:
            raise CallError("wrong call", f"{name} got what is not JSON: {error}") from error
        reply = self._calls[number] = asyncio.get_running_loop().create_future()
        before_s = limit.used_s - self._cpu_s() if limit.is_of_cpu else 0.0
        try:
            while not reply.done() and (left_s := limit.left_s()) > 0:
                # the kernel counts CPU time in steps of this size
                await asyncio.wait([reply], timeout=max(left_s, 0.01))
                if limit.is_of_cpu:
                    limit.used_s = max(limit.used_s, before_s + self._cpu_s())
        finally:
            del self._calls[number]
        if not reply.done():
            await (self._give_up(message) if number else self.end())
            raise CallError(TIMEOUT, f"{name} took longer than {limit.seconds:g} s")
        if isinstance(reply.result(), CallError):
            raise reply.result()
        return reply.result()

    def _cpu_s(self) -> float:
        """Return the CPU time that the process has used; 0 if it has ended."""
        try:
            status = Path(f"/proc/{self.process_id}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return 0.0
        # the name of the program before the bracket may have any characters; proc(5)
        fields = status.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _kill(self) -> None:
        # children can outlive the process, so the group is signalled even if the process has ended;
        # but once the reader is done, another process may have its number
        if self._process is not None and not (self._reader and self._reader.done()):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _reader_of(self, pipe: IO[bytes] | None, limit: int) -> asyncio.StreamReader:
        reader = asyncio.StreamReader(limit)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        self._pipes.append(transport)
        return reader

    async def _read(
        self,
        process: subprocess.Popen[bytes],
        replies: asyncio.StreamReader,
        log: asyncio.StreamReader,
        group: Path | None,
    ) -> None:
        """Pass replies on until the process ends, which fails the calls in progress."""
        logging = asyncio.create_task(self._log(log))
        problem = ""
        try:
            while (line := await replies.readline()).endswith(b"\n"):
                reply = json.loads(line)
                call = self._calls.get(reply["number"])
                if "error" in reply:
                    outcome = CallError(str(reply["cause"]), str(reply["error"]))
                else:
                    outcome = reply["value"]
                if call is not None and not call.done():
                    call.set_result(outcome)
            # one that crashes closes its pipe before it ends, and its own end tells the cause
            if not await _has_ended(process, CRASH_GRACE_S):
                problem = "it closed its pipe"
        except (LookupError, RecursionError, TypeError, ValueError) as error:
            # something else has written to the pipe
            problem = f"its reply cannot be read: {error!r}"
        self._kill()
        await _has_ended(process, math.inf)
        # children in other groups may keep the pipe open
        await asyncio.wait([logging], timeout=END_S)
        logging.cancel()
        for pipe in self._pipes:
            pipe.close()
        if group is not None:
            await asyncio.to_thread(cgroup.remove, group)
        self._ending = problem or self._how_it_ended(process.returncode)
        for call in self._calls.values():
            if not call.done():
                call.set_result(CallError(LOST, self.lost))

    async def _log(self, log: asyncio.StreamReader) -> None:
        """Write what the process prints to its log file, and keep the last bytes."""
        left = MAX_LOG_BYTES
        while data := await log.read(1 << 16):
            self._printed = (self._printed + data)[-_SHOWN_BYTES:]
            if self._program.log_path is not None and left > 0:
                # a full disk must not stop the process
                with suppress(OSError), self._program.log_path.open("ab") as file:
                    file.write(data[:left])
            left -= len(data)

    def _how_it_ended(self, code: int) -> str:
        names = {number.value: number.name for number in signal.Signals}
        how = f"signal {names.get(-code, -code)}" if code < 0 else f"exit code {code}"
        lines = filter(str.strip, self._printed.decode(errors="replace").splitlines())
        if printed := " / ".join([*lines][-_SHOWN_LINES:]):
            how += f" (last printed: {printed})"
        return how


async def _has_ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait until a process has ended; return whether it has in this time."""
    until = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() >= until:
            return False
        await asyncio.sleep(0.005)
    return True


class ProcessPool:
    """Workers that get one request at a time; safe to use from any thread.

    Raises:
        InfraError: a worker cannot start.
    """

    def __init__(
        self,
        program: Program,
        num_workers: int,
        *,
        what: str,
        advice: str = "",
        is_fresh: bool = False,
    ) -> None:
        """Start the workers.

        Args:
            what: start of messages, as in "WHAT cannot start".
            advice: end of the message that a worker cannot start.
            is_fresh: use each process for one request only.
        """
        self._program, self._what, self._advice, self._is_fresh = program, what, advice, is_fresh
        self._is_closing = False
        self._failure: InfraError | CallError | None = None
        """Reason why no more requests are started."""
        self._workers = [WorkerProcess(program) for _ in range(num_workers)]
        self._free: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=what, daemon=True)
        self._thread.start()
        self._do(*map(self._begin, self._workers))
        if (failure := self._failure) is not None:
            self.close()
            raise failure

    @property
    def process_ids(self) -> list[int]:
        """Pids of the workers that run."""
        return [worker.process_id for worker in self._workers if worker.is_alive]

    def run(
        self, requests: Sequence[Reply], timeout_s: float, until: float = math.inf
    ) -> list[Reply | CallError]:
        """Process requests in order, and return the outcome of each.

        Args:
            timeout_s: limit of one request.
            until: time of `time.monotonic` after which no request is started.

        Raises:
            InfraError: the pool is closed, or workers cannot be restarted.
        """
        if self._is_closing:
            raise InfraError(f"{self._what}: its processes have been closed")
        return self._do(*(self._outcome(request, timeout_s, until) for request in requests))

    def close(self) -> None:
        """Kill the workers; requests in progress get no reply."""
        if not self._is_closing:
            self._is_closing, self._failure = True, CLOSED
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _do(self, *work: Coroutine[Any, Any, Value]) -> list[Value]:
        async def together() -> list[Value]:
            return await asyncio.gather(*work)

        return asyncio.run_coroutine_threadsafe(together(), self._loop).result()

    async def _begin(self, worker: WorkerProcess) -> None:
        """Start a worker, which is free then."""
        try:
            await worker.start()
        except CallError as error:
            text = f"{self._what} cannot start: {error.details}. {self._advice}"
            self._failure = self._failure or InfraError(text.strip())
        self._free.put_nowait(worker)

    async def _replace(self, worker: WorkerProcess) -> None:
        new = WorkerProcess(self._program)
        self._workers[self._workers.index(worker)] = new
        await worker.end()
        await self._begin(new)

    async def _outcome(self, request: Reply, timeout_s: float, until: float) -> Reply | CallError:
        try:
            worker = await asyncio.wait_for(self._free.get(), until - time.monotonic())
        except TimeoutError:
            return CallError("skipped", "no time was left")
        try:
            if self._failure is not None:
                raise self._failure
            limit = TimeLimit(timeout_s, IDLE_SLOWDOWN if self._program.idle else 1.0)
            reply: Reply = await worker.call("request", limit, request=request)
        except CallError as error:
            return CLOSED if self._is_closing else error
        else:
            return reply
        finally:
            if self._failure is not None or (worker.is_alive and not self._is_fresh):
                self._free.put_nowait(worker)
            else:
                self._loop.create_task(self._replace(worker))

    async def _end(self) -> None:
        await asyncio.gather(*(worker.end("was closed") for worker in self._workers))
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
