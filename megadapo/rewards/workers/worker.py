"""A worker process: it limits itself, then answers the calls of its host.

`processes.WorkerProcess` starts it, because its work can hang or fill the memory. It sets its
limits before it reads any request, and may be killed at any time.

    python -P worker.py MODULE

runs `MODULE.main`. A Python of the user's may do so, which does not have megadapo and must not get
the packages beside it: so it is found by its place, and this needs the standard library alone.
"""

from __future__ import annotations

import _posixsubprocess
import base64
import ctypes
import importlib
import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, TypeVar

Handler = Callable[[Mapping[str, Any]], Any]
"""Function from a request to its reply, both JSON values."""
Prepared = TypeVar("Prepared")

PR_SET_PDEATHSIG = 1
"""Constant of prctl(2)."""
MAX_REPLY_BYTES = 64 << 20
"""Size of a reply above which a worker is ended."""
MAX_REASON = 500
"""Characters of the reason why a worker cannot start."""
MAX_ERROR = 300
"""Characters of an error that is reported."""
_STARTS_PROCESS = ("os.fork", "os.forkpty", "os.exec", "os.system", "os.posix_spawn", "os.spawn")


class CannotStart(Exception):
    """A reason why a worker cannot start."""


class Host:
    """The pipes to the process that has started this one.

    Children do not inherit them; otherwise they would stay open after this process ends. Code that
    reads stdin gets nothing, and what it prints is limited, discarded or logged.
    """

    def __init__(self) -> None:
        self._requests = os.fdopen(os.dup(0), "rb")
        self._replies = os.fdopen(os.dup(1), "wb", buffering=0)
        self.settings = json.loads(self._requests.readline())
        """Settings of the program."""
        nothing = printed = os.open(os.devnull, os.O_RDWR)
        if self.settings["output_bytes"] is None:
            printed = 2
        elif self.settings["output_bytes"]:
            printed = os.memfd_create("printed")
        for number, file in enumerate((nothing, printed, printed)):
            os.dup2(file, number)

    def begin(self, prepare: Callable[[Mapping[str, Any]], Prepared]) -> Prepared:
        """Limit this process, prepare its work with the settings, and report that it is ready.

        `prepare`: may raise CannotStart, which ends this process.
        """
        try:
            memory_bytes = self.settings["memory_bytes"]
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
            # no dump of a large memory
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if (written_bytes := self.settings["output_bytes"]) is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (written_bytes, written_bytes))
            prepared = prepare(self.settings)
            # after the start, which takes about a second even on a busy machine
            if self.settings["idle"]:
                # run only on cores that are otherwise idle
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        except CannotStart as error:
            reason = str(error)
        except (ImportError, MemoryError, OSError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            self.send(0, value=None)
            return prepared
        self.send(0, cause="cannot start", error=reason[:MAX_REASON])
        sys.exit()

    def calls(self) -> Iterator[dict[str, Any]]:
        """Yield calls until the host ends."""
        return map(json.loads, self._requests)

    def send(self, number: int, **reply: Any) -> None:
        """Answer a call by a value, or by a cause and an error."""
        data = memoryview(json.dumps({"number": number, **reply}).encode() + b"\n")
        while data:
            data = data[self._replies.write(data) :]


def serve(prepare: Callable[[Mapping[str, Any]], Handler]) -> None:
    """Answer requests one by one, with the handler that `prepare` makes of the settings."""
    host = Host()
    handler = host.begin(prepare)
    # the system ends this process with its host, also in the middle of a request
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for call in host.calls():
        host.send(call["number"], value=handler(call["request"]))


def load_object(
    settings: Mapping[str, Any], kind: str, is_kind: Callable[[object], bool] = callable
) -> Any:
    """Import MODULE:NAME of `path`, or read the pickle that the driver has sent.

    Raises:
        CannotStart: it cannot be imported, or is of another kind.
    """
    module, _, name = settings["path"].partition(":")
    try:
        if (sent := settings["pickle"]) is not None:
            loaded = pickle.loads(base64.b64decode(sent))
        else:
            loaded = getattr(importlib.import_module(module), name, None)
    except BaseException as error:
        # a user's module may raise any exception, and exit
        text = describe_error(error, MAX_ERROR)
        raise CannotStart(f"{module} cannot be imported: {text}") from error
    if not is_kind(loaded):
        raise CannotStart(f"{module} has no {kind} {name}")
    return loaded


def command(module: str, python: str | None = None) -> list[str]:
    """Return the command that runs a program, by this Python or another one."""
    return [python or sys.executable, "-P", __file__, module]


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
    return f"{type(error).__name__}: {text_of(error)}"[:limit].removesuffix(": ")


def text_of(error: BaseException) -> str:
    """Return the message of an exception."""
    try:
        return str(error)
    except BaseException:
        # a user's exception may raise any other one, and a call without a reply seems to hang
        return "<exception str() failed>"


if __name__ == "__main__":
    _spec = spec_from_file_location("megadapo", Path(__file__).parents[2] / "__init__.py")
    assert _spec is not None and _spec.loader is not None
    sys.modules["megadapo"] = _package = module_from_spec(_spec)
    _spec.loader.exec_module(_package)
    importlib.import_module(sys.argv[1]).main()
