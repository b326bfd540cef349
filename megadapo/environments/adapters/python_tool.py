"""The environment "python": a Python interpreter as a tool, whose variables last over an episode.

Code runs in a sandbox, one process an episode (`adapters/interpreter.py`). It starts at the first
call, and is killed with the episode or if a call exceeds a limit.
"""

from __future__ import annotations

import resource
from typing import Literal

from megadapo.environments.adapters.calls import OUTPUT, Tool, require_positive
from megadapo.environments.environment import EnvironmentFailure, Task
from megadapo.rewards.workers.processes import TIMEOUT, CallError, Program, TimeLimit, WorkerProcess

SLOWDOWN = 3.0
"""Factor by which calls may exceed their limit of CPU time in wall-clock time."""
MAX_CODE_BYTES = 32 << 10
"""Longest code of a call."""
MAX_ERROR_CHARS = 4000
NO_OUTPUT = "(no output)"
NO_TIME = "Error: no time is left in this turn, and the code was not run"
LOST = "The interpreter was restarted, and all variables and imports are lost: {}."


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
        _, most_bytes = resource.getrlimit(resource.RLIMIT_AS)
        if 0 <= most_bytes < memory_mib << 20:
            raise ValueError(
                f"the option memory_mib = {memory_mib} is above the memory_mib of the "
                "environment's own process: lower it, or raise rollout.environments.memory_mib"
            )
        self._seconds, self._memory_mib = seconds, memory_mib
        self._settings = {"max_chars": max_chars, "isolation": isolation}
        # the end of a traceback comes on top
        self._max_chars = max_chars + MAX_ERROR_CHARS
        self._seed = 0
        self._limit = TimeLimit(seconds, SLOWDOWN)
        self._interpreter: WorkerProcess | None = None

    def begin_turn(self) -> None:
        self._limit = TimeLimit(self._seconds, SLOWDOWN)

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
        if self._limit.left_s() <= 0:
            return NO_TIME
        if self._interpreter is None:
            await self._launch()
        assert self._interpreter is not None
        try:
            request = {"code": encoded.decode()}
            output = await self._interpreter.call("code", self._limit, request=request)
        except CallError as error:
            reason = f"the code ended it: {error.details}"
            if error.cause == TIMEOUT:
                reason = f"the code took longer than {self._seconds:g} s"
            elif self._interpreter.lost == "signal SIGKILL":
                killed = "was killed from outside, as the kernel does if memory is short"
                raise EnvironmentFailure(f"a Python sandbox {killed}") from error
            await self.close()
            output = LOST.format(reason)
        # code can write any reply itself, but not the reason why its process has ended
        text = output if isinstance(output, str) else ""
        return text[: self._max_chars].encode(errors="replace").decode().rstrip("\n") or NO_OUTPUT

    async def _launch(self) -> None:
        """Start the interpreter.

        Raises:
            EnvironmentFailure: it cannot start.
        """
        program = Program(
            module="megadapo.environments.adapters.interpreter",
            memory_bytes=self._memory_mib << 20,
            # JSON has up to twelve bytes for a character
            max_reply_bytes=16 * self._max_chars,
            settings={**self._settings, "seed": self._seed},
        )
        self._interpreter = WorkerProcess(program)
        try:
            await self._interpreter.start()
        except CallError as error:
            await self.close()
            raise EnvironmentFailure(f"a Python sandbox cannot start: {error.details}") from error

    async def close(self) -> None:
        if self._interpreter is not None:
            await self._interpreter.end()
            self._interpreter = None
