"""Matches the parameters of a reward function with what is known of a response, by name."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megadapo.rewards.workers.worker import CannotStart

OFFER = (
    "given by name: messages or prompt; response, completion or solution_str; tokens or "
    "completion_ids; ground_truth; data_source; extra_info; columns of the row; options. Lists "
    "are given to a function that takes prompts, responses, completions or solution_strs"
)
"""Second half of an error about a signature."""
MAX_SIGNATURE = 120
"""Characters of a signature that errors show."""
POSITIONAL = ("messages", "response", "tokens", "ground_truth", "extra_info")
"""The order of arguments that can only be passed by position."""


class _Known(NamedTuple):
    value: str
    """Key of the value among those of a response."""
    takes_lists: bool | None = None
    """Whether the name belongs to functions that take lists; None: to both kinds."""


_KNOWN = {
    "messages": _Known("messages"),
    "prompt": _Known("prompt", False),
    "response": _Known("response", False),
    "completion": _Known("completion", False),
    "solution_str": _Known("response", False),
    **{name: _Known("tokens") for name in ("tokens", "completion_ids")},
    **{name: _Known(name) for name in ("ground_truth", "data_source", "extra_info")},
    "prompts": _Known("prompt", True),
    "responses": _Known("response", True),
    "completions": _Known("completion", True),
    "solution_strs": _Known("response", True),
    **{f"{name}s": _Known(name, True) for name in ("ground_truth", "data_source", "extra_info")},
}
_OF_ROW = ("ground_truth", "data_source", "extra_info")
_REST = {
    "response": ("messages", "tokens", *_OF_ROW),
    "responses": ("messages", "tokens", *(f"{name}s" for name in _OF_ROW)),
    "solution_str": _OF_ROW,
    "solution_strs": tuple(f"{name}s" for name in _OF_ROW),
    "completion": ("prompt", "completion_ids", *_OF_ROW),
    "completions": ("prompts", "completion_ids", *_OF_ROW),
}
"""Names that `**kwargs` get besides columns, by the name of the response."""


def _thing(value: str) -> str:
    """Return what a value is about: two names of the same thing are one too many."""
    return {"prompt": "messages", "completion": "response"}.get(value, value)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of one function's calls."""

    takes_lists: bool
    """Whether a call is for all responses of a group."""
    values: Mapping[str, str]
    """Value of each parameter with a known name."""
    positional: Sequence[str] = ()
    """Values that are passed by position."""
    columns: Mapping[str, bool]
    """Whether each parameter that can only be a column of the row is required."""
    takes_rest: bool = False
    """Whether it takes all other columns too."""
    options: Mapping[str, Any]

    @staticmethod
    def of(function: Callable[..., Any], options: Mapping[str, Any]) -> Arguments:
        """Match a function's parameters.

        Raises:
            CannotStart: it is no function, or a parameter cannot be matched.
        """
        if inspect.isclass(function):
            raise CannotStart("it is a class: name a function that returns scores")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise CannotStart("it is a generator: return the scores instead of yielding them")
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise CannotStart(f"its parameters are not known: {error}") from error
        try:
            return _matched([*signature.parameters.values()], options)
        except CannotStart as error:
            raise CannotStart(f"{str(signature):.{MAX_SIGNATURE}}: {error}; {OFFER}") from error

    def calls(
        self, row: Mapping[str, Any], responses: Sequence[tuple[str, list[int]]]
    ) -> list[tuple[list[Any], dict[str, Any]]]:
        """Return positional and named arguments of each call for the responses to a prompt.

        `row`: messages, is_text, ground_truth, data_source, extra_info and further columns.
        """
        each = [_values_of(row, *response) for response in responses]
        if self.takes_lists:
            each = [{key: [values[key] for values in each] for key in each[0]}] if each else []
        names = [name for name in self.columns if name in row["further"]]
        if self.takes_rest:
            own = (*self.values, *self.columns, *_KNOWN)
            names += [name for name in row["further"] if name not in own]
        return [
            (
                [values[key] for key in self.positional],
                {
                    **{name: values[f"column {name}"] for name in names},
                    **{name: values[key] for name, key in self.values.items()},
                    **self.options,
                },
            )
            for values in each
        ]


def _matched(parameters: Sequence[inspect.Parameter], options: Mapping[str, Any]) -> Arguments:
    kinds = {parameter.kind for parameter in parameters}
    takes_rest = inspect.Parameter.VAR_KEYWORD in kinds
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    by_position = [p.name for p in named if p.kind is p.POSITIONAL_ONLY]
    unknown = [
        name
        for name in options
        if name in by_position or not (takes_rest or name in {p.name for p in named})
    ]
    if unknown:
        raise CannotStart(f"it does not take the option {unknown[0]}")
    free = [p for p in named if p.name not in options]
    if not free and not takes_rest and inspect.Parameter.VAR_POSITIONAL in kinds:
        return Arguments(
            takes_lists=False, values={}, positional=POSITIONAL, columns={}, options=options
        )
    # a leading underscore marks a parameter that the function does not use
    known = {p.name: one for p in free if (one := _KNOWN.get(p.name.lstrip("_"))) is not None}
    takes_lists = _takes_lists(known)
    things = [_thing(one.value) for one in known.values()]
    if repeated := {thing for thing in things if things.count(thing) > 1}:
        twice = [name for name, one in known.items() if _thing(one.value) in repeated]
        raise CannotStart(f"{' and '.join(twice)} are two names for one thing")
    first = [_thing(known[name].value) if name in known else name for name in by_position]
    if first != [*POSITIONAL[: len(first)]]:
        raise CannotStart(
            f"arguments before / are passed by position, as {', '.join(POSITIONAL)}: remove the /"
        )
    values = {name: one.value for name, one in known.items() if name not in by_position}
    if takes_rest:
        plain = {name.lstrip("_") for name in known}
        usual = "completions" if takes_lists else "response"
        of_response = next((name for name in _REST if name in plain), usual)
        rest = {name: _KNOWN[name].value for name in (of_response, *_REST[of_response])}
        values |= {name: one for name, one in rest.items() if _thing(one) not in things}
    return Arguments(
        takes_lists=takes_lists,
        values=values,
        positional=[known[name].value for name in by_position],
        columns={p.name: p.default is p.empty for p in free if p.name not in known},
        takes_rest=takes_rest,
        options=options,
    )


def _takes_lists(known: Mapping[str, _Known]) -> bool:
    """Return whether parameters with these names take lists.

    Raises:
        CannotStart: none of them is the response, or they disagree.
    """
    if not {"response", "completion", "tokens"} & {one.value for one in known.values()}:
        raise CannotStart("it does not take the response by a known name")
    one = [name for name, known_name in known.items() if known_name.takes_lists is False]
    lists = [name for name, known_name in known.items() if known_name.takes_lists]
    if one and lists:
        raise CannotStart(f"{one[0]} is of one response, and {lists[0]} are lists for several")
    # the name of TRL, whose functions take lists
    has_trl_ids = any(name.endswith("completion_ids") for name in known)
    return bool(lists) or (not one and has_trl_ids)


def _values_of(row: Mapping[str, Any], text: str, token_ids: list[int]) -> dict[str, Any]:
    """Return what is known of a response; copies, as functions may change their arguments."""
    row = copy.deepcopy(dict(row))
    messages, is_text = row["messages"], row["is_text"]
    return {
        "messages": messages,
        "prompt": messages[-1]["content"] if is_text else messages,
        "response": text,
        "completion": text if is_text else [{"role": "assistant", "content": text}],
        "tokens": list(token_ids),
        **{name: row[name] for name in _OF_ROW},
        **{f"column {name}": value for name, value in row["further"].items()},
    }
