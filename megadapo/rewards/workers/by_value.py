"""Functions and classes that worker processes cannot import, as those of a notebook's cell.

The driver keeps the pickle of such an object in memory and sends it on a worker's standard input.
No process reads a pickle from a file. The configuration names the file of the object's source in
the run's folder. Its name has a digest of the source, so a resumed run notices another source.
"""

from __future__ import annotations

import base64
import dis
import hashlib
import inspect
import pickle
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from megadapo.errors import ConfigError

INPUTS = "inputs/"
"""Folder in a run's folder with the sources of such objects, and with rows given in Python."""
OBJECT_PATH = re.compile(
    rf"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*|{INPUTS}(\w+)-[0-9a-f]{{8}}\.py:\2"
)
"""MODULE:NAME, or the file of the source of an object by value and its name."""
PICKLES: dict[str, str] = {}
"""Pickle in base64 of each object that this process was given, by its name in a configuration."""


def pickle_of(path: str, argument: str) -> str | None:
    """Return the pickle of an object by value; None for one that workers import.

    `argument`: the argument of `megadapo.train` that gives the object.
    """
    if path.startswith(INPUTS) and path not in PICKLES:
        raise ConfigError(
            f'"{path}" was given in Python, and is never read from a file: continue from Python, '
            f"with megadapo.train(..., {argument}=...)"
        )
    return PICKLES.get(path)


def name_object(value: Any, files: dict[str, str]) -> str:
    """Return the name of a function or class for a configuration.

    `files`: gets the source of an object by value.
    """
    import cloudpickle

    if _is_importable(value):
        return f"{value.__module__}:{value.__qualname__}"
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        raise ConfigError(f"{value!r:.80} is no function and no class: write one that calls it")
    name, source = re.sub(r"\W", "", value.__name__), _source_of(value)
    file = f"{INPUTS}{name}-{hashlib.sha256(source.encode()).hexdigest()[:8]}.py"
    try:
        PICKLES[f"{file}:{name}"] = base64.b64encode(cloudpickle.dumps(value)).decode()
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise ConfigError(
            f"{name} cannot be sent to its processes ({error}): create inside of it what cannot be "
            "pickled, or write it in a module of the working folder"
        ) from error
    files[file] = f"# Processes get {name} by value, and run no code of this file.\n\n{source}"
    return f"{file}:{name}"


def _is_importable(value: Any) -> bool:
    """Return whether workers, which have this process's search path, can import an object."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    return module != "__main__" and getattr(sys.modules.get(module or ""), name, None) is value


def _source_of(value: Any) -> str:
    """Return the source of a function or class, and of all that it uses and no module has."""
    waiting, parts = [(value.__name__, value)], dict[tuple[str, int], str]()
    # the list grows meanwhile
    for name, one in waiting:
        if (name, id(one)) in parts:
            continue
        if inspect.ismodule(one) or _is_importable(one):
            text = f"# {name}: {getattr(one, '__module__', 'module')} {one.__name__}"
        elif inspect.isfunction(one):
            text = f"# {name}\n{_text_of(one)}"
            known = {**one.__globals__, **inspect.getclosurevars(one).nonlocals}
            used = [*_globals_of(one.__code__), *one.__code__.co_freevars]
            # super() refers to the class
            waiting += [(n, known[n]) for n in used if n in known and n != "__class__"]
        elif inspect.isclass(one):
            text = f"# {name}: class"
            waiting += [(base.__name__, base) for base in one.__bases__]
            # a notebook does not have the source of a whole class
            waiting += [
                (f"{name}.{key}", getattr(member, "__func__", getattr(member, "fget", member)))
                for key, member in vars(one).items()
                if inspect.isfunction(member) or not key.startswith("_")
            ]
        else:
            text = f"{name} = {_stable(one)}"
        parts[name, id(one)] = text
    return "\n\n".join(parts.values()) + "\n"


def _globals_of(code: CodeType) -> Iterator[str]:
    """Yield the global names that code reads, and the code within it, as of comprehensions."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
        elif inspect.iscode(instruction.argval):
            yield from _globals_of(instruction.argval)


def _text_of(function: FunctionType) -> str:
    code = function.__code__
    try:
        text = textwrap.dedent(inspect.getsource(code)).rstrip()
    except (OSError, TypeError):
        text = ""
    # several lambdas may be in the same lines
    if not text or function.__name__ == "<lambda>":
        text += f"  # {code.co_code.hex()} {_stable([code.co_names, code.co_consts])}"
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    return f"{text}  # defaults: {_stable(defaults)}" if defaults else text


def _stable(value: Any) -> str:
    """Return the text of a value, the same in every process: without addresses, sets sorted."""
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_stable, value))) + "}"
    if isinstance(value, Mapping):
        return _stable([*value.items()])
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_stable, value)) + "]"
    return re.sub(r" at 0x[^>]*", "", repr(value))
