"""The base class of environments, and what they are given and return.

Needs only the standard library, because an environment may run in a Python without megadapo's
packages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Task:
    """The subject of an episode: a prompt of the data."""

    id: str
    """Identifier of the prompt, the same in every run."""
    messages: Sequence[Mapping[str, str]]
    """The prompt's chat messages, each with "role" and "content"."""
    ground_truth: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the prompt's row as JSON values."""
    episode: str = ""
    """Name of the episode in its run, the same after a restart: a key for services elsewhere."""
    seed: int = 0
    """For everything random: the same for all responses to the prompt, also after a restart."""
    prompt_ids: Sequence[int] = ()
    """Token ids of the prompt, if the environment `uses_tokens`."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call of a tool, as a parser read it from the model's text."""

    name: str
    arguments: Mapping[str, Any]
    """The call's arguments as JSON values; not checked against the tool's schema."""


@dataclass(frozen=True, kw_only=True)
class Action:
    """One turn of the model."""

    text: str
    """The turn without the token that ends it; names of special tokens are visible."""
    tool_calls: Sequence[ToolCall] = ()
    """Calls that the configured parser found; empty without a parser."""
    problem: str = ""
    """Mistake in a call, if the parser could not read it."""
    token_ids: Sequence[int] = ()
    """Sampled tokens with the one that ends the turn, if the environment `uses_tokens`."""
    logprobs: Sequence[float] = ()
    """Log-prob of each of them."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The answer of an environment to an action."""

    messages: Sequence[Mapping[str, str]] = ()
    """Messages of the roles "user" or "tool"; the model answers them in its next turn."""
    text: str | None = None
    """Text that is appended as it is instead: the model's turn continues after it."""
    token_ids: Sequence[int] | None = None
    """Token ids that are appended as they are instead, up to the start of the model's next turn.
    They may be control tokens, and are never cut off."""
    reward: float = 0.0
    """Reward of this action. The return of an episode is the sum."""
    done: bool = False
    """Whether the episode ends here."""
    is_call: bool = True
    """False if a stop text has ended no call of a tool: `max_turns` does not count the action, and
    no response branches off after it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers by name; each one's sum in an episode becomes a metric: the mean over the episodes
    that have the name."""


class EnvironmentFailure(Exception):
    """Something failed that is no fault of the model, such as a server: the response has no score.

    Any other exception of an environment counts as such a failure too.
    """


class Environment(ABC):
    """One object plays one episode. Every method may be a coroutine."""

    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the tools that the chat template shows to the model."""
    stop: Sequence[str] = ()
    """Texts that end an action in the middle of a turn, for observations with `text`."""
    uses_tokens: bool = False
    """Whether tasks and actions have token ids, for environments that render messages."""
    output: str = "{}"
    """Frame of each `text`, in which {} stands for a result. Tokens of the model that are not
    special, such as <tool_response>, are tokens in the frame and plain text in the result."""

    def reset(self, task: Task) -> Observation | None | Awaitable[Observation | None]:
        """Begin an episode.

        Returns:
            None if the prompt says everything, or an observation, which follows an empty turn of
            the model.
        """
        return None

    @abstractmethod
    def step(self, action: Action) -> Observation | Awaitable[Observation]:
        """Answer an action of the model.

        The model's mistakes, such as a call of a tool that does not exist, are observations.

        Raises:
            EnvironmentFailure: it cannot work now.
        """

    def state(self) -> Any:
        """Return the episode's state as JSON values, for `recovery = "state"`."""
        raise NotImplementedError(f"{type(self).__name__} has no method state()")

    def restore(self, task: Task, state: Any) -> None | Awaitable[None]:
        """Continue the episode whose `state()` this is, in place of `reset`."""
        raise NotImplementedError(f"{type(self).__name__} has no method restore()")

    def close(self) -> None | Awaitable[None]:  # noqa: B027 - most environments hold nothing
        """Release what the episode holds; called once, when it has ended or failed."""
