"""Tools that a response may call while it is written: what they are, and `[rollout.tools]`.

A call is written by the model and ends in a stop string; the tool's output is put behind it, and
the model goes on. Tokens of the output are in the response and are nobody's samples: they have the
policy version NO_VERSION and no log-prob, and no loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal

from pydantic import PositiveInt

from megadapo.section import Section


class ToolsConfig(Section, title="rollout.tools"):
    """The tool that responses may call, in training and in evaluation."""

    tool: Literal["calculator", "mark"] | None = None
    """calculator: arithmetic as Python writes it; mark: puts out nothing, but responses can branch
    behind the stop string; none: there is no tool."""
    start: str = "<calculator>"
    """What a call begins with; "" takes the expression that ends at the stop string."""
    stop: str = "</calculator>"
    """What a call ends with."""
    output: str = "<result>{}</result>"
    """What is put behind a call, with {} where the result stands."""
    max_calls: PositiveInt = 8
    """Calls of a response that get an output; later ones get none."""
    max_output_tokens: PositiveInt = 64
    """Longest output of a call, in tokens; it is cut there."""

    def output_of(self, result: str) -> str:
        """What is put behind a call with this result; other braces are text."""
        return self.output.replace("{}", result)

    def conflicts(self) -> Iterator[str]:
        if self.tool is None and (unused := self.changed()):
            keys = ", ".join(f"rollout.tools.{name}" for name in unused)
            yield f"{keys}: read only with rollout.tools.tool; leave it out"
        if not self.stop:
            yield "rollout.tools.stop is empty: a call must end somewhere"
        if self.output.count("{}") != 1:
            yield (
                f"rollout.tools.output = {self.output!r} must have {{}} once, where the result "
                "stands"
            )


class Tool(ABC):
    """What an engine asks for outputs; one object serves all responses of an engine.

    `step` is a function of the text alone: a response that a lost engine had begun is asked for
    again, and branches begin in the middle of one. It runs in the engine's event loop, so it
    must be quick, and it must not raise for anything that a model can write.
    """

    stop_strings: tuple[str, ...]
    """Generation stops behind these, and `step` is asked."""

    def __init__(self, config: ToolsConfig) -> None:
        self._config = config
        self.stop_strings = (config.stop,)

    def start(self) -> None:  # noqa: B027 - a tool that holds nothing has nothing to do
        """Take what the tool needs, before its first step."""

    @abstractmethod
    def step(self, text: str) -> str | None:
        """Return what is put behind a response that has come to a stop string; None where that is
        no call."""

    def stop(self) -> None:  # noqa: B027
        """Give it back, after the last step."""


class Mark(Tool):
    """Puts out nothing: the stop string alone is where responses can branch."""

    def step(self, text: str) -> str | None:
        return "" if text.endswith(self._config.stop) else None
