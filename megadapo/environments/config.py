"""The `[[rollout.environments]]` list: the environments that prompts are played in."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from megadapo.environments.adapters import BUILT_IN
from megadapo.rewards.workers.by_value import INPUTS, OBJECT_PATH
from megadapo.section import Section, Timeout

Recovery = Literal["replay", "state", "once"]

_NAME = re.compile(r"[\w.-]+")


class EnvironmentConfig(Section, title="rollout.environments"):
    """One entry of the list rollout.environments. A prompt is played in the first entry with its
    data_source; other prompts have a single turn."""

    environment: str
    """Class of the environment: "MODULE:CLASS", where MODULE may be a file of the working folder,
    or a built-in one; docs/environments.md explains them."""
    name: str | None = None
    """Name in metrics; none: the class's own name."""
    data_sources: tuple[str, ...] = ()
    """Prompts that are played in it, by their data_source; empty: all."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class."""
    max_turns: PositiveInt = 8
    """Actions of an episode, which ends behind the last one with finish reason "max_turns"; if it
    was answered within the model's own turn, this turn continues without further calls."""
    max_turn_tokens: PositiveInt | None = None
    """Tokens that a response may generate before its first action, between two and after the last
    one. One that needs more is truncated. None: no limit but the response's own."""
    max_observation_tokens: PositiveInt = 1024
    """Longest message or text of an observation in tokens; the rest is cut off."""
    truncation_side: Literal["left", "right"] = "right"
    """Side that is cut off: "right" keeps the beginning, "left" the end, as of a log."""
    tool_parser: str | None = None
    """Name of vLLM's parser that reads tool calls from the model's text, such as "hermes"."""
    recovery: Recovery = "replay"
    """Way in which an open episode continues after its process was lost. replay: a new object gets
    the same actions, and must observe the same. state: a new object gets the last `state()`. once:
    it does not continue, because its actions have effects elsewhere; the response has no score."""
    timeout_s: Timeout = 60.0
    """Limit of one call in seconds; an episode that exceeds it has failed."""
    num_workers: PositiveInt = 1
    """Number of its processes; each plays many episodes at the same time."""
    memory_mib: Annotated[int, Field(ge=64)] = 4096
    """Limit of the address space of each of its processes, in MiB."""
    network: bool = False
    """Whether it may open sockets."""
    python: str | None = None
    """Python that runs its processes, for packages that do not fit megadapo's; none: this one."""
    variables: tuple[str, ...] = ()
    """Names of environment variables that it sees; others are hidden, as they may hold secrets."""

    @property
    def label(self) -> str:
        """Its name in metrics."""
        return self.name or self.environment.rpartition(":")[2]

    @property
    def path(self) -> str:
        """MODULE:CLASS of the class."""
        return BUILT_IN.get(self.environment, self.environment)

    def applies_to(self, data_source: str) -> bool:
        """Return whether prompts of this data_source are played in it."""
        return not self.data_sources or data_source in self.data_sources

    def conflicts(self) -> Iterator[str]:
        if self.environment not in BUILT_IN and not OBJECT_PATH.fullmatch(self.environment):
            near = difflib.get_close_matches(self.environment, BUILT_IN, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(BUILT_IN)}."
            yield (
                f'rollout.environments.environment = "{self.environment}" is no built-in '
                f'environment; {hint} Your own are named "MODULE:CLASS"'
            )
        if self.python is not None and self.environment.startswith(INPUTS):
            yield (
                f'rollout.environments.python: "{self.environment}" was given in Python, and '
                "another Python cannot read it: write the class in a module of the working folder"
            )
        if not _NAME.fullmatch(self.label):
            yield (
                f'rollout.environments.name = "{self.label}" may have only letters, digits and '
                "the characters _ . -"
            )
