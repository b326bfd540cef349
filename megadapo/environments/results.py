"""Checks what an environment has and returns, and makes JSON values of it.

Needs only the standard library, as it runs in the environment's process.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from megadapo.environments.environment import Environment, Observation

ROLES = ("user", "tool")
KEYS = ("role", "content")
"""Keys of a message."""


class ProtocolViolation(Exception):
    """A value that the protocol does not allow; the message begins with a verb."""


def read_description(environment: Environment) -> dict[str, Any]:
    """Return the tools and stop texts of an environment.

    Raises:
        ProtocolViolation: they are not lists of JSON schemas and texts.
    """
    tools, stop = environment.tools, environment.stop
    if not _is_list(tools) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ProtocolViolation(f"has tools that are no list of JSON schemas: {_short(tools)}")
    if not _is_list(stop) or not all(isinstance(text, str) and text for text in stop):
        raise ProtocolViolation(f"has a stop that is no list of texts: {_short(stop)}")
    if not isinstance(environment.output, str) or environment.output.count("{}") != 1:
        raise ProtocolViolation(f"has an output without one {{}}: {_short(environment.output)}")
    return {
        "uses_tokens": bool(environment.uses_tokens),
        "tools": _json([dict(tool) for tool in tools], "tools"),
        "stop": list(stop),
        "output": environment.output,
    }


def read_observation(value: Any, method: str) -> dict[str, Any]:
    """Return the fields of an observation.

    Raises:
        ProtocolViolation: it is no Observation, or a field has a wrong value.
    """
    if not isinstance(value, Observation):
        hint = "; an environment returns an Observation" + " or None" * (method == "reset")
        raise ProtocolViolation(f"{method} returned {_short(value)}{hint}")
    if not _is_list(value.messages):
        raise ProtocolViolation(
            f"{method} returned {_short(value.messages)} as messages, not a list"
        )
    messages = [_message(message, method) for message in value.messages]
    text = None if value.text is None else _text(value.text, f"{method} returned", "text")
    token_ids = None if value.token_ids is None else _token_ids(value.token_ids, method)
    if bool(messages) + (text is not None) + (token_ids is not None) > 1:
        raise ProtocolViolation(f"{method} returned more than one of messages, text and token_ids")
    # numpy has a type of its own
    if type(value.done).__name__ not in ("bool", "bool_"):
        raise ProtocolViolation(f"{method} returned done = {_short(value.done)}, not True or False")
    done = bool(value.done)
    if method == "reset" and done:
        raise ProtocolViolation("reset returned done = True")
    if not (messages or text is not None or token_ids is not None or done):
        raise ProtocolViolation(
            f"{method} returned no messages, no text, no token_ids and done = False"
        )
    if not isinstance(value.metrics, Mapping):
        raise ProtocolViolation(f"{method} returned {_short(value.metrics)} as metrics, not a dict")
    for name in value.metrics:
        _text(name, f"{method} returned", "the name of a metric")
    return {
        "messages": messages,
        "text": text,
        "token_ids": token_ids,
        "reward": _number(value.reward, method, "reward"),
        "done": done,
        "is_call": bool(value.is_call),
        "metrics": {name: _number(one, method, name) for name, one in value.metrics.items()},
    }


def read_state(value: Any) -> Any:
    """Return a state that JSON does not change."""
    return _json(value, "state()")


def _json(value: Any, what: str) -> Any:
    try:
        copied = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolViolation(f"has {what} that is not JSON: {error}") from error
    if copied != value:
        raise ProtocolViolation(
            f"has {what} that JSON changes: it has lists, not tuples, and its keys are texts"
        )
    return copied


def _message(value: Any, method: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ProtocolViolation(f"{method} returned {_short(value)} as a message, not a dict")
    for name in KEYS:
        if name not in value:
            raise ProtocolViolation(f'{method} returned a message without "{name}"')
    if value["role"] not in ROLES:
        roles = '" or "'.join(ROLES)
        raise ProtocolViolation(
            f'{method} returned a message with role = {_short(value["role"])}, not "{roles}"'
        )
    for name in value:
        if name not in KEYS:
            raise ProtocolViolation(
                f"{method} returned a message with {_short(name)}; a message has only "
                f"{' and '.join(KEYS)}, as chat templates differ in the others"
            )
    return {name: _text(value[name], f"{method} returned a message with", name) for name in KEYS}


def _token_ids(value: Any, method: str) -> list[int]:
    if not _is_list(value) or not all(map(_is_whole, value)):
        raise ProtocolViolation(f"{method} returned token_ids = {_short(value)}, not a list of ids")
    if min(value, default=0) < 0:
        raise ProtocolViolation(f"{method} returned a negative token id")
    return [int(x) for x in value]


def _text(value: Any, start: str, name: str) -> str:
    if not isinstance(value, str):
        raise ProtocolViolation(f"{start} {name} = {_short(value)}, not a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ProtocolViolation(
            f"{start} {name} that is not valid Unicode: {error.reason}"
        ) from error
    return str(value)


def _number(value: Any, method: str, name: str) -> float:
    if not isinstance(value, numbers.Real):
        raise ProtocolViolation(f"{method} returned {name} = {_short(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ProtocolViolation(f"{method} returned {name} = {number}")
    return number


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _short(value: Any) -> str:
    """Return a value, or its type if it is long."""
    if value is None or isinstance(value, bool | int | float | str):
        shown = repr(value)
        if len(shown) <= 40:
            return shown
    return f"a {type(value).__name__}"
