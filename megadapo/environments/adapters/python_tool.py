"""The environment "python": a Python interpreter as a tool, whose variables last over an episode.

Code runs in a sandbox, one process an episode (`adapters/interpreter.py`). It starts at the first
call, and is killed with the episode or if a call exceeds a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from megadapo.environments.adapters import interpreter
from megadapo.environments.adapters.calls import OUTPUT, Tool, require_positive
from megadapo.environments.environment import EnvironmentFailure, Task
from megadapo.rewards.workers.worker import worker_environment

START_TIMEOUT_S = 20.0
SLOWDOWN = 3.0
"""Factor by which calls may exceed their limit of CPU time in wall-clock time."""
MAX_CODE_BYTES = 32 << 10
"""Longest code of a call; it fits into a pipe, so that writing never waits."""
MAX_ERROR_CHARS = 4000
NO_OUTPUT = "(no output)"
NO_TIME = "Error: no time is left in this turn, and the code was not run"
LOST = "The interpreter was restarted, and all variables and imports are lost: {}."


class Ended(Exception):
    """A reason why an interpreter has ended that the model's code is to blame for."""


class Budget:
    """The time that is left for the calls of a turn."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.used_s = seconds, 0.0
        self._end = time.monotonic() + SLOWDOWN * seconds

    def left_s(self) -> float:
        """Return the time for which calls need not be stopped."""
        # code must not fail because others use the cores
        return min(self.seconds - self.used_s, self._end - time.monotonic())


class PythonTool(Tool):
    """A Python interpreter: what code prints, and the value of its last expression.

    Args:
        seconds: CPU time of all calls of a turn. They may take three times as long, which must be
            less than `timeout_s`. An interpreter that exceeds it is replaced.
        memory_mib: limit of the interpreter's address space.
        max_chars: characters of a result, without the end of a traceback.
        isolation: "require": Linux namespaces; "auto": otherwise Landlock, if it is allowed.

    Raises:
        ValueError: an option has a wrong value.
    """

    def __init__(
        self,
        *,
        start: str = "",
        stop: str = "",
        output: str = OUTPUT,
        seconds: float = 10.0,
        memory_mib: int = 1024,
        max_chars: int = 2000,
        isolation: Literal["auto", "require"] = "auto",
    ) -> None:
        super().__init__(self.python, start=start, stop=stop, output=output)
        require_positive(float, seconds=seconds)
        require_positive(int, memory_mib=memory_mib, max_chars=max_chars)
        if isolation not in ("auto", "require"):
            raise ValueError(f'the option isolation = {isolation!r} must be "auto" or "require"')
        self._seconds = seconds
        self._settings = {
            "memory_bytes": memory_mib << 20,
            "max_chars": max_chars,
            "isolation": isolation,
        }
        self._seed = 0
        self._budget = Budget(seconds)
        self._interpreter: Interpreter | None = None

    def begin_turn(self) -> None:
        self._budget = Budget(self._seconds)

    async def reset(self, task: Task) -> None:
        self._seed = task.seed

    async def python(self, code: str) -> str:
        """Run Python code; return what it prints, and the value of its last line.

        Variables and imports are kept between calls. There is no network, and no file can be
        written.

        Args:
            code: Python code, of which the last line may be an expression.
        """
        encoded = code.encode(errors="replace")
        if len(encoded) > MAX_CODE_BYTES:
            return f"Error: the code is longer than {MAX_CODE_BYTES} bytes, and was not run"
        if self._budget.left_s() <= 0:
            return NO_TIME
        if self._interpreter is None:
            self._interpreter = Interpreter({**self._settings, "seed": self._seed})
            await self._interpreter.start()
        try:
            return (await self._interpreter.run(encoded, self._budget)).rstrip("\n") or NO_OUTPUT
        except Ended as error:
            await self.close()
            return LOST.format(error)

    async def close(self) -> None:
        if self._interpreter is not None:
            self._interpreter.kill()
            self._interpreter = None


class Interpreter:
    """A process of the program `interpreter`, which is in this process's group.

    Raises:
        EnvironmentFailure: the system cannot start another process.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._num_calls = 0
        self._settings = {**settings, "parent": os.getpid()}
        # a character has up to four bytes; the end of a traceback comes on top
        self._max_reply_bytes = 4 * (settings["max_chars"] + MAX_ERROR_CHARS)
        self._transport: asyncio.ReadTransport | None = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", interpreter.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                env=worker_environment(),
            )
        except OSError as error:
            raise EnvironmentFailure(f"a Python sandbox cannot start: {error}") from error
        assert self._process.stdin is not None
        self._requests = self._process.stdin.fileno()
        # code that forges replies could leave the pipe full
        os.set_blocking(self._requests, False)

    async def start(self) -> None:
        """Wait until the sandbox is ready.

        Raises:
            EnvironmentFailure: it cannot start.
        """
        self._replies = asyncio.StreamReader()
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._replies), self._process.stdout
        )
        try:
            budget = Budget(START_TIMEOUT_S)
            reason = await self._ask(0, json.dumps(self._settings).encode(), budget)
        except Ended as error:
            reason = str(error)
        if reason:
            self.kill()
            raise EnvironmentFailure(f"a Python sandbox cannot start: {reason}")

    async def run(self, code: bytes, budget: Budget) -> str:
        """Return the output of code, and count its CPU time."""
        self._num_calls += 1
        return await self._ask(self._num_calls, code, budget)

    def kill(self) -> None:
        """End the process, also in the middle of a call."""
        self._process.kill()
        self._process.wait()
        if self._transport is not None:
            self._transport.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    async def _ask(self, number: int, text: bytes, budget: Budget) -> str:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._requests, interpreter.HEADER.pack(number, len(text)) + text)
        reading = asyncio.ensure_future(self._read(number))
        used_s = budget.used_s - self._cpu_s()
        try:
            while not reading.done() and (left_s := budget.left_s()) > 0:
                # the kernel counts CPU time in steps of this size
                await asyncio.wait([reading], timeout=max(left_s, 0.01))
                budget.used_s = used_s + self._cpu_s()
            if not reading.done():
                raise Ended(f"the code took longer than {budget.seconds:g} s")
            return await reading
        except asyncio.IncompleteReadError:
            raise Ended(await self._how_it_ended()) from None
        finally:
            reading.cancel()

    async def _read(self, number: int) -> str:
        header = await self._replies.readexactly(interpreter.HEADER.size)
        replied, size = interpreter.HEADER.unpack(header)
        if replied != number or size > self._max_reply_bytes:
            raise Ended("the code wrote to a file that is not its own")
        return (await self._replies.readexactly(size)).decode(errors="replace")

    def _cpu_s(self) -> float:
        """Return the CPU time that the process has used."""
        # the name of the program before the bracket may have any characters; proc(5)
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def _how_it_ended(self) -> str:
        """Return how the process ended, after its pipe did.

        Raises:
            EnvironmentFailure: it was killed from outside.
        """
        try:
            code = await asyncio.to_thread(self._process.wait, 1.0)
        except subprocess.TimeoutExpired:
            return "the code closed a file that is not its own"
        if code == -signal.SIGKILL:
            raise EnvironmentFailure(
                "a Python sandbox was killed from outside, as the kernel does if memory is short"
            )
        ending = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the code ended it with {ending}"
