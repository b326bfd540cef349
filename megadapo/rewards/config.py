"""The `[reward]` section: how a response is scored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, cast

from pydantic import Field, PositiveFloat, PositiveInt

from megadapo.errors import DataError
from megadapo.rewards.dapo_math import Rule, validate_ground_truth
from megadapo.rewards.function_config import PYTHON_TESTS, RewardFunction
from megadapo.rewards.unit_tests import read_tests
from megadapo.section import Section, Timeout


def _or_name(schema: dict[str, Any]) -> None:
    """An entry of the list may be the function's name alone."""
    schema["items"] = {"anyOf": [{"type": "string"}, schema["items"]]}


class RewardConfig(Section, title="reward"):
    """How a response is scored."""

    functions: Annotated[
        tuple[RewardFunction, ...], Field(min_length=1, json_schema_extra=_or_name)
    ] = (RewardFunction(function="rule"),)
    """What scores a response: the reward is the sum of what they say, each times its weight."""
    rule: Rule = "answer"
    """Where the answer is looked for: the last `Answer:` line, the last boxed expression, or the
    second where the first is missing."""
    decide: Literal["rule", "symbolic"] = "rule"
    """Which comparison makes the reward; with "symbolic" the rule still decides where the symbolic
    one gives no answer."""
    symbolic: bool = True
    """Compare answers symbolically too, and count where that differs from the rule. Where it does
    not decide, it is asked after each batch, has only the time that nobody else wants, and answers
    that it does not get to before the next batch are left out and counted."""
    symbolic_workers: PositiveInt = 2
    """Number of processes for the symbolic comparison, one thread each."""
    symbolic_timeout_s: Timeout = 2.0
    """Limit of one symbolic comparison, in seconds by the clock where it decides, and of computing
    where nothing waits for it; its process is killed after it."""
    symbolic_seconds_per_minute: PositiveFloat = 15.0
    """Seconds in any minute that responses may wait for symbolic comparisons that decide; when a
    policy writes answers that take longer, the rest is skipped and counted."""
    symbolic_memory_mib: Annotated[int, Field(ge=256)] = 1024
    """Address space of one symbolic process, in MiB; below 256 it would not start."""

    @property
    def is_rule_alone(self) -> bool:
        """Whether the rule's +1 and -1 are the rewards, and nothing else is asked."""
        return self.functions == (RewardFunction(function="rule"),)

    @property
    def reads_extra_info(self) -> bool:
        """Whether a function is called that is given extra_info."""
        return not all(one.is_in_process for one in self.functions)

    def uses_rule(self, data_source: str) -> bool:
        """Whether the rule is among what scores prompts of a source."""
        return any(one.function == "rule" and one.applies_to(data_source) for one in self.functions)

    def check_gold(self, gold: object, data_source: str) -> str:
        """Return the gold answer of a prompt from a source, if it can be scored.

        Raises:
            DataError: it is no text, no function scores the source, or the rule cannot score it.
        """
        applying = [one for one in self.functions if one.applies_to(data_source)]
        if not applying:
            raise DataError(f"no entry of reward.functions scores the data_source {data_source!r}")
        for one in applying:
            if (rule := self.rule_of(one)) is not None:
                gold = validate_ground_truth(gold, rule)
            elif one.function == PYTHON_TESTS:
                read_tests(gold)
        if not isinstance(gold, str):
            raise DataError(f"the gold answer is not a string but {type(gold).__name__}")
        return gold

    def rule_of(self, function: RewardFunction) -> Rule | None:
        """The string rule that a function stands for; None where it is none."""
        if not function.is_in_process:
            return None
        return self.rule if function.function == "rule" else cast(Rule, function.function)

    def conflicts(self) -> Iterator[str]:
        if self.decide == "symbolic" and not self.symbolic:
            yield 'reward.decide = "symbolic" needs reward.symbolic = true'
        labels = [one.label for one in self.functions]
        for label in {label for label in labels if labels.count(label) > 1}:
            yield f'reward.functions: two are called "{label}"; give one another name'
