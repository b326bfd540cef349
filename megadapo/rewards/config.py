"""The `[reward]` section: how a response is scored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megadapo.rewards.dapo_math import Rule
from megadapo.section import Section, Timeout


class RewardConfig(Section, title="reward"):
    """How a response is scored."""

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

    def conflicts(self) -> Iterator[str]:
        if self.decide == "symbolic" and not self.symbolic:
            yield 'reward.decide = "symbolic" needs reward.symbolic = true'
