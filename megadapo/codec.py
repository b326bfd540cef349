"""Objects as JSON values and back, by the types of their fields.

A field whose JSON form is another one says so in its type, as `Measured` does.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Annotated, Any, TypeVar, cast

from pydantic import BeforeValidator, PlainSerializer, TypeAdapter, ValidationError

Value = TypeVar("Value")
READABLE = "readable"
"""Serialization context in which arrays are lists of numbers, not base64."""
Measured = Annotated[
    float,
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None),
]
"""A number, or NaN if it was not measured, which is null in JSON."""
Table = Annotated[
    tuple[tuple[str, Value], ...],
    BeforeValidator(lambda table: tuple(table.items())),
    PlainSerializer(dict),
]
"""(name, value) pairs, which are an object in JSON."""


def encode(value: Any, *, readable: bool = False) -> Any:
    """Return a dataclass as values for `json.dumps`.

    `readable`: with arrays as lists, not as base64.
    """
    context = READABLE if readable else None
    return _adapter(value.__class__).dump_python(value, by_alias=True, context=context)


def decode(kind: type[Value], entry: object) -> Value:
    """Return the object whose values `encode` returned, also after JSON.

    Raises:
        ValueError: the values are not of this kind; the message has the path of the first problem.
    """
    try:
        decoded: Value = _adapter(cast(Any, kind)).validate_python(entry)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from error
    except (ArithmeticError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(repr(error)) from error
    return decoded


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
