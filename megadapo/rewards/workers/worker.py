"""The main loop of a worker process: it limits itself, then answers requests one by one.

`processes.ProcessPool` starts it as a separate process, because its work can hang or fill the
memory. It sets its limits before it reads any request, and may be killed at any time.
"""

from __future__ import annotations

import _posixsubprocess
import json
import math
import os
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

Handler = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Function from a request to its reply, both JSON values."""

MAX_REPLY_BYTES = 64 << 20
"""Size of a reply above which a worker is ended."""
MAX_REASON = 500
"""Characters of the reason why a worker cannot start."""
_STARTS_PROCESS = ("os.fork", "os.forkpty", "os.exec", "os.system", "os.posix_spawn", "os.spawn")
REQUIRED = 'reward.isolation = "require", and the system allows no namespaces ({})'
"""Reason of a worker that must be isolated by them."""


class CannotStart(Exception):
    """A reason why a worker cannot start."""


def serve(prepare: Callable[[Mapping[str, Any]], Handler], *, limits_written: bool = True) -> None:
    """Read the program's arguments from the first line of stdin, and answer the lines after it.

    A request line is `{"cpu_s", "request"}`; the answer is the line of the handler's reply.

    Args:
        prepare: creates the handler from the program's arguments; may raise CannotStart.
        limits_written: False if the handler itself limits files to `output_bytes`.
    """
    settings = json.loads(sys.stdin.buffer.readline())
    output_bytes = settings["output_bytes"]
    printed = os.memfd_create("printed") if output_bytes else os.open(os.devnull, os.O_WRONLY)
    replies = take_stdout(printed)
    try:
        limit_memory(settings["memory_bytes"])
        if limits_written:
            limit_written(settings["output_bytes"])
        handler = prepare(settings)
        # after the start, which takes about a second even on a busy machine
        if settings["idle"]:
            # run only on cores that are otherwise idle
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except CannotStart as error:
        send(replies, {"failed": str(error)[:MAX_REASON]})
        return
    except (ImportError, MemoryError, OSError, ValueError) as error:
        send(replies, {"failed": f"{type(error).__name__}: {error}"[:MAX_REASON]})
        return
    send(replies, {"ready": True})
    for line in sys.stdin.buffer:
        message = json.loads(line)
        # the system ends this process if the request takes longer, even without a parent
        usage = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = math.ceil(usage.ru_utime + usage.ru_stime) + message["cpu_s"]
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, hard))
        send(replies, handler(message["request"]))


def worker_environment() -> dict[str, str]:
    """Return a worker's environment: no secrets, one thread, reproducible hashes."""
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


def limit_written(num_bytes: int) -> None:
    """Limit the size of any one file that this process writes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def limit_memory(num_bytes: int) -> None:
    """Limit the address space of this process, and write no core dumps of it."""
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def forbid(*, network: bool, processes: bool, section: str = "reward.functions") -> None:
    """Make Python code raise if it opens a socket or starts a process, until this process ends.

    `section`: of the configuration; it has the keys that allow them.
    """
    starts = f"starts a process, and {section}.processes is false"

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if network and event in ("socket.__new__", "socket.getaddrinfo"):
            raise PermissionError(f"opens a socket, and {section}.network is false")
        if processes and (event in _STARTS_PROCESS or event == "subprocess.Popen"):
            raise PermissionError(starts)

    def refuse(*_: object) -> int:
        raise PermissionError(starts)

    sys.addaudithook(hook)
    if processes:
        # multiprocessing starts processes through this function, without an audit event
        _posixsubprocess.fork_exec = refuse


def describe_error(error: BaseException, limit: int) -> str:
    """Return type and message of an exception in at most `limit` characters."""
    try:
        text = str(error)
    except Exception as failure:
        # the exception's class may be a user's own, and its text may raise anything
        text = f"its message raises {type(failure).__name__}"
    return f"{type(error).__name__}: {text}"[:limit].removesuffix(": ")


def take_stdout(printed: int) -> BinaryIO:
    """Reserve the reply pipe for replies; printed text goes to another open file.

    Children do not inherit the pipe; otherwise it would stay open after this process ends.
    """
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(printed, 1)
    if printed != 2:
        os.dup2(printed, 2)
        os.close(printed)
    return replies


def send(replies: BinaryIO, message: Mapping[str, Any]) -> None:
    """Write a reply as one line of JSON."""
    data = memoryview(json.dumps(message).encode() + b"\n")
    while data:
        data = data[replies.write(data) :]
