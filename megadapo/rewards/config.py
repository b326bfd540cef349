"""The `[reward]` section: how a response is scored."""

from __future__ import annotations

import difflib
import importlib
import json
import math
import re
import string
from collections.abc import Iterator
from typing import Annotated, Any, Literal, cast, get_args, get_type_hints

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)

from megadapo.data.group import Score
from megadapo.data.patterns import check_pattern
from megadapo.data.reasoning_gym import NAME as GYM_SOURCE
from megadapo.errors import DataError
from megadapo.rewards.builtin import STEP_SEPARATORS
from megadapo.rewards.rules import MATHEMATICAL, Rule, score, validate_ground_truth
from megadapo.rewards.steps import StepScore
from megadapo.rewards.unit_tests import read_tests
from megadapo.rewards.workers.by_value import OBJECT_PATH
from megadapo.section import Section, Timeout

Isolation = Literal["auto", "require"]

ENVIRONMENT = "environment"
"""Name of the function that returns what a response has earned in its environment."""
IN_PROCESS = ("rule", *get_args(Rule), ENVIRONMENT)
"""Functions that only compare strings or add, in bounded time; they run in the driver."""
LOCAL_MODEL = "local_reward_model"
"""Name of the function whose processes load a reward model."""
IN_WORKERS = {
    "format": "megadapo.rewards.builtin:format_reward",
    "length": "megadapo.rewards.builtin:length_reward",
    "hierarchical": "megadapo.rewards.builtin:hierarchical_reward",
    "judge": "megadapo.rewards.served:judge_reward",
    "reward_model": "megadapo.rewards.served:reward_model_reward",
    LOCAL_MODEL: "megadapo.rewards.served:local_reward_model_reward",
    "arithmetic_steps": "megadapo.rewards.builtin:arithmetic_steps_reward",
}
"""MODULE:FUNCTION of built-in functions that run like a user's, by their name in a config."""
PYTHON_TESTS = "python_tests"
"""Name of the function that runs unit tests of a response's program in a sandbox."""
REASONING_GYM = "reasoning_gym"
"""Name of the function that asks the scorers of the package reasoning-gym in a sandbox."""
SANDBOX_OPTIONS: dict[str, dict[str, Any]] = {
    PYTHON_TESTS: {"partial": bool, "exact": bool, "seconds_per_test": PositiveFloat},
    REASONING_GYM: {"partial": bool},
}
"""Types of the options of the functions that run in a sandbox."""
SCORES_STEPS = {"arithmetic_steps": STEP_SEPARATORS}
"""Separators of the built-in functions that score steps."""
SAY_CORRECT = (*get_args(Rule), "rule", "hierarchical", "arithmetic_steps", *SANDBOX_OPTIONS)
"""Built-in functions that say whether a response is correct."""
BUILT_IN = (*IN_PROCESS, *IN_WORKERS, *SANDBOX_OPTIONS)
WITH_NETWORK = ("judge", "reward_model")
"""Built-in functions that ask a server."""
LOADING_TIMEOUT_S = 60.0
"""Shortest limit of a call that loads a model."""
REQUEST_TIMEOUT_S = 60.0
"""Default timeout of one request to a server."""
SCORE_PATTERN = r"(?i)score:\s*\**\s*(-?\d+(?:\.\d+)?)"
OnFailure = Literal["retry", "exclude", "score", "stop"]
_NAME = re.compile(r"[\w.-]+")
_TAKEN = ("mean", "excluded", "shaped_mean", "overlong_penalty_mean")


class RewardFunction(Section, title="reward.functions"):
    """One entry of the list reward.functions; the list's default is ["rule"]. The reward is the
    weighted sum of the entries' scores. An entry without other keys may be the function's name."""

    function: str
    """Function that scores: "MODULE:FUNCTION", where MODULE may be a file of the working folder, or
    a built-in one; docs/rewards.md lists these and explains how functions are called."""
    weight: float = 1.0
    """Factor of its score in the sum that is the reward."""
    name: str | None = None
    """Name in metrics; none: the function's own name."""
    data_sources: tuple[str, ...] = ()
    """Prompts that it scores, by their data_source; empty: all."""
    options: dict[str, Any] = {}
    """Keyword arguments of its calls."""
    right_above: float | None = None
    """Score above which a response counts as correct. none: the function itself says, with
    `correct` or `acc`, or else no one does. Accuracy and the selection of groups use the first
    function that says; without any, groups whose rewards differ are mixed, and there is no
    accuracy."""
    on_failure: OnFailure = "exclude"
    """Reaction to a failure on a response. exclude: leave the response out of its group. retry: as
    exclude, but wait through an outage for every response. score: give failure_score. stop: stop
    the run."""
    failure_score: float | None = None
    """Score of a response on which it failed, with "score": a wrong answer's, or a lower one."""
    step_separators: tuple[str, ...] = ()
    """Texts that end a step of a response, for a function that returns one score a step;
    empty: it returns spans of tokens, if it scores steps."""
    step_score: StepScore = "min"
    """Score of a response for which the function returns only scores of steps."""
    timeout_s: Timeout = 10.0
    """Limit of one call in seconds; its process is killed after it. For code in a sandbox, seconds
    of CPU time, or a fifth of the time in which it sleeps."""
    num_workers: PositiveInt = 1
    """Number of its processes, one thread each."""
    memory_mib: Annotated[int, Field(ge=64)] = 4096
    """Limit of the address space of each of its processes, in MiB."""
    output_kib: PositiveInt = 1024
    """KiB that one call may print, or write to any one file."""
    network: bool = False
    """Whether it may open sockets."""
    processes: bool = False
    """Whether it may start processes."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that it sees; others are hidden, as they may hold secrets."""

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
        """Whether it runs in the driver."""
        return self.function in IN_PROCESS

    @property
    def may_use_network(self) -> bool:
        """Whether it may open sockets; built-in functions that ask a server may."""
        return self.network or self.function in WITH_NETWORK

    @property
    def path(self) -> str:
        """MODULE:FUNCTION of a function that runs in worker processes."""
        return IN_WORKERS.get(self.function, self.function)

    @property
    def separators(self) -> tuple[str, ...]:
        """Texts that end a step."""
        return self.step_separators or SCORES_STEPS.get(self.function, ())

    @property
    def may_score_steps(self) -> bool:
        """Whether it can return scores of steps; any user's function may."""
        return self.function in SCORES_STEPS or self.function not in BUILT_IN

    @property
    def may_say_correct(self) -> bool:
        """Whether it can return what is correct; any user's function may."""
        return self.function not in BUILT_IN or self.function in SAY_CORRECT

    @property
    def label(self) -> str:
        """Name in metrics."""
        return self.name or self.function.rpartition(":")[2]

    def applies_to(self, data_source: str) -> bool:
        """Return whether it scores prompts of this source."""
        return not self.data_sources or data_source in self.data_sources

    def conflicts(self) -> Iterator[str]:
        if ":" not in self.function and self.function not in BUILT_IN:
            near = difflib.get_close_matches(self.function, BUILT_IN, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(BUILT_IN)}"
            yield (
                f'reward.functions.function = "{self.function}" is no built-in function; {hint} '
                'Your own are named "MODULE:FUNCTION"'
            )
        elif ":" in self.function and not OBJECT_PATH.fullmatch(self.function):
            yield f'reward.functions.function = "{self.function}": write "MODULE:FUNCTION"'
        if not _NAME.fullmatch(self.label) or self.label in _TAKEN:
            yield f'reward.functions.name = "{self.label}" cannot be the name of a metric'
        if self.failure_score is not None and self.on_failure != "score":
            yield (
                "reward.functions.failure_score has no effect on "
                f'"{self.function}", whose failures give no score: leave it out, or set '
                'on_failure = "score"'
            )
        if self.failure_score is None and self.on_failure == "score":
            yield (
                'reward.functions.on_failure = "score" needs failure_score: the score of a wrong '
                f'answer by "{self.function}", or a lower one, so that failing does not pay'
            )
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

    def _wrong_options(self) -> Iterator[str]:
        pattern = self.options.get("pattern", "")
        if problems := [*self._wrong_types()]:
            yield from problems
        elif self.function in IN_PROCESS and self.options:
            yield f'reward.functions.options: "{self.function}" takes none'
        elif self.function == "length" and not any(
            value or key == "max_tokens" for key, value in self.options.items() if key != "buffer"
        ):
            yield (
                'reward.functions.options: "length" scores every response 0 without max_tokens, '
                "min_tokens or alpha_len; set one"
            )
        elif self.function == "length" and self.options.get("min_tokens", 0) > (
            math.inf if (longest := self.options.get("max_tokens")) is None else longest
        ):
            yield "reward.functions.options: min_tokens is above max_tokens, which no length meets"
        elif self.function in WITH_NETWORK:
            yield from self._wrong_server_options()
        elif self.function == LOCAL_MODEL and self.timeout_s < LOADING_TIMEOUT_S:
            yield (
                f"reward.functions.timeout_s = {self.timeout_s:g} ends the first call of "
                f'"{LOCAL_MODEL}", which loads the model: set it to {LOADING_TIMEOUT_S:g} or more'
            )
        elif self.function in ("format", "hierarchical") and isinstance(pattern, str):
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"reward.functions.options.pattern is no regular expression: {error}"

    def _wrong_server_options(self) -> Iterator[str]:
        limit = self.options.get("request_timeout_s", REQUEST_TIMEOUT_S)
        if self.timeout_s <= limit:
            yield (
                f"reward.functions.timeout_s = {self.timeout_s:g} ends the call of a group before "
                f"options.request_timeout_s = {limit} ends one request: raise the first, with room "
                "for retries, or lower the second"
            )
        url = self.options.get("url", "http://")
        if not url.startswith(("http://", "https://")):
            yield f'reward.functions.options.url = "{url}" must begin with http:// or https://'
        if self.function != "judge":
            return
        template = self.options.get("template", "$response")
        if "response" not in string.Template(template).get_identifiers():
            yield (
                "reward.functions.options.template has no $response, so the judge would rate "
                "every response alike"
            )
        if self.options.get("scale", 1.0) <= 0:
            yield f"reward.functions.options.scale = {self.options['scale']:g} must be above 0"
        try:
            num_groups = re.compile(self.options.get("pattern", SCORE_PATTERN)).groups
        except re.error as error:
            yield f"reward.functions.options.pattern is no regular expression: {error}"
        else:
            if num_groups != 1:
                yield f"reward.functions.options.pattern has {num_groups} groups, not one"

    def _wrong_types(self) -> Iterator[str]:
        """Yield the options that a built-in function does not know, or that have a wrong type."""
        kinds = SANDBOX_OPTIONS.get(self.function, {})
        if self.function in IN_WORKERS:
            module, _, name = self.path.partition(":")
            kinds = get_type_hints(getattr(importlib.import_module(module), name))
        for key, value in self.options.items():
            if self.function in SANDBOX_OPTIONS and key not in kinds:
                yield f"reward.functions.options.{key} is unknown; there are {', '.join(kinds)}"
                continue
            try:
                TypeAdapter(kinds.get(key, Any)).validate_python(value, strict=True)
            except ValidationError as error:
                problem = error.errors()[0]["msg"]
                yield f"reward.functions.options.{key} = {value!r:.60}: {problem}"


def _allow_name(schema: dict[str, Any]) -> None:
    """Allow a function's name alone as an entry of the list."""
    schema["items"] = {"anyOf": [{"type": "string"}, schema["items"]]}


class RewardConfig(Section, title="reward"):
    """Settings of the reward of a response."""

    functions: Annotated[
        tuple[RewardFunction, ...], Field(min_length=1, json_schema_extra=_allow_name)
    ] = (RewardFunction(function="rule"),)
    """Functions that score a response: the reward is the weighted sum of their scores."""
    max_failed_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.05
    """Share of a step's responses above which the run stops before it trains on them, if reward
    functions or environments failed on so many and left them out. A supervisor restarts it."""
    rule: Rule = "answer"
    """Place of the answer: the last `Answer:` line ("answer"), the last boxed expression ("boxed"),
    or the second if the first is missing ("answer_or_boxed"); the last number, compared as a number
    ("last_number"); the last line, compared verbatim ("exact_text"); or the match of reward.pattern
    ("pattern")."""
    pattern: str | None = None
    """Regular expression (RE2's syntax) of the rule "pattern". In the last line that it matches,
    its first group or the whole match is the answer, compared as a number or verbatim."""
    symbolic: Literal["off", "check", "decide"] = "check"
    """Symbolic comparison of the answers of the rules "answer", "boxed" and "answer_or_boxed".
    check: count where it differs from the rule. This runs after each batch on idle cores; answers
    that are still waiting when the next batch comes are left out and counted. decide: it makes the
    reward, and the rule does where it gives no result."""
    isolation: Isolation = "auto"
    """Isolation of generated code and symbolic comparisons: "require" namespaces, or refuse to
    start; "auto" takes Landlock where the system allows no namespaces, as in most containers."""

    @property
    def is_rule_alone(self) -> bool:
        """Whether the rule's +1 and -1 are the rewards and no other function is called."""
        return self.functions == (RewardFunction(function="rule"),)

    @property
    def reads_extra_info(self) -> bool:
        """Whether a function is called that receives extra_info."""
        return not all(function.is_in_process for function in self.functions)

    def uses_rule(self, data_source: str) -> bool:
        """Return whether the rule scores prompts of a source."""
        return any(
            function.function == "rule" and function.applies_to(data_source)
            for function in self.functions
        )

    def hides_gold(self, data_source: str) -> bool:
        """Whether only an environment reads the gold answers of a source, as a hidden state.

        Prompts with the same text may then have several of them.
        """
        applying = [function for function in self.functions if function.applies_to(data_source)]
        return bool(applying) and all(one.function == ENVIRONMENT for one in applying)

    def check_gold(self, gold: object, data_source: str) -> str:
        """Return the gold answer of a prompt from a source, if it can be scored.

        Functions get a list, table or boolean as JSON.

        Raises:
            DataError: it is no text and a rule needs one, no function scores the source, or the
                rule cannot score it.
        """
        applying = [function for function in self.functions if function.applies_to(data_source)]
        if not applying:
            raise DataError(f"no entry of reward.functions scores the data_source {data_source!r}")
        for one in applying:
            if (rule := self.rule_of(one)) is not None:
                if isinstance(gold, list | dict | bool):
                    kind = type(gold).__name__
                    raise DataError(
                        f"the gold answer is not a string but {kind} {gold!r:.80}, and a rule "
                        "compares texts: give one, or score it by a function of your own in "
                        "reward.functions, which gets the value as JSON"
                    )
                gold = validate_ground_truth(gold, rule)
            elif one.function == PYTHON_TESTS:
                read_tests(gold)
            elif one.function == REASONING_GYM and data_source != GYM_SOURCE:
                raise DataError(
                    f'"{REASONING_GYM}" scores prompts of sources {GYM_SOURCE}:... only; set '
                    f'data_sources = ["{GYM_SOURCE}"] in its entry of reward.functions'
                )
        if isinstance(gold, list | dict | bool):
            return json.dumps(gold, ensure_ascii=False, default=str)
        if not isinstance(gold, str):
            raise DataError(f"the gold answer is not a string but {type(gold).__name__}")
        return gold

    def score(self, response: str, gold: str, rule: Rule | None = None) -> Score:
        """Return the score of a response by a rule, reward.rule by default."""
        return score(response, gold, rule or self.rule, self.pattern)

    @property
    def compares_symbolically(self) -> bool:
        """Whether answers are compared symbolically too."""
        has_rule = any(one.function == "rule" for one in self.functions)
        return self.symbolic != "off" and has_rule and self.rule in MATHEMATICAL

    def rule_of(self, function: RewardFunction) -> Rule | None:
        """Return the string rule that a function stands for, if it is one."""
        if not function.is_in_process or function.function == ENVIRONMENT:
            return None
        return self.rule if function.function == "rule" else cast(Rule, function.function)

    @property
    def verdict(self) -> str:
        """The functions that say whether a response is correct, for messages."""
        rules = []
        for one in self.functions:
            if one.right_above is not None:
                rules.append(f"a score of {one.label} above right_above = {one.right_above:g}")
            elif (rule := self.rule_of(one)) is not None:
                decides = self.symbolic == "decide" and one.function == "rule"
                rules.append(f'the rule "{rule}"' + ", compared symbolically" * decides)
            elif one.may_say_correct:
                rules.append(one.label if one.function in BUILT_IN else f"`correct` of {one.label}")
        return ", or else ".join(rules) or "no function"

    def conflicts(self) -> Iterator[str]:
        if self.symbolic == "decide" and self.rule not in MATHEMATICAL:
            known = ", ".join(MATHEMATICAL)
            yield f'reward.symbolic = "decide" needs reward.rule to be one of {known}'
        uses_pattern = "pattern" in (self.rule, *(one.function for one in self.functions))
        if uses_pattern and not self.pattern:
            yield 'reward.pattern is missing, which the rule "pattern" needs'
        elif self.pattern and not uses_pattern:
            yield 'reward.pattern has no effect: leave it out, or set reward.rule = "pattern"'
        elif self.pattern and (problem := check_pattern("reward.pattern", self.pattern)):
            yield problem
        labels = [function.label for function in self.functions]
        for label in {label for label in labels if labels.count(label) > 1}:
            yield f'reward.functions: two are called "{label}"; give one another name'
