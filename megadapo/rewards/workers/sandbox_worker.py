"""The program of a sandbox: runs Python code that a model wrote, isolated from everything else.

Each run is an unprivileged child of this process, which is the first one of its PID namespace.
After a run all processes that it started are killed. Without namespaces it cannot start any. A
sandbox works on one response only.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import resource
import secrets
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal

from megadapo.rewards.workers import isolation
from megadapo.rewards.workers.worker import (
    MAX_REPLY_BYTES,
    CannotStart,
    Handler,
    serve,
)

Ending = Literal["done", "error", "timeout"]

MAX_RESULT_BYTES = 4096
PROBE_S = 30.0
"""Limit of the empty program that each sandbox runs first."""


def main() -> None:
    """Serve runs of a program.

    `{"code", "inputs", "tests", "seconds_per_run", "seconds", "stops_early"}` to
    `{"runs": [run, ...]}`. There is one run per input, or a single run with the tests; a run is
    `{"ending", "output"}`. Runs are left out once the time is over, once the reply is full, and
    with `stops_early` after the first run that fails.
    """
    serve(_prepare)


def _prepare(settings: Mapping[str, Any]) -> Handler:
    user = isolation.enter(settings["isolation"])
    run = partial(_run, user=user, output_bytes=settings["run_output_bytes"])
    # otherwise a restriction that the kernel refuses would fail every program
    if run("", None, "", PROBE_S)["ending"] != "done":
        raise CannotStart("not even an empty program can run in the sandbox on this system")

    def handle(request: Mapping[str, Any]) -> Mapping[str, Any]:
        until = time.monotonic() + request["seconds"]
        runs: list[Mapping[str, Any]] = []
        space = MAX_REPLY_BYTES // 2
        for text in request["inputs"] if request["tests"] is None else [""]:
            seconds = min(request["seconds_per_run"], until - time.monotonic())
            if seconds <= 0:
                break
            found = run(request["code"], request["tests"], text, seconds)
            # measured as JSON, in which a character may take six bytes
            space -= len(json.dumps(found))
            if space < 0:
                break
            runs.append(found)
            if runs[-1]["ending"] != "done" and request["stops_early"]:
                break
        return {"runs": runs}

    return handle


@dataclass(frozen=True)
class ChildResult:
    """A run that has ended."""

    in_time: bool
    output: bytes
    """The text printed to stdout."""
    result: bytes | None
    """Bytes that the function returned; None if it did not return."""


def run_child(
    work: Callable[[], bytes],
    stdin_bytes: bytes,
    seconds: float,
    *,
    user: int | None,
    output_bytes: int,
    max_processes: int = isolation.MAX_PROCESSES,
) -> ChildResult:
    """Run a function in a child process without privileges, which exits after it."""
    # without it, generated code could write a result and exit
    token = secrets.token_hex(16).encode()
    files = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr", "result")]
    stdin, stdout, _, result = files
    with os.fdopen(os.dup(stdin), "wb") as whole:
        whole.write(stdin_bytes)
    os.lseek(stdin, 0, os.SEEK_SET)
    child = os.fork()
    if child == 0:
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (output_bytes, output_bytes))
        _work(work, token, seconds, user, max_processes)
    in_time = _wait(child, seconds)
    output, written = os.pread(stdout, output_bytes, 0), os.pread(result, MAX_RESULT_BYTES, 0)
    for file in files:
        os.close(file)
    returned = written.startswith(token)
    return ChildResult(in_time, output, written.removeprefix(token) if returned else None)


def _run(
    code: str, tests: str | None, text: str, seconds: float, *, user: int | None, output_bytes: int
) -> Mapping[str, Any]:
    """Run a program with a text on stdin, as Python runs a file, or import it and run tests."""

    def work() -> bytes:
        # pickle and type hints look for a program's classes in its module
        program = ModuleType("__main__" if tests is None else "response")
        sys.modules[program.__name__] = program
        with contextlib.suppress(SystemExit):
            exec(compile(code, "<response>", "exec", dont_inherit=True), program.__dict__)
        if tests is not None:
            exec(compile(tests, "<tests>", "exec", dont_inherit=True), program.__dict__)
        else:
            # Python's own end of a program; both functions are private, and there are no others
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        return b""

    run = run_child(
        work, text.encode(errors="replace"), seconds, user=user, output_bytes=output_bytes
    )
    done = run.result is not None
    return {
        "ending": "done" if done else "error" if run.in_time else "timeout",
        "output": run.output.decode(errors="replace"),
    }


def _work(
    work: Callable[[], bytes], token: bytes, seconds: float, user: int | None, max_processes: int
) -> None:
    """Run the function in this process and exit; its result follows the token in file 3."""
    status = 1
    try:
        cpu_s = math.ceil(seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        isolation.drop_privileges(user, max_processes=max_processes)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
        # those of this process are not the child's
        atexit._clear()
        result = work()
        for output in (sys.stdout, sys.__stdout__):
            # closed, detached, or replaced by something that is no file
            with contextlib.suppress(ValueError, AttributeError):
                output.flush()
        os.write(3, token + result)
        status = 0
    except BaseException:
        # generated code may raise any exception, and none may reach the caller
        status = 1
    finally:
        os._exit(status)


def _wait(child: int, seconds: float) -> bool:
    """Wait for a run and kill all its processes; return whether it ended in time."""
    handle = os.pidfd_open(child)
    in_time = bool(select.select([handle], [], [], seconds)[0])
    os.close(handle)
    # all processes in this PID namespace but this one, the first; without namespaces a run has
    # one process, and -1 would be all processes of the user
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1 if os.getpid() == 1 else child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return in_time
