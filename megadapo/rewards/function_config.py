"""One entry of `reward.functions`: a function that scores responses, and what it may do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from megadapo.rewards import arithmetic_steps
from megadapo.rewards.steps import StepScore
from megadapo.section import Section, Timeout

IN_PROCESS = ("rule", "answer", "boxed", "answer_or_boxed")
"""Functions that only compare strings, in time that no response can stretch."""
IN_WORKERS = {
    "format": "megadapo.rewards.builtin:format_reward",
    "length": "megadapo.rewards.builtin:length_reward",
    "judge": "megadapo.rewards.served:judge_reward",
    "reward_model": "megadapo.rewards.served:reward_model_reward",
    "arithmetic_steps": "megadapo.rewards.arithmetic_steps:arithmetic_steps_reward",
}
"""Functions that run as a user's do, by the names that a configuration calls them."""
PYTHON_TESTS = "python_tests"
"""Unit tests of what a response has written, in a sandbox."""
SCORES_STEPS = {"arithmetic_steps": arithmetic_steps.SEPARATORS}
"""Built-in functions that score steps, and what these end with."""
BUILT_IN = (*IN_PROCESS, *IN_WORKERS, PYTHON_TESTS)
WITH_NETWORK = ("judge", "reward_model")
"""Built-in functions that ask a server."""
REQUEST_TIMEOUT_S = 60.0
"""Their limit of one request, where no other is given."""
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_NAME = re.compile(r"[\w.-]+")
_TAKEN = ("mean", "shaped_mean", "overlong_penalty_mean")


class RewardFunction(Section, title="reward.functions"):
    """An entry of reward.functions; one that only names its function may be that name alone."""

    function: str
    """What scores: "MODULE:FUNCTION", with modules looked for in the working folder too, or a
    built-in one; docs/rewards.md says how it is called and lists those there are."""
    weight: float = 1.0
    """Factor of its score in the sum that is the reward."""
    name: str | None = None
    """What its metrics are called; none: the function's own name."""
    data_sources: tuple[str, ...] = ()
    """Prompts that it scores, by their data_source; empty: all."""
    options: dict[str, Any] = {}
    """Keyword arguments that it is called with."""
    right_above: float = 0.0
    """A score above this counts as right, for accuracy and for choosing groups, where the function
    does not say itself; only the first function that scores a prompt is asked."""
    on_failure: Literal["score", "stop"] = "score"
    """When it fails on a response: give failure_score and go on, or stop the run."""
    failure_score: float = 0.0
    """Score of a response that it failed on, which is not right then."""
    step_separators: tuple[str, ...] = ()
    """Texts that a step of a response ends with, for a function that returns one score a step;
    empty: it returns spans of tokens, if it scores steps."""
    step_score: StepScore = "min"
    """What makes the score of the response, where the function returns only those of its steps."""
    timeout_s: Timeout = 10.0
    """Limit of one call in seconds; its process is killed after it."""
    num_workers: PositiveInt = 1
    """Its processes, one thread each."""
    memory_mib: Annotated[int, Field(ge=64)] = 4096
    """Address space of one of its processes, in MiB."""
    output_kib: PositiveInt = 1024
    """KiB that one call may print, or write to any one file."""
    network: bool = False
    """Whether it may open sockets."""
    processes: bool = False
    """Whether it may start processes."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that it sees; of most it sees none, as they hold secrets."""

    @model_validator(mode="before")
    @classmethod
    def _read_name(cls, value: object) -> object:
        return {"function": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _write_short(self, write: SerializerFunctionWrapHandler) -> Any:
        written: dict[str, Any] = write(self)
        changed = {key: written[key] for key in self.changed()}
        return self.function if changed.keys() == {"function"} else changed

    @property
    def is_in_process(self) -> bool:
        """Whether it needs no process of its own."""
        return self.function in IN_PROCESS

    @property
    def may_use_network(self) -> bool:
        """Whether it may open sockets; built-in functions that ask a server may."""
        return self.network or self.function in WITH_NETWORK

    @property
    def path(self) -> str:
        """MODULE:FUNCTION of one that runs in worker processes."""
        return IN_WORKERS.get(self.function, self.function)

    @property
    def separators(self) -> tuple[str, ...]:
        """Texts that a step ends with."""
        return self.step_separators or SCORES_STEPS.get(self.function, ())

    @property
    def may_score_steps(self) -> bool:
        """Whether it can return scores of steps; of users' functions nobody knows."""
        return self.function in SCORES_STEPS or self.function not in BUILT_IN

    @property
    def label(self) -> str:
        """What its metrics are called."""
        return self.name or self.function.rpartition(":")[2]

    def applies_to(self, data_source: str) -> bool:
        """Whether it scores prompts of this source."""
        return not self.data_sources or data_source in self.data_sources

    def conflicts(self) -> Iterator[str]:
        if ":" not in self.function and self.function not in BUILT_IN:
            yield self._unknown()
        elif ":" in self.function and not _PATH.fullmatch(self.function):
            yield f'reward.functions.function = "{self.function}": write "MODULE:FUNCTION"'
        if not _NAME.fullmatch(self.label) or self.label in _TAKEN:
            yield f'reward.functions.name = "{self.label}" cannot be the name of a metric'
        yield from self._wrong_steps()
        yield from self._wrong_options()

    def _wrong_steps(self) -> Iterator[str]:
        for key in self.changed("step_separators", "step_score"):
            if not self.may_score_steps:
                yield f'reward.functions.{key}: "{self.function}" scores no steps; leave it out'
        if self.step_separators and self.function in SCORES_STEPS:
            yield f'reward.functions.step_separators: "{self.function}" has its own; leave it out'
        if "" in self.step_separators:
            yield "reward.functions.step_separators: an empty text separates nothing"

    def _unknown(self) -> str:
        near = difflib.get_close_matches(self.function, BUILT_IN, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(BUILT_IN)}"
        return (
            f'reward.functions.function = "{self.function}" is no built-in function; {hint} '
            'Your own are named "MODULE:FUNCTION"'
        )

    def _wrong_options(self) -> Iterator[str]:
        pattern = self.options.get("pattern", "")
        if self.function in IN_PROCESS and self.options:
            yield f'reward.functions.options: "{self.function}" takes none'
        elif self.function in WITH_NETWORK:
            yield from self._wrong_server_options()
        elif self.function == PYTHON_TESTS:
            yield from self._wrong_test_options()
        elif self.function == "format" and isinstance(pattern, str):
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"reward.functions.options.pattern is no regular expression: {error}"

    def _wrong_test_options(self) -> Iterator[str]:
        kinds = {"partial": (bool,), "seconds_per_test": (int, float)}
        for key, value in self.options.items():
            kind = kinds.get(key)
            if kind is None:
                yield f"reward.functions.options.{key} is unknown; there are {', '.join(kinds)}"
            elif type(value) not in kind or (key == "seconds_per_test" and value <= 0):
                yield f"reward.functions.options.{key} = {value!r} cannot be used"

    def _wrong_server_options(self) -> Iterator[str]:
        limit = self.options.get("request_timeout_s", REQUEST_TIMEOUT_S)
        if not isinstance(limit, int | float) or self.timeout_s <= limit:
            yield (
                f"reward.functions.timeout_s = {self.timeout_s:g} ends the call of a group before "
                f"options.request_timeout_s = {limit} ends one request: raise the first, with room "
                "for retries, or lower the second"
            )
