"""The program of a process that calls one reward function.

A user's function is trusted but may have bugs. So it cannot start processes or open sockets by
mistake, and anything that it returns or raises becomes a reply.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import math
import numbers
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from megadapo.rewards.steps import COMBINE, StepScore, split_steps
from megadapo.rewards.workers.arguments import Arguments
from megadapo.rewards.workers.worker import (
    MAX_ERROR,
    Handler,
    describe_error,
    forbid,
    load_object,
    serve,
)

MAX_PARTS = 32
MAX_NAME = 64
"""Characters of a part's name."""
MAX_TEXT = 2000
"""Characters of a part that is text."""

_OF_THE_CALL = (FileNotFoundError, FileExistsError, PermissionError)
"""Errors of the system that a repeated call meets again."""
_RESERVED = ("score", "correct", "steps")
_Call = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and named arguments."""


def main() -> None:
    """Serve `{"row", "responses": [[text, token ids], ...]}` to `{"results": [result, ...]}`.

    A row has the arguments of `Arguments.calls`. Without one, the answer describes the function:
    `{"takes": "one" | "batch" | "async", "columns", "takes_rest"}`. A result is the output of
    `ResultReader.read`, or `{"error", "outage"}` if the function failed. An outage is an error of
    the system or the network, which another call may not meet.
    """
    serve(_prepare)


def _prepare(settings: Mapping[str, Any]) -> Handler:
    function = load_object(settings, "function")
    arguments = Arguments.of(function, settings["options"])
    # an event loop opens a pair of sockets
    loop = asyncio.new_event_loop() if _is_async(function) else None
    forbid(network=not settings["network"], processes=not settings["processes"])
    is_batched = arguments.takes_lists
    reader = ResultReader(
        step_separators=settings["step_separators"], step_score=settings["step_score"]
    )

    def handle(request: Mapping[str, Any]) -> Mapping[str, Any]:
        if request["row"] is None:
            takes = "batch" if is_batched else "one" if loop is None else "async"
            columns = {"columns": arguments.columns, "takes_rest": arguments.takes_rest}
            return {"takes": takes, **columns}
        # the limit on printed output is that of one request
        os.ftruncate(1, 0)
        os.lseek(1, 0, os.SEEK_SET)
        responses = [(text, token_ids) for text, token_ids in request["responses"]]
        calls = arguments.calls(request["row"], responses)
        if loop is None:
            returned = [_call(function, call) for call in calls]
        else:
            returned = loop.run_until_complete(
                _run_coroutines(function, calls, settings["timeout_s"])
            )
        if is_batched:
            returned = _each_of(returned[0], len(responses))
        results = zip(returned, responses, strict=True)
        return {
            "results": [_result(value, text, len(ids), reader) for value, (text, ids) in results]
        }

    return handle


def _is_async(function: Callable[..., Any]) -> bool:
    # of an object with __call__, the method is the coroutine function
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


async def _run_coroutines(
    function: Callable[..., Any], calls: Sequence[_Call], timeout_s: float
) -> list[Any]:
    """Run coroutines concurrently; return the value or exception of each."""

    async def call(arguments: _Call) -> Any:
        given, named = arguments
        try:
            return await asyncio.wait_for(function(*given, **named), timeout_s)
        except (KeyboardInterrupt, SystemExit) as error:
            # the loop would raise it, and end the calls of the other responses
            return error

    return list(await asyncio.gather(*map(call, calls), return_exceptions=True))


def _call(function: Callable[..., Any], arguments: _Call) -> Any:
    """Return the value or exception of a call."""
    given, named = arguments
    try:
        value = function(*given, **named)
        sys.stdout.flush()
    except BaseException as error:
        # a user's function may raise any exception, and this is where its code ends
        return error
    return value


def _each_of(returned: Any, num_calls: int) -> list[Any]:
    """Return one value per response from the result of a batched function."""
    if isinstance(returned, BaseException):
        return [returned] * num_calls
    is_list = isinstance(returned, Iterable) and isinstance(returned, Sized)
    # an array or tensor is a list too
    if not is_list or isinstance(returned, str | Mapping) or len(returned) != num_calls:
        size = f" of {len(returned)}" if is_list else ""
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
        """Return a value as `{"score", "correct"?, "parts", "texts"?, "steps"?}`.

        The score is None if the function gives none. A step is `[end, score]`, with the end in
        tokens, or None if the text's separators give it.

        Raises:
            WrongResult: the value is no score, or its contents are not allowed.
        """
        if value is None:
            return {"score": None, "parts": {}}
        if not isinstance(value, Mapping):
            return {"score": _number(value), "parts": {}}
        correct = _verdict(value)
        if correct is None and "score" not in value and "steps" not in value:
            raise WrongResult('returned a table without "score"')
        parts, texts = _parts(value, has_verdict=correct is not None)
        result: dict[str, Any] = {"parts": parts, "texts": texts}
        if "steps" in value:
            result["steps"] = self._steps(value["steps"], text, num_tokens)
        if "score" in value:
            result["score"] = None if value["score"] is None else _number(value["score"])
        elif "steps" in value:
            scores = [score for _, score in result["steps"]]
            result["score"] = _number(COMBINE[self.step_score](scores), "the score of its steps")
        else:
            result["score"] = float(bool(correct))
        return result if correct is None else {**result, "correct": correct}

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


def _verdict(value: Mapping[Any, Any]) -> bool | None:
    """Return whether a table says that the response is correct; None if it does not say."""
    if value.get("correct") is not None:
        number = _number(value["correct"], "correct")
        if number not in (0.0, 1.0):
            raise WrongResult(f"returned {number:g} as correct, which is neither true nor false")
        return bool(number)
    accuracy = _as_number(value.get("acc"))
    return bool(accuracy) if accuracy in (0.0, 1.0) else None


def _parts(
    value: Mapping[Any, Any], *, has_verdict: bool
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the numbers and the texts of a table; `has_verdict`: it says what is correct."""
    own = _RESERVED if value.get("correct") is not None or not has_verdict else (*_RESERVED, "acc")
    names = [name for name in value if name not in own and value[name] is not None]
    if len(names) > MAX_PARTS or any(
        not isinstance(name, str) or not 0 < len(name) <= MAX_NAME for name in names
    ):
        raise WrongResult(
            f"returned parts that are not at most {MAX_PARTS} names of up to {MAX_NAME} characters"
        )
    texts = {name: value[name] for name in names if _as_number(value[name]) is None}
    numbers = {name: _number(value[name], name) for name in names if name not in texts}
    return numbers, {name: str(text)[:MAX_TEXT] for name, text in texts.items()}


def _as_number(value: Any) -> float | None:
    """Return a number, also NumPy's, torch's, Decimal or Fraction; None for another value."""
    if isinstance(value, str) or not (hasattr(value, "item") or hasattr(value, "__float__")):
        return None
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except OverflowError:
        return math.inf
    except (RuntimeError, TypeError, ValueError):
        # several numbers, or an imaginary one
        return None


def _number(value: Any, part: str = "") -> float:
    of_part = f" as {part}" if part else ""
    number = _as_number(value)
    if number is None:
        raise WrongResult(f"returned {type(value).__name__}{of_part}, not a number")
    if not math.isfinite(number):
        raise WrongResult(f"returned {number}{of_part}")
    return number
