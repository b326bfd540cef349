"""Tokens of prompts, answers and outputs of tools, with control tokens by the template alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import jinja2

from megadapo.errors import DataError
from megadapo.tokens.encoder import TextEncoder, encoder_of, unused_marks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[tuple[str, str]]
"""(role, content) of each chat message."""
ASSISTANT = "assistant"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A plain chat template, for models that are made here; <|im_end|> closes a turn."""
_OF_TEMPLATES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors that a template's expressions can raise, such as 1 / 0 and range(10 ** 9)."""
_OPENING = re.compile(r"(<[^<>/\s]*think[^<>/\s]*>|\[THINK\])\s*\Z", re.IGNORECASE)
"""The end of a text that opens a thought."""
_WITH_MARKUP = (ASSISTANT, "system")
"""Roles whose texts may have control tokens that are not special, such as <think>."""


def chat_ids(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Return the tokens of a chat by the chat template.

    Names of control tokens in the messages are plain text. In messages of the assistant and the
    system only those of special tokens are, so that an earlier thought keeps its <think>.

    Args:
        tools: JSON schemas of the tools that the template shows to the model.
    """
    encoder = encoder_of(tokenizer)
    if encoder is not None:
        _check_roles(encoder, messages)
    if encoder is None or not any(
        encoder.has_controls(content, special_only=role in _WITH_MARKUP)
        for role, content in messages
    ):
        # a single chat without return_dict gives a list of ids
        options = {"add_generation_prompt": add_generation_prompt, "return_dict": False}
        return cast(list[int], _applied(messages, tokenizer, tools, **options))
    contents = [content for _, content in messages]
    [mark] = unused_marks(1, *contents, str(tokenizer.chat_template))
    hidden = [
        (role, encoder.hide(content, mark, special_only=role in _WITH_MARKUP))
        for role, content in messages
    ]
    text = chat_text(hidden, tokenizer, add_generation_prompt=add_generation_prompt, tools=tools)
    return encoder.encode(text, mark)


def chat_text(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return the text of a chat by the chat template."""
    options = {"add_generation_prompt": add_generation_prompt, "tokenize": False}
    return cast(str, _applied(messages, tokenizer, tools, **options))


def opened_thought(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text with which the generation prompt opens a thought, such as "<think>\\n".

    It is the beginning of every sampled answer, and empty for most templates.
    """
    if not getattr(tokenizer, "chat_template", None):
        return ""
    try:
        found = _OPENING.search(chat_text((("user", "0"),), tokenizer))
    except jinja2.TemplateError:
        return ""
    return found[0] if found else ""


def prompt_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a prompt without a chat template.

    They begin with one beginning-of-sequence token if the tokenizer adds it, also if the text
    begins with its name. No token that the tokenizer adds follows the text.
    """
    encoder = encoder_of(tokenizer)
    if encoder is None:
        return cast(list[int], tokenizer.encode(text))
    head = _added_before(tokenizer)
    bos = tokenizer.bos_token
    if bos and head[-1:] == [tokenizer.bos_token_id]:
        text = text.removeprefix(cast(str, bos))
    if not encoder.has_controls(text):
        return head + _encoded(text, tokenizer)
    [mark] = unused_marks(1, text)
    return head + encoder.encode(encoder.hide(text, mark), mark)


def output_ids(text: str, frame: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a tool's output, in which names of control tokens are plain text.

    Args:
        frame: text in which {} stands for a result. If the output contains it, only the names of
            special tokens are plain text in the frame, so that <tool_response> around a result is
            a token.
    """
    encoder = encoder_of(tokenizer)
    if encoder is None or not encoder.has_controls(text):
        return _encoded(text, tokenizer)
    [mark] = unused_marks(1, text)
    before, _, after = frame.partition("{}")
    result = text.removeprefix(before).removesuffix(after)
    if before + result + after != text:
        return encoder.encode(encoder.hide(text, mark), mark)
    parts = (encoder.hide(part, mark, special_only=True) for part in (before, after))
    return encoder.encode(encoder.hide(result, mark).join(parts), mark)


def control_name(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the first name of a control token in messages that is plain text to `chat_ids`."""
    encoder = encoder_of(tokenizer)
    if encoder is None:
        return None
    found = (encoder.find(text, special_only=role in _WITH_MARKUP) for role, text in messages)
    return next((name for name in found if name is not None), None)


def answer_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of an answer, the inverse of decoding without special tokens.

    Names of special tokens in it are plain text; other control tokens, such as <think>, are tokens.
    """
    encoder = encoder_of(tokenizer)
    if encoder is None or not encoder.has_controls(text, special_only=True):
        return _encoded(text, tokenizer)
    [mark] = unused_marks(1, text)
    return encoder.encode(encoder.hide(text, mark, special_only=True), mark)


def _check_roles(encoder: TextEncoder, messages: Messages) -> None:
    for role, _ in messages:
        name = encoder.find(role)
        if name is not None:
            raise DataError(
                f"a chat message has the role {role!r:.80}, which has the name of a control token, "
                f"{name}: correct the role"
            )


def _applied(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]],
    **options: Any,
) -> object:
    """Return what the chat template makes of messages; any failure of it is a TemplateError."""
    try:
        return tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            # a template may write an empty list of tools
            tools=[dict(tool) for tool in tools] or None,
            **options,
        )
    except _OF_TEMPLATES as error:
        raise jinja2.TemplateRuntimeError(repr(error)) from error


def _encoded(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return cast(list[int], tokenizer.encode(text, add_special_tokens=False))


def _added_before(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the tokenizer adds before a text."""
    whole = cast(list[int], tokenizer.encode("0"))
    bare = _encoded("0", tokenizer)
    starts = range(len(whole) - len(bare) + 1)
    start = next(start for start in starts if whole[start : start + len(bare)] == bare)
    return whole[:start]
