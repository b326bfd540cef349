"""The processes of one environment: started, called, and replaced when they are lost.

Everything here belongs to one event loop. Each process plays many episodes; an episode's object
stays in one process.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from megadapo.environments import worker
from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.worker import MAX_RESULT_BYTES, MAX_STUCK
from megadapo.rewards.workers.worker import worker_environment

START_TIMEOUT_S = 120.0
"""Limit on the start; an environment may import large packages."""
PING_S = 10.0
"""Time in which a process must answer after a call has missed its limit."""
END_S = 5.0
"""Time that killed processes may take to end."""
MAX_LOG_BYTES = 16 << 20
"""Size of what a process prints, above which the rest is dropped."""
_SHOWN_LINES = 3
_SHOWN_CHARACTERS = 300
LOST = "lost process"
MAX_FAILED_STARTS = 3
"""Failed starts in a row, without a pause, after which there are pauses between them."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 60.0
"""Pauses before further starts; each is twice the one before."""


class CallError(Exception):
    """A call without a result; its text is "CAUSE: details"."""

    def __init__(self, cause: str, details: str) -> None:
        super().__init__(f"{cause}: {details}")
        self.cause = cause
        self.details = details


class EnvironmentProcess:
    """A process that plays episodes of one environment."""

    def __init__(self, config: EnvironmentConfig, log_path: Path | None) -> None:
        self._config = config
        self._log_path = log_path
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_calls = 0
        self._tail: deque[bytes] = deque(maxlen=_SHOWN_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._end = ""
        """Reason why it has ended; empty while it has not."""
        self.objects: set[int] = set()
        """Numbers of the objects in it."""
        self.num_stuck = 0
        """Calls that missed their limit and still occupy a thread."""
        self.is_retired = False
        """Whether it ends with its last object."""
        self.slots = asyncio.Semaphore(1)
        """Calls that it makes at the same time; more would wait within their time limit."""

    @property
    def is_alive(self) -> bool:
        return self._process is not None and not self._end

    @property
    def lost(self) -> str:
        """Message of a process that has ended."""
        return f"{LOST}: {self._end}"

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start the process and wait until it has imported the environment.

        Raises:
            CallError: the cause is "cannot start" if the environment is wrong, and "lost process"
                if the process did not get ready.
        """
        config = self._config
        variables = {name: os.environ[name] for name in config.variables if name in os.environ}
        ready = asyncio.get_running_loop().create_future()
        self._calls[0] = ready
        try:
            self._process = await asyncio.create_subprocess_exec(
                config.python or sys.executable,
                "-P",
                worker.__file__,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**_environment(config), **variables},
                limit=2 * MAX_RESULT_BYTES,
                # Ctrl-C in the terminal is for the run, not for its workers
                start_new_session=True,
            )
        except OSError as error:
            # an error without a filename: the system has no process left
            name = error.filename or "another process"
            raise CallError("cannot start", f"{name}: {error.strerror}") from error
        self._reader = asyncio.create_task(self._read())
        if self._end:
            # it was ended during its creation
            self._kill()
        settings = {
            "path": config.path,
            "options": config.options,
            "recovery": config.recovery,
            "memory_bytes": config.memory_mib << 20,
            "network": config.network,
            "timeout_s": config.timeout_s,
        }
        # options may hold secrets, and arguments of a process are visible to every user
        self._send(settings)
        try:
            reply = await asyncio.wait_for(ready, START_TIMEOUT_S)
        except TimeoutError as error:
            await self.end(f"was not ready after {START_TIMEOUT_S:g} s")
            raise CallError(LOST, self._end) from error
        except CallError as error:
            if "nknown option: -P" in error.details:
                problem = f"{config.python} is older than Python 3.11"
                raise CallError("cannot start", problem) from error
            raise
        if "error" in reply:
            await self.end("cannot start")
            raise CallError(reply["cause"], reply["error"])
        self.slots = asyncio.Semaphore(reply["value"]["slots"])

    async def call(self, name: str, timeout_s: float, **arguments: Any) -> Any:
        """Make a call and return its value.

        Raises:
            CallError: it failed, the process ended, or there was no reply in time.
        """
        if not self.is_alive:
            raise CallError(LOST, self._end)
        self._num_calls += 1
        number = self._num_calls
        try:
            self._send({"number": number, "call": name, **arguments})
        except (TypeError, ValueError) as error:
            raise CallError("wrong call", f"{name} got what is not JSON: {error}") from error
        future = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            reply = await asyncio.wait_for(future, timeout_s)
        except TimeoutError as error:
            self._calls.pop(number, None)
            if name != "cancel":
                await self._cancel(number, arguments.get("object", 0))
            raise CallError("timeout", f"{name} took longer than {timeout_s:g} s") from error
        if "error" in reply:
            raise CallError(reply["cause"], reply["error"])
        return reply["value"]

    async def end(self, reason: str) -> None:
        """Kill the process with all that it started; calls in progress fail."""
        self._end = self._end or reason
        self._kill()
        if self._reader is not None:
            await self._reader

    def _kill(self) -> None:
        # children can outlive the process, so the group is signalled even if the process has ended;
        # but once the reader is done, another process may have its number
        if self._process is not None and not (self._reader and self._reader.done()):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        # the end of the process is noticed by the reader
        with suppress(ConnectionError, RuntimeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _cancel(self, number: int, object_number: int) -> None:
        """Cancel a call that missed its limit; end the process if it does not answer."""
        try:
            state = await self.call("cancel", PING_S, cancelled=number, object=object_number)
        except CallError as error:
            if error.cause == "timeout":
                await self.end("it answered nothing after a call had missed its limit")
            return
        self.num_stuck += state["is_stuck"]

    async def _read(self) -> None:
        """Pass replies on until the process ends, which fails the calls in progress."""
        assert self._process is not None and self._process.stdout is not None
        log = asyncio.create_task(self._log())
        problem = ""
        try:
            while line := await self._process.stdout.readline():
                reply = _read_reply(line)
                future = self._calls.pop(reply["number"], None)
                if future is not None and not future.done():
                    future.set_result(reply)
        except (RecursionError, ValueError) as error:
            problem = f"its reply cannot be read: {error!r}"
        self._kill()
        code = await self._process.wait()
        # children in other groups may keep the pipe open
        await asyncio.wait([log], timeout=END_S)
        log.cancel()
        names = {number.value: number.name for number in signal.Signals}
        how = f"signal {names.get(-code, -code)}" if code < 0 else f"exit code {code}"
        if printed := b" / ".join(self._tail).decode(errors="replace")[-_SHOWN_CHARACTERS:]:
            how += f" (last printed: {printed})"
        self._end = self._end or problem or how
        for future in self._calls.values():
            if not future.done():
                future.set_exception(CallError(LOST, self._end))
                # a call may have been cancelled meanwhile
                future.exception()
        self._calls.clear()

    async def _log(self) -> None:
        """Write what the process prints to its log file, and keep the last lines."""
        assert self._process is not None and self._process.stderr is not None
        left = MAX_LOG_BYTES
        line = b""
        while data := await self._process.stderr.read(1 << 16):
            *lines, line = (line + data).split(b"\n")
            line = line[-_SHOWN_CHARACTERS:]
            self._tail.extend(line[-_SHOWN_CHARACTERS:] for line in lines if line.strip())
            if self._log_path is not None and left > 0:
                # a full disk must not stop the environment
                with suppress(OSError), self._log_path.open("ab") as file:
                    file.write(data[:left])
            left -= len(data)
        if line.strip():
            self._tail.append(line)


def _read_reply(line: bytes) -> dict[str, Any]:
    """Return a reply: a number, and either a value, or a cause and an error.

    Raises:
        RecursionError, ValueError: something else has written to the pipe.
    """
    reply = json.loads(line)
    is_whole = isinstance(reply, dict) and (
        reply.keys() >= {"number", "value"} or reply.keys() >= {"number", "cause", "error"}
    )
    if not is_whole or not isinstance(reply["number"], int):
        raise ValueError(f"{line[:40]!r} is no reply")
    return cast(dict[str, Any], reply)


def _environment(config: EnvironmentConfig) -> dict[str, str]:
    """Return the environment variables that every process of an environment has."""
    variables = {**worker_environment(), "PYTHONUNBUFFERED": "1", "MALLOC_ARENA_MAX": "2"}
    if config.python is not None:
        # its packages are those of its own Python
        paths = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        variables["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths if path)
    return variables


@dataclass(frozen=True)
class EnvironmentDescription:
    """An environment as prompts and sampling need to know it."""

    label: str
    """Its name in metrics."""
    tools: tuple[dict[str, Any], ...]
    """JSON schemas of its tools, for the chat template."""
    stop: tuple[str, ...]
    """Texts that end an action in the middle of a turn."""
    output: str
    """Frame of texts within the model's turn; see `Environment.output`."""
    uses_tokens: bool = False
    """Whether tasks and actions have token ids."""


class EnvironmentSlot:
    """A slot of a worker process, which one object of the environment has until it is released."""

    def __init__(self, process: EnvironmentProcess, number: int, timeout_s: float) -> None:
        self._process, self._number, self._timeout_s = process, number, timeout_s
        process.objects.add(number)
        self.seconds = 0.0
        """Time of the last call."""

    @property
    def is_alive(self) -> bool:
        """Whether its process still runs."""
        return self._process.is_alive

    async def call(self, name: str, **arguments: Any) -> Any:
        """Call a method of the object; raises what `EnvironmentProcess.call` raises."""
        async with self._process.slots:
            start = time.monotonic()
            try:
                return await self._process.call(
                    name, self._timeout_s, object=self._number, **arguments
                )
            finally:
                self.seconds = time.monotonic() - start

    async def release(self) -> None:
        """Close the object and free its slot; a failure of `close` is ignored."""
        if self._number not in self._process.objects:
            return
        self._process.objects.discard(self._number)
        with suppress(CallError):
            await self._process.call("close", self._timeout_s, object=self._number)
        if self._process.is_retired and not self._process.objects:
            await self._process.end("was replaced")


class EnvironmentProcesses:
    """All processes of one entry of rollout.environments."""

    def __init__(self, config: EnvironmentConfig, log_folder: Path | None = None) -> None:
        self._config = config
        self._log_path = log_folder and log_folder / f"environment-{config.label}.log"
        self._places: list[EnvironmentProcess | None] = [None] * config.num_workers
        self._locks = [asyncio.Lock() for _ in self._places]
        self._retired: list[EnvironmentProcess] = []
        self._num_objects = 0
        self.warnings: list[str] = []
        """Lost processes, and starts that failed."""
        self._num_failed_starts = 0
        self._next_start = 0.0
        """Time before which no process is started."""
        self._refusal = ""
        """Reason of the last failed start."""
        self._stopping = asyncio.Event()

    async def start(self) -> EnvironmentDescription:
        """Start all processes and return what the environment says of itself.

        Raises:
            CallError: it cannot start or be created.
        """
        # the first one alone: a wrong environment is noticed once
        first = await self._process(0)
        try:
            described = await first.call("describe", self._config.timeout_s)
        except CallError as error:
            raise CallError("cannot start", f"cannot be created: {error.details}") from error
        await asyncio.gather(*(self._process(place) for place in range(1, len(self._places))))
        return EnvironmentDescription(
            self._config.label,
            tuple(described["tools"]),
            tuple(described["stop"]),
            described["output"],
            described["uses_tokens"],
        )

    async def new_slot(self) -> EnvironmentSlot:
        """Return a slot for a new object, in the process with the fewest."""
        # the others play while one cannot be started
        without_process = math.inf if time.monotonic() < self._next_start else 0

        def load(place: int) -> float:
            process = self._places[place]
            return len(process.objects) if process and process.is_alive else without_process

        process = await self._process(min(range(len(self._places)), key=load))
        self._num_objects += 1
        return EnvironmentSlot(process, self._num_objects, self._config.timeout_s)

    async def stop(self) -> None:
        """Kill all processes."""
        self._stopping.set()
        running = [*self._retired, *filter(None, self._places)]
        await asyncio.gather(*(process.end("was stopped") for process in running))

    @property
    def process_ids(self) -> list[int]:
        """Pids of the processes that run."""
        return [
            process.process_id
            for process in self._places
            if process is not None and process.is_alive
        ]

    async def _process(self, place: int) -> EnvironmentProcess:
        """Return the process of a place; start one unless it can take an object."""
        num_failed_before = self._num_failed_starts
        async with self._locks[place]:
            process = self._places[place]
            if process is not None and process.num_stuck >= MAX_STUCK:
                process.is_retired = True
                if process.objects:
                    self._retired = [process for process in self._retired if process.is_alive] + [
                        process
                    ]
                else:
                    await process.end("was replaced")
            elif process is not None and process.is_alive:
                return process
            elif process is not None:
                self.warnings.append(f"environment {self._config.label}: {process.lost}")
            self._places[place] = None
            while not self._stopping.is_set():
                # callers that waited for a failed start fail with it
                is_outage = self._num_failed_starts >= MAX_FAILED_STARTS
                if is_outage and self._num_failed_starts > num_failed_before:
                    raise CallError(LOST, self._refusal)
                with suppress(TimeoutError):
                    pause_s = self._next_start - time.monotonic()
                    await asyncio.wait_for(self._stopping.wait(), pause_s)
                    break
                process = self._places[place] = EnvironmentProcess(self._config, self._log_path)
                try:
                    await process.start()
                except CallError as error:
                    # this one needs no warning
                    self._places[place] = None
                    self._note_failed_start(error)
                    if error.cause == LOST:
                        continue
                    raise
                self._num_failed_starts, self._next_start = 0, 0.0
                return process
            raise CallError(LOST, "the environments have been stopped")

    def _note_failed_start(self, error: CallError) -> None:
        """Begin a pause if it is not the first one."""
        self._num_failed_starts += 1
        num_pauses = self._num_failed_starts - MAX_FAILED_STARTS
        if num_pauses < 0:
            return
        self._refusal = (
            f"its process could not be started {MAX_FAILED_STARTS} times in a row: {error.details}"
        )
        self._next_start = time.monotonic() + min(
            FIRST_PAUSE_S * 2 ** min(num_pauses, 10), LONGEST_PAUSE_S
        )
        if num_pauses == 0:
            label = self._config.label
            self.warnings.append(f"environment {label}: {self._refusal}; trying again with pauses")
