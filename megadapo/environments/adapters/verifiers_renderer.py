"""A renderer of verifiers with the tokens of this project: for any chat template.

It runs in a Python that has verifiers, and needs of this project what `tokens/` has. Prompts and
the glue between turns are those of other environments, and sampled tokens are never encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from renderers.base import RenderedTokens
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer

from megadapo.errors import ConfigError
from megadapo.tokens.chat import chat_ids
from megadapo.tokens.stops import stop_ids
from megadapo.tokens.turns import Turns


class ChatTemplateRenderer(DefaultRenderer):  # type: ignore[misc]
    """Renders by the tokenizer's chat template, and extends sampled tokens.

    Its settings are those of renderers' default renderer, such as `tool_parser`, without arguments
    of the template.
    """

    config_class: ClassVar[Any] = DefaultRendererConfig

    def __init__(self, tokenizer: Any, config: Any) -> None:
        """Raises ConfigError if the template cannot write several turns."""
        if config.model_extra:
            raise ConfigError(f"the renderer has no settings {', '.join(config.model_extra)}")
        super().__init__(tokenizer, config)
        try:
            self._turns = Turns(tokenizer)
        except ConfigError:
            # a template without tools may still have turns of the user
            self._turns = Turns(tokenizer, ("user",))

    def get_stop_token_ids(self) -> list[int]:
        return list(stop_ids(self._tokenizer))

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: Sequence[Mapping[str, Any]],
        *,
        tools: object = None,
    ) -> Any:
        """Return the tokens so far followed by the glue; raises what `Turns` raises."""
        known = [*previous_prompt_ids, *previous_completion_ids]
        shown = [
            {"role": message["role"], "content": message["content"]} for message in new_messages
        ]
        glue = self._turns.ids_after(previous_completion_ids, shown)
        # the glue is one text of all messages, so it is counted as the last one's
        return RenderedTokens(
            token_ids=known + glue,
            message_indices=[-1] * len(known) + [len(shown) - 1] * len(glue),
            message_roles=[one["role"] for one in shown],
        )

    def _apply(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None, **options: Any
    ) -> list[int]:
        if any(message.keys() != {"role", "content"} for message in messages):
            # calls of tools in a prompt, which prompts of this project do not have
            return cast(list[int], super()._apply(messages, tools=tools, **options))
        pairs = [(message["role"], message["content"]) for message in messages]
        add_generation_prompt = options.get("add_generation_prompt", False)
        return chat_ids(
            pairs, self._tokenizer, tools=tools or (), add_generation_prompt=add_generation_prompt
        )
