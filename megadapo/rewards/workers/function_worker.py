"""The program of a process that calls one reward function.

What a user writes is trusted and may be wrong: here it is kept from starting processes and from
opening sockets by mistake, and everything that it can return or raise becomes a reply.
"""

from __future__ import annotations

import _posixsubprocess
import asyncio
import errno
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megadapo.rewards.workers.results import ResultReader, WrongResult
from megadapo.rewards.workers.worker import CannotStart, Handler, serve

ARGUMENTS = ("messages", "response", "tokens", "ground_truth", "extra_info")
BATCH_PARAMETER = "responses"
"""A function whose second parameter has this name is called with lists."""
MAX_ERROR = 200
"""Characters of what is told of an error."""

_STARTS_PROCESS = ("os.fork", "os.forkpty", "os.exec", "os.system", "os.posix_spawn", "os.spawn")
_STARTS = "starts a process, and reward.functions.processes is false"


def main() -> None:
    """Serve calls, `{"calls": [[argument, ...], ...]}` to `{"results": [result, ...]}`.

    A result is what `ResultReader.read` gives, or `{"error"}` where the function failed.
    """
    serve(_prepare)


def _prepare(settings: Mapping[str, Any]) -> Handler:
    function = load(settings["path"], settings["options"])
    # an event loop opens a pair of sockets
    loop = asyncio.new_event_loop() if inspect.iscoroutinefunction(function) else None
    forbid(network=not settings["network"], processes=not settings["processes"])
    is_batched = takes_batches(function)
    reader = ResultReader(
        step_separators=settings["step_separators"], step_score=settings["step_score"]
    )
    ask = partial(function, **settings["options"])

    def handle(request: Mapping[str, Any]) -> Mapping[str, Any]:
        calls = request["calls"]
        if calls is None:
            return {"takes": "batch" if is_batched else "one" if loop is None else "async"}
        _forget_printed()
        # before the function can change what it is given
        asked = [(text, len(token_ids)) for _, text, token_ids, *_ in calls]
        arguments = [list(column) for column in zip(*calls, strict=True)]
        batches = [arguments] if is_batched else calls
        if loop is None:
            returned = [_call(ask, batch) for batch in batches]
        else:
            returned = loop.run_until_complete(_gather(ask, batches, settings["timeout_s"]))
        if is_batched:
            returned = _each_of(returned[0], len(calls))
        results = zip(returned, asked, strict=True)
        return {"results": [_result(value, *response, reader) for value, response in results]}

    return handle


def load(path: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Import MODULE:FUNCTION, and see whether it can be called.

    Raises:
        CannotStart: it cannot be imported, is no function, or takes other arguments.
    """
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        # a module that is imported raises anything at all
        raise CannotStart(f"{module_name} cannot be imported: {_describe(error)}") from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise CannotStart(f"{module_name} has no function {name}")
    try:
        inspect.signature(function).bind(*ARGUMENTS, **options)
    except (TypeError, ValueError) as error:
        raise CannotStart(
            f"{path} cannot be called with ({', '.join([*ARGUMENTS, *options])}): {error}"
        ) from error
    return function


def takes_batches(function: Callable[..., Any]) -> bool:
    """Whether a function is called with lists, by the name of its second parameter."""
    names = list(inspect.signature(function).parameters)
    return len(names) > 1 and names[1] == BATCH_PARAMETER


async def _gather(
    function: Callable[..., Any], batches: Sequence[Sequence[Any]], timeout_s: float
) -> list[Any]:
    """What each coroutine returned or raised, all side by side."""
    calls = (asyncio.wait_for(function(*batch), timeout_s) for batch in batches)
    return list(await asyncio.gather(*calls, return_exceptions=True))


def _call(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """What a call returned or raised."""
    try:
        value = function(*arguments)
        sys.stdout.flush()
    except (Exception, SystemExit) as error:
        # a user's function raises anything at all
        return error
    return value


def _forget_printed() -> None:
    os.ftruncate(1, 0)
    os.lseek(1, 0, os.SEEK_SET)


def _each_of(returned: Any, num_calls: int) -> list[Any]:
    """One value a response of what a batched function returned."""
    if isinstance(returned, BaseException):
        return [returned] * num_calls
    if not isinstance(returned, list | tuple) or len(returned) != num_calls:
        size = f" of {len(returned)}" if isinstance(returned, list | tuple) else ""
        wrong = WrongResult(
            f"returned a {type(returned).__name__}{size}; expected a list of {num_calls} scores"
        )
        return [wrong] * num_calls
    return list(returned)


def _result(value: Any, text: str, num_tokens: int, reader: ResultReader) -> Mapping[str, Any]:
    if isinstance(value, BaseException):
        return {"error": _describe(value)}
    try:
        return reader.read(value, text=text, num_tokens=num_tokens)
    except WrongResult as error:
        return {"error": str(error)}


def _describe(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "took longer than reward.functions.timeout_s"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return "printed or wrote more than reward.functions.output_kib"
    return f"{type(error).__name__}: {error}"[:MAX_ERROR].removesuffix(": ")


def forbid(*, network: bool, processes: bool) -> None:
    """Raise where Python code opens a socket or starts a process, for the rest of this process."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if network and event in ("socket.__new__", "socket.getaddrinfo"):
            raise PermissionError("opens a socket, and reward.functions.network is false")
        if processes and (event in _STARTS_PROCESS or event == "subprocess.Popen"):
            raise PermissionError(_STARTS)

    def refuse(*_: object) -> int:
        raise PermissionError(_STARTS)

    sys.addaudithook(hook)
    if processes:
        # multiprocessing's ways of starting without a fork pass here, and no audit event tells
        _posixsubprocess.fork_exec = refuse


if __name__ == "__main__":
    main()
