"""The program of a process that calls one reward function.

A user's function is trusted but may have bugs. So it cannot start processes or open sockets by
mistake, and anything that it returns or raises becomes a reply.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import inspect
import math
import numbers
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megadapo.rewards.steps import COMBINE, StepScore, split_steps
from megadapo.rewards.workers.worker import CannotStart, Handler, describe_error, forbid, serve

ARGUMENTS = ("messages", "response", "tokens", "ground_truth", "extra_info")
BATCH_PARAMETER = "responses"
"""Name of the second parameter of a function that takes lists."""
MAX_ERROR = 200
"""Characters of an error that are reported."""
MAX_PARTS = 32
MAX_NAME = 64
"""Characters of a part's name."""

_OF_THE_CALL = (FileNotFoundError, FileExistsError, PermissionError)
"""Errors of the system that a repeated call meets again."""
_RESERVED = ("score", "correct", "steps")


def main() -> None:
    """Serve calls, `{"calls": [[argument, ...], ...]}` to `{"results": [result, ...]}`.

    A result is the output of `ResultReader.read`, or `{"error", "outage"}` if the function failed.
    An outage is an error of the system or the network, which another call may not meet.
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
        # the limit on printed output is that of one request
        os.ftruncate(1, 0)
        os.lseek(1, 0, os.SEEK_SET)
        # copied before the function can change its arguments
        texts = [(text, len(token_ids)) for _, text, token_ids, *_ in calls]
        arguments = [list(column) for column in zip(*calls, strict=True)]
        batches = [arguments] if is_batched else calls
        if loop is None:
            returned = [_call(ask, batch) for batch in batches]
        else:
            returned = loop.run_until_complete(_run_coroutines(ask, batches, settings["timeout_s"]))
        if is_batched:
            returned = _each_of(returned[0], len(calls))
        results = zip(returned, texts, strict=True)
        return {"results": [_result(value, *response, reader) for value, response in results]}

    return handle


def load(path: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Import MODULE:FUNCTION, and check that it can be called.

    Raises:
        CannotStart: it cannot be imported, is no function, or takes different arguments.
    """
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        # a user's module may raise any exception
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
    """Return whether a function takes lists, by the name of its second parameter."""
    names = list(inspect.signature(function).parameters)
    return len(names) > 1 and names[1] == BATCH_PARAMETER


async def _run_coroutines(
    function: Callable[..., Any], batches: Sequence[Sequence[Any]], timeout_s: float
) -> list[Any]:
    """Run coroutines concurrently; return the value or exception of each."""

    async def call(arguments: Sequence[Any]) -> Any:
        try:
            return await asyncio.wait_for(function(*arguments), timeout_s)
        except (KeyboardInterrupt, SystemExit) as error:
            # the loop would raise it, and end the calls of the other responses
            return error

    calls = map(call, batches)
    return list(await asyncio.gather(*calls, return_exceptions=True))


def _call(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Return the value or exception of a call."""
    try:
        value = function(*arguments)
        sys.stdout.flush()
    except BaseException as error:
        # a user's function may raise any exception, and this is where its code ends
        return error
    return value


def _each_of(returned: Any, num_calls: int) -> list[Any]:
    """Return one value per response from the result of a batched function."""
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
        is_outage = isinstance(value, OSError) and not (
            isinstance(value, _OF_THE_CALL) or value.errno == errno.EFBIG
        )
        return {"error": _describe(value), "outage": is_outage}
    try:
        return reader.read(value, text=text, num_tokens=num_tokens)
    except WrongResult as error:
        return {"error": str(error)}
    except Exception as error:
        # a returned object may raise anything if it is read, as an array does if it is no truth
        return {"error": f"returned a value that cannot be read: {_describe(error)}"}


def _describe(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "took longer than reward.functions.timeout_s"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return "printed or wrote more than reward.functions.output_kib"
    return describe_error(error, MAX_ERROR)


class WrongResult(Exception):
    """A returned value that is no score."""


@dataclass(frozen=True, kw_only=True)
class ResultReader:
    """A reader of the values that one function returns."""

    step_separators: Sequence[str] = ()
    step_score: StepScore = "min"

    def read(self, value: Any, *, text: str, num_tokens: int) -> Mapping[str, Any]:
        """Return a number or dict as `{"score", "correct"?, "parts", "steps"?}`.

        A step is `[end, score]`, with the end in tokens, or None if the text's separators give it.

        Raises:
            WrongResult: the value is neither, or its contents are not allowed.
        """
        if not isinstance(value, dict):
            return {"score": _number(value), "parts": {}}
        if "score" not in value and "steps" not in value:
            raise WrongResult('returned a dict without "score"')
        result: dict[str, Any] = {"parts": _parts(value)}
        if "steps" in value:
            result["steps"] = self._steps(value["steps"], text, num_tokens)
        if "score" in value:
            result["score"] = _number(value["score"])
        else:
            scores = [score for _, score in result["steps"]]
            result["score"] = _number(COMBINE[self.step_score](scores), "the score of its steps")
        if value.get("correct") is not None:
            result["correct"] = bool(value["correct"])
        return result

    def _steps(self, steps: Any, text: str, num_tokens: int) -> list[tuple[int | None, float]]:
        if not isinstance(steps, list | tuple):
            raise WrongResult(f"returned {type(steps).__name__} as steps, not a list")
        if not steps:
            raise WrongResult("returned no steps")
        if not any(isinstance(step, list | tuple) for step in steps):
            self._check_num_steps(len(steps), text)
            return [(None, _number(score, "a step")) for score in steps]
        ends = [0]
        for step in steps:
            start, stop = _span(step)
            if not ends[-1] <= start < stop <= num_tokens:
                raise WrongResult(
                    f"returned a step of tokens {start} to {stop} after token {ends[-1]} of "
                    f"{num_tokens}: steps must be in order, in the response, and not overlap"
                )
            ends.append(stop)
        return [
            (end, _number(step[2], "a step")) for end, step in zip(ends[1:], steps, strict=True)
        ]

    def _check_num_steps(self, num_scores: int, text: str) -> None:
        if not self.step_separators:
            raise WrongResult(
                "returned steps without spans, and reward.functions.step_separators is empty"
            )
        if num_scores != (expected := len(split_steps(text, self.step_separators))):
            raise WrongResult(
                f"returned scores of {num_scores} steps; by reward.functions.step_separators there "
                f"are {expected}"
            )


def _span(step: Any) -> tuple[int, int]:
    """Return the first token of a step, and the one after its last."""
    if isinstance(step, list | tuple) and len(step) == 3:
        start, stop = step[:2]
        if isinstance(start, numbers.Integral) and isinstance(stop, numbers.Integral):
            return int(start), int(stop)
    raise WrongResult(f"returned a {type(step).__name__} as a step that is no (start, stop, score)")


def _parts(value: Mapping[Any, Any]) -> dict[str, float]:
    names = [name for name in value if name not in _RESERVED]
    if len(names) > MAX_PARTS or any(
        not isinstance(name, str) or not 0 < len(name) <= MAX_NAME for name in names
    ):
        raise WrongResult(
            f"returned parts that are not at most {MAX_PARTS} names of up to {MAX_NAME} characters"
        )
    return {name: _number(value[name], name) for name in names}


def _number(value: Any, part: str = "") -> float:
    of_part = f" as {part}" if part else ""
    # NumPy's bool is no number, unlike Python's
    if not isinstance(value, numbers.Real) and type(value).__name__ not in ("bool_", "bool"):
        raise WrongResult(f"returned {type(value).__name__}{of_part}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise WrongResult(f"returned {number}{of_part}")
    return number
