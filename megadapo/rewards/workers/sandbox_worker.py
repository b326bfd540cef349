"""The program of a sandbox: runs Python code that a model wrote, isolated from everything else.

Each run is an unprivileged child of this process, which is the first one of its PID namespace.
After a run all processes that it started are killed. Without namespaces it cannot start any. A
sandbox works on one response only.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import resource
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any

from megadapo.rewards.workers import isolation
from megadapo.rewards.workers.proxies import run_tests, serve_program
from megadapo.rewards.workers.worker import MAX_REPLY_BYTES, CannotStart, Handler, serve

MAX_RESULT_BYTES = 4096
PROBE_S = 30.0
"""Limit of the empty program that each sandbox runs first."""
SLEEP_FACTOR = 5.0
"""Factor by which a run may sleep longer than it may use the CPU."""
# opened before the sandbox gets a file system without it
_PROC = os.open("/proc", os.O_RDONLY)


def main() -> None:
    """Serve runs of a program.

    `{"code", "inputs", "tests", "names", "seconds_per_run", "seconds", "stops_early"}` to
    `{"runs": [run, ...]}`. There is a run for each input, or for none a single one of tests that
    use these names of the program. A run is `{"ending", "output"}`: "done", "error" or "timeout",
    and what it printed, or why its tests cannot be used. Runs are left out once the time is used
    up, once the reply is full, and with `stops_early` after the first run that fails.
    """
    serve(_prepare)


def _prepare(settings: Mapping[str, Any]) -> Handler:
    user = isolation.enter(settings["isolation"])
    run = partial(run_child, user=user, output_bytes=settings["run_output_bytes"])
    # otherwise a restriction that the kernel refuses would fail every program
    if run(lambda: b"", b"", PROBE_S).result is None:
        raise CannotStart("not even an empty program can run in the sandbox on this system")
    tests_end, program_end = socket.socketpair()
    null = os.open(os.devnull, os.O_RDWR)
    # started now, because a process that is forked after this one has read tests could find them
    files = [null, null, null, program_end.fileno()]
    program = _fork(serve_program, b"", files, user, 0, isolation.MAX_PROCESSES)
    program_end.close()

    def handle(request: Mapping[str, Any]) -> Mapping[str, Any]:
        code, tests = request["code"], request["tests"]
        work: Callable[[], bytes] = partial(run_tests, code, tests, request["names"])
        beside = {program: tests_end.fileno()}
        if tests is None:
            _end(beside)
            work, beside = partial(_run_program, code), {}
        left_s, space = request["seconds"], MAX_REPLY_BYTES // 2
        runs: list[Mapping[str, Any]] = []
        for text in request["inputs"]:
            seconds = min(request["seconds_per_run"], left_s)
            if seconds <= 0:
                break
            ended = run(work, text.encode(errors="replace"), seconds, beside=beside)
            left_s -= ended.used_s
            ending = "error" if ended.result is None else "done"
            output = ended.output if tests is None else ended.result or b""
            found = {"ending": ending if ended.in_time else "timeout"}
            found["output"] = output.decode(errors="replace")
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

    used_s: float
    """Its time, as `_wait` counts it."""
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
    beside: Mapping[int, int] = MappingProxyType({}),
) -> ChildResult:
    """Run a function in a child process without privileges, which exits after it.

    `beside`: a child whose time counts too and which ends with it, and file 4 of the function.
    """
    # without it, generated code could write a result and exit
    token = secrets.token_hex(16).encode()
    files = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr", "result")]
    stdin, stdout, _, result = files
    with os.fdopen(os.dup(stdin), "wb") as whole:
        whole.write(stdin_bytes)
    os.lseek(stdin, 0, os.SEEK_SET)
    given = [*files, *beside.values()]
    child = _fork(work, token, given, user, output_bytes, max_processes)
    used_s = _wait([child, *beside], seconds)
    output, written = os.pread(stdout, output_bytes, 0), os.pread(result, MAX_RESULT_BYTES, 0)
    for file in files:
        os.close(file)
    returned = written.removeprefix(token) if written.startswith(token) else None
    return ChildResult(used_s, used_s <= seconds, output, returned)


def _run_program(code: str) -> bytes:
    """Run a program as Python runs a file."""
    # pickle and type hints look for a program's classes in its module
    program = sys.modules["__main__"] = ModuleType("__main__")
    with contextlib.suppress(SystemExit):
        exec(compile(code, "<response>", "exec", dont_inherit=True), program.__dict__)
    # Python's own end of a program; both functions are private, and there are no others
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return b""


def _fork(
    work: Callable[[], bytes],
    token: bytes,
    files: Sequence[int],
    user: int | None,
    output_bytes: int,
    max_processes: int,
) -> int:
    """Start a process without privileges that does the work and exits; return its id.

    It has the files from number 0 on. Its result follows the token in file 3.
    """
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(len(files), os.sysconf("SC_OPEN_MAX"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (output_bytes, output_bytes))
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


def _wait(children: Sequence[int], seconds: float) -> float:
    """Wait until the first process ends, and kill all; return the time that they have used.

    It is CPU time, which does not depend on other processes. Time in which they sleep counts too,
    by a part, and time in which they wait for a CPU does not.
    """
    start, handle = time.monotonic(), os.pidfd_open(children[0])
    used_s, has_ended = 0.0, False
    while used_s <= seconds and not has_ended:
        has_ended = bool(select.select([handle], [], [], max(seconds - used_s, 0.01))[0])
        # clocks as of clock_getcpuclockid(3)
        cpu_s = sum(time.clock_gettime(~child << 3 | 2) for child in children)
        asleep_s = time.monotonic() - start - cpu_s - _queued_s()
        used_s = max(cpu_s, asleep_s / SLEEP_FACTOR)
    os.close(handle)
    # with processes that these have started
    return max(used_s, _end(children))


def _queued_s() -> float:
    """Return how long the main threads of this process's children have waited for a CPU."""

    def read(path: str) -> list[str]:
        with open(path, opener=partial(os.open, dir_fd=_PROC)) as file:
            return file.read().split()

    # a kernel may lack these files, and hide processes
    with contextlib.suppress(OSError):
        # numbers outside of the namespaces
        me = os.readlink("self", dir_fd=_PROC)
        children = read(f"{me}/task/{me}/children")
        return sum(int(read(f"{child}/schedstat")[1]) for child in children) / 1e9
    return 0.0


def _end(children: Iterable[int]) -> float:
    """Kill processes, and all that they have started; return their CPU time."""
    # all processes in this PID namespace but this one, the first; without namespaces a run has
    # these processes, and -1 would be all processes of the user
    for child in [-1] if os.getpid() == 1 else children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    used_s = 0.0
    with contextlib.suppress(ChildProcessError):
        while True:
            usage = os.wait4(-1, 0)[2]
            used_s += usage.ru_utime + usage.ru_stime
    return used_s
