"""The environment that answers the responses to a prompt, and the prompt with its tools."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megadapo.data.prompts import Prompt, render
from megadapo.environments.adapters import CALLED
from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.environment import Task
from megadapo.environments.processes import EnvironmentDescription
from megadapo.errors import ConfigError, DataError
from megadapo.rollout.types import EpisodeRequest
from megadapo.tokens.turns import Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

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
                    environment=number, config=config, description=description, task=task
                )
        return None

    def prompt_ids(self, prompt: Prompt, max_prompt_tokens: int | None = None) -> tuple[int, ...]:
        """Return the tokens of a prompt, with the tools of its environment."""
        tools = self.tools(prompt)
        return tuple(render(prompt, self.tokenizer, max_prompt_tokens, tools=tools))

    def tools(self, prompt: Prompt) -> Sequence[Mapping[str, Any]]:
        """Return the JSON schemas of the tools that the chat template shows with a prompt."""
        request = self.request(prompt)
        return () if request is None else request.description.tools

    def check(self, prompts: Sequence[Prompt], max_prompt_tokens: int) -> None:
        """Check that environments have prompts, whose template and length allow turns and tools.

        Raises:
            ConfigError: no prompt is played in an environment, the chat template cannot write the
                turns of a conversation, or nothing reads the calls of built-in tools.
            DataError: a prompt is too long with the tools of its environment, or the template
                ignores them.
        """
        if not self.environments:
            return
        self._check_data_sources([*dict.fromkeys(prompt.data_source for prompt in prompts)])
        self.check_template(prompts, max_prompt_tokens)

    def check_template(self, prompts: Sequence[Prompt], max_prompt_tokens: int) -> None:
        """Check that the template can write the turns and tools of some prompts, as in `check`."""
        if self.environments and self.tokenizer.chat_template:
            try:
                Turns(self.tokenizer, ("user",))
            except ConfigError as error:
                raise ConfigError(f"rollout.environments: {error}") from error
        for prompt in prompts:
            request = self.request(prompt)
            if request is None or not self.tools(prompt):
                continue
            name = request.config.environment
            if request.config.tool_parser is None and name in CALLED:
                raise ConfigError(
                    f'rollout.environments.tool_parser: without one no call of "{name}" is read, '
                    'so an episode ends at its first turn; set the model\'s, such as "hermes"'
                )
            if list(self.prompt_ids(prompt, max_prompt_tokens)) == render(prompt, self.tokenizer):
                raise DataError(
                    f"rollout.environments: the chat template does not write the tools of "
                    f"{request.description.label}: take a model whose template has tools, or "
                    "describe them in the prompts"
                )

    def _check_data_sources(self, found: Sequence[str]) -> None:
        """Report entries without prompts, and data_sources that prompts do not have."""
        listed, left = ", ".join(map(json.dumps, found)), [*found]
        takes_all, problems = False, []
        for number, (config, _) in enumerate(self.environments):
            entry = f"rollout.environments[{number}] ({config.environment})"
            absent = [name for name in config.data_sources if name not in found]
            # an entry without data_sources takes what others leave, which may be nothing
            may_be_empty = not config.data_sources and not takes_all
            if not may_be_empty and not any(map(config.applies_to, left)):
                reason = "entries before it take them"
                if absent and len(absent) == len(config.data_sources):
                    reason = "none has its data_sources"
                problems.append(f"{entry} has no prompts: {reason}; prompts have {listed}")
            elif absent:
                names = ", ".join(map(json.dumps, absent))
                logger.warning("%s: no prompt has %s; prompts have %s", entry, names, listed)
            left = [name for name in left if not config.applies_to(name)]
            takes_all = takes_all or not config.data_sources
        if problems:
            raise ConfigError("\n".join(problems))
