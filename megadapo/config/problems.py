"""Pydantic's errors as one line per problem: the dotted key, the expected and the found value.

An unknown key is reported with the known key that was probably meant.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megadapo.config.recipe import toml_value
from megadapo.rollout.config import vllm_argument_names
from megadapo.section import COLLECT, NONE_TEXT, Section

_WHOLE_SOFTMAX = (
    "the trainer scores tokens with the whole softmax, so training rollouts sample from all of it"
)
HINTS = {
    "dapo": "did you mean algorithm?",
    "trainer.overlap_grad_reduce": "did you mean trainer.overlap_data_parallel?",
    "trainer.overlap_param_gather": "did you mean trainer.overlap_data_parallel?",
    "algorithm.objective.mask_low": 'the gate "clip" takes clip_low instead',
    "algorithm.objective.mask_high": 'the gate "clip" takes clip_high instead',
    "oracles.max_skipped_steps": "a run stops after three such steps in a row; delete the key",
    "trainer.num_threads": "ranks divide the cores of their node; delete the key",
    "trainer.progress_timeout_s": "it is a third of trainer.timeout_s; set that",
    "weights.transport": "the transport follows from the nodes and GPUs; delete the key",
    "weights.folder": "weights travel over memory or the network only; delete the key",
    "checkpoint.export_every": "a command of run.on_event exports: docs/reliability.md has one",
    "algorithm.reference.decay": "algorithm.reference.refresh_every renews the reference policy",
    "algorithm.reference.server": "a teacher is a folder or a model of the Hub: "
    "algorithm.reference.path",
    "critic.coef": "the critic has a model and an AdamW of its own, to which a factor of its loss "
    "makes no difference: set critic.optimizer.lr, which has the effect that c_v has where policy "
    "and critic share layers; delete the key",
    "checkpoint.every_minutes": "checkpoint.every counts steps, and SIGUSR1 saves the present one",
    "checkpoint.keep_every": "raise checkpoint.keep, or let a command of run.on_event copy some",
    "evaluation.max_problems": "name a file with fewer problems in data.held_out",
    "run.save_before": "the scheduler sends SIGTERM in time, as with Slurm's --signal",
    "sampling.branching.alpha": "it is 0.5, as in the paper; delete the key",
    "sampling.branching.beta": "it is 0.2, as in the paper; delete the key",
    "sampling.branching.threshold": "it is 0.5, as in the paper; delete the key",
    "reward.decide": 'reward.symbolic = "decide" lets the symbolic comparison decide',
    "rollout.max_engine_restarts": "an engine has 3 restarts an hour; delete the key",
    "rollout.top_k": _WHOLE_SOFTMAX,
    "rollout.top_p": f"{_WHOLE_SOFTMAX}; evaluation.top_p may differ",
}
"""Hints for frequent unknown keys whose nearest name is misleading, and for deleted keys."""

_BOUNDS = {
    "greater_than_equal": "at least",
    "greater_than": "above",
    "less_than_equal": "at most",
    "less_than": "below",
}

_TYPES = {
    "bool_type": "bool",
    "float_type": "float",
    "int_type": "int",
    "string_type": "str",
    "path_type": "a path",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "finite_number": "a finite number",
}


MAX_WHOLE = 1 << 63
MAX_SECONDS = 1e9
"""Limits of whole numbers and times that programs and the system can count with."""
MAX_DEPTH = 50
"""Most tables and lists in each other; no key needs nearly as many."""


def unusable_values(value: object, key: str = "", depth: int = 0) -> Iterator[str]:
    """Yield the values in nested tables that no key of any type can have."""
    if depth > MAX_DEPTH:
        yield f"{key:.80}: more than {MAX_DEPTH} tables or lists in each other"
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from unusable_values(name, key, depth + 1)
            yield from unusable_values(one, f"{key}.{name}" if key else name, depth + 1)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from unusable_values(one, key, depth + 1)
    elif isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
        yield f"{key}: {value!r:.80} has a NUL or half of a surrogate pair"
    elif isinstance(value, int) and abs(value) >= MAX_WHOLE:
        yield f"{key}: the number is too large"
    elif isinstance(value, float) and key.endswith("_s") and value > MAX_SECONDS:
        yield f"{key}: {value:g} is more than {MAX_SECONDS:g} seconds"


def describe(error: ValidationError, root: type[Section]) -> list[str]:
    """Return one line per problem of a table that `root` refused, without conflicts of `root`."""
    found = error.errors(include_url=False)
    # entries with an error of their own are not counted, so their list may seem too short
    inner = {problem["loc"][:end] for problem in found for end in range(len(problem["loc"]))}
    problems = [
        problem
        for problem in found
        if problem["type"] != "too_short" or problem["loc"] not in inner
    ]
    grouped = groupby(problems, key=lambda problem: _key_of(root, problem["loc"]))
    return [line for keys, alike in grouped for line in _lines(root, keys, list(alike)) if keys]


def refused_keys(root: type[Section], table: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """Return the paths of all keys whose values `root` refuses."""
    try:
        root.model_validate(table, context=COLLECT)
    except ValidationError as error:
        return {_key_of(root, problem["loc"]) for problem in error.errors()}
    return set()


def allows_table(root: type[Section], keys: tuple[str, ...]) -> bool:
    """Return whether the value of a key may be a table of names."""
    field = _field_at(root, keys)
    kinds = () if field is None else (field.annotation, *get_args(field.annotation))
    return any(get_origin(kind) is dict for kind in kinds)


def known_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every key below a section, in order of definition."""
    for name, field in section.model_fields.items():
        yield prefix + name
        if (inner := section_of(field)) is not None:
            yield from known_keys(inner, f"{prefix}{name}.")


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section class of a field, or None for a plain field."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            assert issubclass(kind, Section)
            return kind
    return None


def _key_of(root: type[Section], loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return the path of keys in `loc`, without the parts pydantic adds inside a value."""
    section: type[Section] | None = root
    keys: list[str] = []
    for part in loc:
        if section is None:
            break
        keys.append(str(part))
        if isinstance(part, int):
            continue  # an entry of a list of sections
        field = section.model_fields.get(part)
        section = section_of(field) if field is not None else None
    return tuple(keys)


def _field_at(root: type[Section], keys: tuple[str, ...]) -> FieldInfo | None:
    section: type[Section] | None = root
    field = None
    for key in (key for key in keys if not key.isdigit()):
        field = section.model_fields.get(key) if section is not None else None
        section = section_of(field) if field is not None else None
    return field


def _lines(root: type[Section], keys: tuple[str, ...], alike: list[ErrorDetails]) -> Iterator[str]:
    """Yield the lines for the errors of one key; each member of a union has an error."""
    dotted, first = ".".join(keys), alike[0]
    if first["type"] == "value_error":
        yield from str(first["ctx"]["error"]).splitlines()
    elif first["type"] == "extra_forbidden":
        yield f"{dotted}: {_unknown(root, keys)}"
    elif first["type"] == "missing" and len(first["loc"]) == len(keys):
        yield f"{dotted}: required, but missing"
    elif len(alike) == 1 and first["type"] in _BOUNDS:
        yield f"{dotted} = {toml_value(first['input'])} must be {_expected(first)}"
    else:
        expected = list(dict.fromkeys(_expected(problem) for problem in alike))
        field = _field_at(root, keys)
        if field is not None and type(None) in get_args(field.annotation):
            expected.append(f'"{NONE_TEXT}"')
        entry = next((f"entry {part}: " for part in first["loc"] if isinstance(part, int)), "")
        yield f"{dotted}: {entry}expected {' or '.join(expected)}, found {_found(first['input'])}"


def _expected(problem: ErrorDetails) -> str:
    kind = problem["type"]
    if kind == "literal_error":
        return str(problem["ctx"]["expected"]).replace("'", '"')
    if kind in _BOUNDS:
        (bound,) = problem["ctx"].values()
        return f"{_BOUNDS[kind]} {bound:.15g}"
    return _TYPES.get(kind, problem["msg"])


def _found(value: object) -> str:
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str | bool | int | float):
        text = toml_value(value)
        return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
    return type(value).__name__


def _unknown(root: type[Section], keys: tuple[str, ...]) -> str:
    kind = "section" if len(keys) == 1 else "key"
    parent = _field_at(root, keys[:-1])
    section = root if parent is None else section_of(parent)
    assert section is not None
    siblings = list(section.model_fields)
    hint = HINTS.get(".".join(keys))
    if hint is None and keys[:-1] == ("rollout",) and keys[-1] in vllm_argument_names():
        hint = f"did you mean rollout.vllm.{keys[-1]}?"
    if hint is None:
        meant = _meant(keys, siblings, list(known_keys(root)))
        hint = f"did you mean {meant}?" if meant else f"known here: {', '.join(siblings)}"
    return f"unknown {kind}; {hint}"


def _meant(keys: tuple[str, ...], siblings: list[str], known: list[str]) -> str | None:
    """Return the key that was probably meant: a close match, a namesake, or a distant match."""
    prefix, name = "".join(f"{key}." for key in keys[:-1]), keys[-1]
    if near := difflib.get_close_matches(name, siblings, n=1, cutoff=0.75):
        return prefix + near[0]
    if namesakes := [key for key in known if key.rpartition(".")[2] == name]:
        return " or ".join(namesakes)
    if near := difflib.get_close_matches(name, siblings, n=1):
        return prefix + near[0]
    names = [key.rpartition(".")[2] for key in known]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return next((key for key in known if near and key.endswith(f".{near[0]}")), None)
