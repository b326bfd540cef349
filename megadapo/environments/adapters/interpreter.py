"""The program of a sandboxed Python interpreter, which runs the code of one episode call by call.

It isolates itself before it reads any code: no network, no files but Python's own, no other
processes. Code runs in the process itself, whose variables last until it is killed. So code can
forge or break the replies of its own episode, and nothing else.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import linecache
import random
import re
import resource
import signal
import sys
import traceback
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from megadapo.rewards.workers import isolation, seccomp
from megadapo.rewards.workers.worker import Handler, serve

MAX_FRAMES = 3
MAX_ERROR_LINES = 12
MAX_ERROR_LINE = 200
FILE = "<call {}>"

_ADDRESS = re.compile(r"(?<= at )0x[0-9a-f]{6,}(?=>)")


def main() -> None:
    """Serve calls, `{"code"}` to what it prints."""
    serve(_prepare)


def _prepare(settings: Mapping[str, Any]) -> Handler:
    user = isolation.enter(settings["isolation"], alone=True)
    isolation.drop_privileges(user, max_processes=0)
    # without signals, timers and limits of time, the end by SIGKILL was not the code's own doing
    limits = [(1, 0xFFFFFFFF, one, False) for one in (resource.RLIMIT_CPU, resource.RLIMIT_RTTIME)]
    denied = ["kill", "tgkill", "setrlimit", "timer_create"]
    seccomp.install(seccomp.program(denied, {"prlimit64": limits}))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # unseeded code does the same when an episode is replayed
    random.seed(settings["seed"])
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    numbers = itertools.count(1)
    max_chars = settings["max_chars"]
    return lambda request: run(request["code"], module.__dict__, next(numbers), max_chars)


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
