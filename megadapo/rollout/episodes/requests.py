"""The environment that answers the responses to a prompt, and the prompt with its tools."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megadapo.data.prompts import Prompt, render
from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.environment import Task
from megadapo.errors import ConfigError, DataError
from megadapo.rollout.episodes.types import EnvironmentDescription
from megadapo.rollout.types import EpisodeRequest
from megadapo.tokens.turns import Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEED_BYTES = 4
"""Size of an episode's seed, which must fit every random generator."""


@dataclass(frozen=True, kw_only=True)
class EpisodeRequests:
    """Makes the episode requests of groups; without environments every prompt has a single turn."""

    environments: Sequence[tuple[EnvironmentConfig, EnvironmentDescription]] = ()
    tokenizer: PreTrainedTokenizerBase
    seed: int
    """Seed of the run."""

    def request(self, prompt: Prompt) -> EpisodeRequest | None:
        """Return the request for episodes of a prompt; None if it has a single turn."""
        for number, (config, description) in enumerate(self.environments):
            if config.applies_to(prompt.data_source):
                digest = hashlib.sha256(f"{self.seed}/{prompt.id}".encode()).digest()
                task = Task(
                    id=prompt.id,
                    messages=[{"role": role, "content": text} for role, text in prompt.messages],
                    ground_truth=prompt.ground_truth,
                    extra_info=prompt.extra_info,
                    seed=int.from_bytes(digest[:SEED_BYTES], "little") >> 1,
                )
                return EpisodeRequest(
                    environment=number,
                    label=description.label,
                    task=task,
                    stop=description.stop,
                    output=description.output,
                    uses_tokens=description.uses_tokens,
                    max_turns=config.max_turns,
                    max_turn_tokens=config.max_turn_tokens,
                    max_observation_tokens=config.max_observation_tokens,
                    tool_parser=config.tool_parser,
                    tools=tuple(description.tools),
                    may_repeat=config.recovery != "once",
                )
        return None

    def prompt_ids(self, prompt: Prompt, max_prompt_tokens: int | None = None) -> tuple[int, ...]:
        """Return the tokens of a prompt, with the tools of its environment.

        Raises:
            DataError: it is too long, or does not fit the chat template.
        """
        tools = self.tools(prompt)
        return tuple(render(prompt, self.tokenizer, max_prompt_tokens, tools=tools))

    def tools(self, prompt: Prompt) -> Sequence[Mapping[str, Any]]:
        """Return the JSON schemas of the tools that the chat template shows with a prompt."""
        request = self.request(prompt)
        return () if request is None else self.environments[request.environment][1].tools

    def check(self, prompts: Iterable[Prompt], max_prompt_tokens: int) -> None:
        """Check that the chat template and the length allow the environments' turns and tools.

        Raises:
            ConfigError: the chat template cannot write the turns of a conversation.
            DataError: a prompt is too long with the tools of its environment, or the template
                ignores them.
        """
        if not self.environments:
            return
        if self.tokenizer.chat_template:
            try:
                Turns(self.tokenizer, ("user",))
            except ConfigError as error:
                raise ConfigError(f"rollout.environments: {error}") from error
        for prompt in prompts:
            request = self.request(prompt)
            if request is None or not self.tools(prompt):
                continue
            if list(self.prompt_ids(prompt, max_prompt_tokens)) == render(prompt, self.tokenizer):
                raise DataError(
                    f"rollout.environments: the chat template does not write the tools of "
                    f"{request.label}: take a model whose template has tools, or describe them in "
                    "the prompts"
                )
