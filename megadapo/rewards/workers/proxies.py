"""Unit tests of a program that runs in another process, where it cannot reach them.

A program can read and change all of its process. So the tests and their verdict are in another one.
The two send each other lines of JSON and execute nothing of them. Plain values cross as copies. Any
other object of the program stays there, and the tests get a `Proxy` of it.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import operator
import os
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from functools import partialmethod
from types import ModuleType
from typing import Any

_SCALARS = frozenset((type(None), bool, int, float, str))
_SEQUENCES = (list, tuple, deque)
_DICTS = (dict, defaultdict, OrderedDict)
_MUTABLE = (list, deque, *_DICTS, Counter, set, bytearray)
_REDUCED: tuple[type, ...] = (set, frozenset, Counter, range, slice, bytearray)
_REDUCED += (Decimal, Fraction, date, datetime)
_KINDS = {kind.__name__: kind for kind in (*_SEQUENCES, *_REDUCED, bytes, complex)}
"""Types of values that cross as copies, beside scalars and dicts."""
_METHODS: tuple[str, ...] = ("call", "getitem", "setitem", "delitem", "setattr", "delattr")
_METHODS += ("len", "iter", "next", "bool", "str", "repr", "hash")
_OPERATORS = ("eq", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv")
PROGRAM_FILE, TESTS_FILE = 3, 4
"""Numbers of the connected sockets in the processes of the program and of its tests."""


class CannotCross(BaseException):
    """A value that tests cannot give to a program. They may catch any Exception, but not this."""


class Channel:
    """One end of the connection. It asks the other process to use its objects, and answers."""

    def __init__(self, file: int, *, is_tests: bool) -> None:
        self._messages, self._sent = os.fdopen(file, "rb"), os.fdopen(os.dup(file), "wb")
        self._is_tests, self.has_called = is_tests, False
        self._objects: list[Any] = []
        """Objects of which the other process has proxies; the handle of one is its place here."""
        self._handles: dict[int, int] = {}
        self._proxies: dict[int, Proxy] = {}
        self._exceptions: dict[tuple[str, type], type] = {}
        sys.set_int_max_str_digits(0)

    def ask(self, do: str, /, *args: Any, **kwargs: Any) -> Any:
        """Have something done by the other process, named as in `operator` or `builtins`."""
        self.has_called |= do == "call"
        given = [*args, *kwargs.values()]
        self._send({"do": do, "args": self._encode_all(given), "names": [*kwargs]})
        while "do" in (message := self.receive()):
            self.answer(message)
        for value, contents in zip(given, message["changed"], strict=True):
            if contents is not None and type(value) in _MUTABLE:
                value.clear()
                add = value.extend if hasattr(value, "extend") else value.update
                add(self._decode(contents))
        if "error" not in message:
            return self._decode(message["value"])
        kind, *reasons = self._decode_all(message["error"])
        # it would end a loop of the tests as if there were no more cases
        is_end = issubclass(kind, StopIteration) and do != "next"
        raise (RuntimeError if is_end or not issubclass(kind, BaseException) else kind)(*reasons)

    def answer(self, message: Any) -> None:
        """Do what a message asks for, and reply."""
        given: list[Any] = []
        try:
            given = self._decode_all(message["args"])
            split = len(given) - len(message["names"])
            kwargs = dict(zip(message["names"], given[split:], strict=True))
            reply = {"value": self._encode(self._do(message["do"], *given[:split], **kwargs))}
        except (Exception, SystemExit) as error:
            # tests may expect it
            reply = {"error": self._encode_all([type(error), *error.args])}
        now = [self._encode(value) if type(value) in _MUTABLE else None for value in given]
        pairs = zip(now, message["args"], strict=False)
        self._send({**reply, "changed": [None if new == old else new for new, old in pairs]})

    def _do(self, do: str, /, *args: Any, **kwargs: Any) -> Any:
        # a program may only call the functions that the tests have given to it
        if self._is_tests and not (do == "call" and any(args[0] is one for one in self._objects)):
            raise PermissionError(do)
        does = _load if do == "load" else getattr(operator, do, None) or getattr(builtins, do)
        return does(*args, **kwargs)

    def _send(self, message: Any) -> None:
        self._sent.write(json.dumps(message).encode() + b"\n")
        self._sent.flush()

    def receive(self) -> Any:
        """Return the next message; end this process if the other one has ended."""
        if not (line := self._messages.readline()):
            # tests could expect an exception
            os._exit(1)
        return json.loads(line)

    def _encode_all(self, values: Iterable[Any]) -> list[Any]:
        found = list(values)
        # fast for a long list of numbers or texts
        is_plain = _SCALARS.issuperset(map(type, found))
        return found if is_plain else [self._encode(value) for value in found]

    def _encode(self, value: Any) -> Any:
        """Return a scalar, or a list of the kind of a value and its parts."""
        kind, name = type(value), type(value).__name__
        if kind in _SCALARS:
            return value
        if kind is Proxy:
            return ["yours", value._handle_]
        if kind in _SEQUENCES:
            return [name, *self._encode_all(value)]
        if kind in _DICTS:
            return ["dict", *self._encode_all([*value, *value.values()])]
        if kind in _REDUCED:
            return [name, *self._encode_all(value.__reduce__()[1])]
        if kind is bytes:
            return ["bytes", value.decode("latin-1"), "latin-1"]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._encode(tuple(value))
        if isinstance(value, type) and value.__module__ == "builtins":
            return ["type", value.__name__]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", value.__name__, self._encode(value.__base__)]
        if self._is_tests and not callable(value):
            raise CannotCross(f"a program cannot get an object of type {name}")
        if not self._is_tests and hasattr(value, "tolist"):
            # of NumPy; an empty array would hold in most comparisons of the tests
            return self._encode(value.tolist())
        if id(value) not in self._handles:
            self._handles[id(value)] = len(self._objects)
            self._objects.append(value)
        return ["mine", self._handles[id(value)]]

    def _decode_all(self, data: list[Any]) -> list[Any]:
        is_plain = _SCALARS.issuperset(map(type, data))
        return data if is_plain else [self._decode(value) for value in data]

    def _decode(self, data: Any) -> Any:
        if type(data) is not list:
            return data
        kind, parts = data[0], self._decode_all(data[1:])
        match kind:
            case "yours":
                return self._objects[parts[0]]
            case "mine":
                return self._proxies.setdefault(parts[0], Proxy(self, parts[0]))
            case "list" | "tuple" | "deque":
                return _KINDS[kind](parts)
            case "dict":
                half = len(parts) // 2
                return dict(zip(parts[:half], parts[half:], strict=True))
            case "type" if isinstance(vars(builtins).get(parts[0]), type):
                return getattr(builtins, parts[0])
            case "exception":
                key = parts[0], parts[1]
                return self._exceptions.setdefault(key, type(key[0], key[1:], {}))
        return _KINDS[kind](*parts)


class Proxy:
    """An object of the other process. It equals no value of this one, and combines with none.

    Otherwise an object that agrees to any comparison would pass all tests.
    """

    _channel_: Channel
    _handle_: int

    def __init__(self, channel: Channel, handle: int) -> None:
        vars(self).update(_channel_=channel, _handle_=handle)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # packages take these as promises, such as numpy the address of an array
            raise AttributeError(name)
        return self._channel_.ask("getattr", self, name)

    def __instancecheck__(self, other: object) -> bool:
        return type(other) is Proxy and bool(self._channel_.ask("isinstance", other, self))

    def _ask_(self, do: str, /, *args: Any, **kwargs: Any) -> Any:
        if do in _OPERATORS and type(args[0]) is not Proxy:
            return NotImplemented
        return self._channel_.ask(do, self, *args, **kwargs)


for _name in (*_METHODS, *_OPERATORS):
    setattr(Proxy, f"__{_name}__", partialmethod(Proxy._ask_, _name))


def serve_program() -> bytes:
    """Use the objects of a program as its tests ask, until they end."""
    channel = Channel(PROGRAM_FILE, is_tests=False)
    while True:
        channel.answer(channel.receive())


def run_tests(code: str, tests: str, names: Sequence[str]) -> bytes:
    """Run tests with some names of a program; return the reason if they cannot be used."""
    channel = Channel(TESTS_FILE, is_tests=True)
    try:
        found = channel.ask("load", code, names)
        # and no other names, which could be those of built-in functions
        given = {"__name__": "tests"} | {name: found[name] for name in names if name in found}
        exec(compile(tests, "<tests>", "exec", dont_inherit=True), given)
    except CannotCross as error:
        return str(error).encode(errors="replace")
    return b"" if channel.has_called else b"they call nothing of the program"


def _load(code: str, names: Sequence[str]) -> dict[str, Any]:
    """Import a program; return the objects that have some names."""
    program = sys.modules["response"] = ModuleType("response")
    with contextlib.suppress(SystemExit):
        exec(compile(code, "<response>", "exec", dont_inherit=True), program.__dict__)
    return {name: program.__dict__[name] for name in names if name in program.__dict__}
