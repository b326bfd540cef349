"""One worker process, seen from outside: starting, idle, or busy until a deadline."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megadapo.errors import InfraError

START_TIMEOUT_S = 120.0
"""A worker imports what it needs: about a second, and many on a busy machine."""
PATIENCE = 30.0
"""Times its limit that an idle worker may take by the clock: it runs when nobody else does."""
MAX_REPLY_BYTES = 64 << 20
"""A worker that writes more than this has lost its way, and is ended."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the processes of a pool run, and under which limits."""

    module: str
    """Its `main` calls `worker.serve`."""
    what: str
    """Begins messages, as in "WHAT cannot start"."""
    advice: str = ""
    """Ends the message that a worker cannot start: what to set then."""
    memory_bytes: int
    output_bytes: int = 0
    """Bytes that a request may write to any one file, stdout and stderr included; 0: what goes to
    stdout and stderr is lost, and files cannot be written at all."""
    idle: bool = False
    """Run only on cores that nobody else wants; limits are of computing time then."""
    fresh: bool = False
    """A process works on one request only."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What the program is told at its start, as JSON values."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are passed on, beside those that Python needs."""

    def cannot_start(self, reason: str) -> str:
        """The message of a worker that does not get ready."""
        return " ".join([f"{self.what} cannot start: {reason}.", self.advice]).strip()


class WorkerProcess:
    """One process of a program.

    Raises:
        InfraError: the system has no room for it.
    """

    def __init__(self, program: Program) -> None:
        self.ready = False
        self.number: int | None = None
        """Of the request that it is busy with."""
        self._idle = program.idle
        self._unread = b""
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
                [sys.executable, "-P", "-m", program.module, settings],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                env={**_environment(), **program.environment},
                # A Ctrl-C in the terminal is for the run, not for its workers.
                start_new_session=True,
            )
        except OSError as error:
            raise InfraError(program.cannot_start(str(error))) from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.process_id = self._process.pid
        self.replies = self._stdout.fileno()
        self._limit(START_TIMEOUT_S)

    def assign(self, number: int, request: Mapping[str, Any], timeout_s: float) -> None:
        """Start on a request; a worker that has ended is found out by the next `read`."""
        self.number = number
        self._limit(timeout_s)
        line = json.dumps({"cpu_s": math.ceil(timeout_s) + 1, "request": request}) + "\n"
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(line.encode())

    def _limit(self, seconds: float) -> None:
        self._limit_s = seconds
        self._since = time.monotonic()
        self._computed_before = _computing_seconds(self._process.pid) if self._idle else 0.0
        self.deadline = self._since + seconds

    def finish(self) -> int:
        """Wait for the next request; return the number of the last one."""
        number, self.number = self.number, None
        self.ready = True
        self.deadline = math.inf
        return -1 if number is None else number

    @property
    def is_writing(self) -> bool:
        """Whether a part of a reply is there, and its end is not."""
        return bool(self._unread)

    def read(self) -> dict[str, Any] | None:
        """Return the reply if it is complete; None if it is not, or the process has ended."""
        chunk = os.read(self.replies, 1 << 20)
        self._unread += chunk
        if not chunk or len(self._unread) > MAX_REPLY_BYTES:
            self._unread = b""
            return None
        if not self._unread.endswith(b"\n"):
            return None
        line, self._unread = self._unread, b""
        try:
            reply = json.loads(line)
        except ValueError:
            return None
        return reply if isinstance(reply, dict) else None

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
        """End the process and its group; whoever reads its replies comes to their end."""
        # a group outlives its leader: what the process started is ended even where it has ended
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> str:
        """End the process at once, whatever it is doing, and say how it ended."""
        if self._process.returncode is None:
            self.stop()
            self._process.wait()
            self._stdin.close()
            self._stdout.close()
        return _ending(self._process.returncode)


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _computing_seconds(pid: int) -> float:
    """CPU time of a process that has not been waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _environment() -> dict[str, str]:
    """No secrets, one thread, and the same verdicts in every process."""
    paths = [os.path.abspath(path) for path in (*sys.path, "")]
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return kept | {
        "PATH": os.defpath,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "LANG": "C.UTF-8",
    }
