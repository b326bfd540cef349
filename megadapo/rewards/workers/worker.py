"""What every worker process does: limits itself, then answers one request after the other.

Started by `processes.ProcessPool` as a process of its own, because what it works on can keep it
busy for ever, or fill the memory. It limits itself before it reads anything, and whoever started it
may kill it at any time.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

Handler = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""From a request to its reply, both JSON values."""

MAX_REASON = 500
"""Characters of the reason that a worker cannot start."""


class CannotStart(Exception):
    """Says why a worker is of no use."""


def serve(prepare: Callable[[Mapping[str, Any]], Handler], *, limits_written: bool = True) -> None:
    """Answer each request line `{"cpu_s", "request"}` with the line of the handler's reply.

    Args:
        prepare: makes the handler, of the program's arguments; may raise CannotStart.
        limits_written: False leaves it to the handler to keep what it runs to `output_bytes`.
    """
    settings = json.loads(sys.argv[1])
    replies = _take_stdout(settings["output_bytes"])
    try:
        _limit_resources(settings["memory_bytes"])
        if limits_written:
            limit_written(settings["output_bytes"])
        handler = prepare(settings)
        # only now: whoever waits for its start waits for a second, on a busy machine too
        if settings["idle"]:
            _step_back()
    except CannotStart as error:
        _send(replies, {"failed": str(error)[:MAX_REASON]})
        return
    except (ImportError, MemoryError, OSError, ValueError) as error:
        _send(replies, {"failed": f"{type(error).__name__}: {error}"[:MAX_REASON]})
        return
    _send(replies, {"ready": True})
    for line in sys.stdin.buffer:
        message = json.loads(line)
        _limit_cpu(message["cpu_s"])
        _send(replies, handler(message["request"]))


def _step_back() -> None:
    """Run only on cores that nobody else wants, where the system knows such a thing."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


def limit_written(num_bytes: int) -> None:
    """Let this process write no more than that to any one file, for the rest of its life."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def _limit_resources(memory_bytes: int) -> None:
    for limit, value in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (value, value))


def _limit_cpu(seconds: int) -> None:
    """End this process when the next request takes longer, even if nobody is left to kill it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = math.ceil(usage.ru_utime + usage.ru_stime)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, hard))


def _take_stdout(output_bytes: int) -> BinaryIO:
    """Keep the reply pipe for replies; what is printed goes to a file that it can fill, or nowhere.

    Children do not inherit the pipe, or its end would not be seen when this process ends.
    """
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    printed = os.memfd_create("printed") if output_bytes else os.open(os.devnull, os.O_WRONLY)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.close(printed)
    return replies


def _send(replies: BinaryIO, message: Mapping[str, Any]) -> None:
    data = memoryview(json.dumps(message).encode() + b"\n")
    while data:
        data = data[replies.write(data) :]
