"""The program of a sandboxed Python interpreter, which runs the code of one episode call by call.

It isolates itself before it reads any code: no network, no files but Python's own, no other
processes. Code runs in the process itself, whose variables last until it is killed. So code can
forge or break the replies of its own episode, and nothing else.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import io
import itertools
import json
import linecache
import os
import random
import re
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    # another Python does not have megadapo, and must not get the packages beside it
    _spec = ModuleSpec("megadapo", None, is_package=True)
    _spec.submodule_search_locations = [str(Path(__file__).resolve().parents[2])]
    sys.modules["megadapo"] = module_from_spec(_spec)

from megadapo.rewards.workers import isolation, landlock, seccomp  # noqa: E402 - as above

HEADER = struct.Struct(">II")
"""Number of the call and bytes of the text after it, in both directions; call 0 is the start."""
MAX_FRAMES = 3
MAX_ERROR_LINES = 12
MAX_ERROR_LINE = 200
FILE = "<call {}>"

_ADDRESS = re.compile(r"(?<= at )0x[0-9a-f]{6,}(?=>)")


def main() -> None:
    """Read settings, and reply with the reason why the sandbox cannot start, or an empty text.

    After that, every code that is read gets its output as a reply.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    discarded = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(discarded, number)
    settings = json.loads(_read(requests) or "null")
    try:
        _isolate(settings)
    except OSError as error:
        _reply(replies, 0, str(error))
        return
    # unseeded code does the same when an episode is replayed
    random.seed(settings["seed"])
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    _reply(replies, 0, "")
    for number in itertools.count(1):
        code = _read(requests)
        if code is None:
            return
        _reply(replies, number, run(code, module.__dict__, number, settings["max_chars"]))


def run(code: str, names: dict[str, Any], number: int, max_chars: int) -> str:
    """Return what code prints, with the value of a last expression and the end of a traceback."""
    printed, failure = _Printed(max_chars), ""
    name = FILE.format(number)
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    sys.stdin = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            tree = ast.parse(code, name)
            last = [
                statement.value for statement in tree.body[-1:] if isinstance(statement, ast.Expr)
            ]
            tree.body = tree.body[: len(tree.body) - len(last)]
            # otherwise the future statements of this module would hold for the code
            exec(compile(tree, name, "exec", dont_inherit=True), names)
            for expression in last:
                value = eval(
                    compile(ast.Expression(expression), name, "eval", dont_inherit=True), names
                )
                if value is not None:
                    print(repr(value))
        except BaseException as error:
            # generated code may raise any exception, also SystemExit
            failure = _end_of_traceback(error)
    # addresses differ between processes, and so would a replayed episode
    return _ADDRESS.sub("0x...", printed.text() + failure)


class _Printed(io.TextIOBase):
    """A file that keeps the first characters that are printed, and counts the others."""

    def __init__(self, max_chars: int) -> None:
        self._kept: list[str] = []
        self._left, self._num_cut = max_chars, 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if kept := text[: self._left]:
            self._kept.append(kept)
        self._left -= len(kept)
        self._num_cut += len(text) - len(kept)
        return len(text)

    def text(self) -> str:
        """Return the kept characters, and how many were cut off."""
        cut = f"\n[{self._num_cut} more characters]\n" if self._num_cut else ""
        return "".join(self._kept) + cut


def _end_of_traceback(error: BaseException) -> str:
    """Return the last lines of a traceback, with frames of the calls' code only."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(FILE.format("")[:-1])
    ][-MAX_FRAMES:]
    lines = [
        *(["Traceback (most recent call last):\n"] if frames else []),
        *traceback.format_list(frames),
        *traceback.format_exception_only(error),
    ]
    shown = "".join(lines).splitlines()[-MAX_ERROR_LINES:]
    return "\n".join(line[:MAX_ERROR_LINE] for line in shown)


def _isolate(settings: Mapping[str, Any]) -> None:
    """Restrict this process permanently.

    Raises:
        OSError: the system does not allow it.
    """
    refused = isolation.refusal()
    if refused and settings["isolation"] == "require":
        raise OSError(f'isolation = "require", and the system allows no namespaces ({refused})')
    if refused and landlock.version() < landlock.MIN_VERSION:
        raise OSError(
            f"this system does not isolate processes ({refused}; Landlock needs Linux 6.2), and "
            "generated code never runs unisolated: allow user namespaces, or use another machine"
        )
    user = None if refused else isolation.enter_alone(writable=False)
    isolation.drop_privileges(user, max_processes=0)
    memory_bytes = settings["memory_bytes"]
    try:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    except ValueError:
        raise OSError(
            f"its option memory_mib = {memory_bytes >> 20} is above the memory_mib of the "
            "environment's own process: lower it, or raise rollout.environments.memory_mib"
        ) from None
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    # without signals, timers and limits of time, the end by SIGKILL was not the code's own doing
    limits = [(1, 0xFFFFFFFF, one, False) for one in (resource.RLIMIT_CPU, resource.RLIMIT_RTTIME)]
    denied = ["kill", "tgkill", "setrlimit", "timer_create"]
    seccomp.install(seccomp.program(denied, {"prlimit64": limits}))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # after the change of the user id, which clears it
    ctypes.CDLL(None).prctl(isolation.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != settings["parent"]:
        os._exit(1)


def _read(requests: io.BufferedIOBase) -> str | None:
    """Return the next text; None at the end of the pipe."""
    header = requests.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return requests.read(HEADER.unpack(header)[1]).decode()


def _reply(replies: int, number: int, text: str) -> None:
    data = text.encode(errors="replace")
    data = HEADER.pack(number, len(data)) + data
    while data:
        data = data[os.write(replies, data) :]


if __name__ == "__main__":
    main()
