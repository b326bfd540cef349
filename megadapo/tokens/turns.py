"""Several turns of an assistant as tokens: what the chat template writes between two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jinja2

from megadapo.errors import ConfigError, DataError
from megadapo.tokens.chat import ASSISTANT, Messages, chat_text
from megadapo.tokens.encoder import encoder_of, unused_marks
from megadapo.tokens.stops import turn_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEYS = {"role", "content"}


class Turns:
    """The glue of a chat template: its tokens from the end of one turn to the start of the next.

    A conversation is the tokens of its prompt, sampled tokens, glue, sampled tokens, and so on.
    Sampled tokens are never encoded again: another tokenization of the same text, a thought that
    the template drops or blanks that it trims would change what the policy has sampled.

    The glue is found by a mark: the template renders a chat whose answer is the mark, followed by
    the new messages. The text after the mark's close token is the glue.
    """

    stop_ids: tuple[int, ...]
    """The token with which the template closes an assistant's turn; generation must stop at it."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, roles: Sequence[str] = ("user", "tool")
    ) -> None:
        """Check that the glue of each role can be found.

        Args:
            roles: roles that new messages may have.

        Raises:
            ConfigError: there is no chat template, it closes turns without a token of their own, it
                does not write an answer and the message of a role after it exactly once, or a
                message could complete the name of a control token.
        """
        self._name = f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'the model'}"
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"{self._name} is missing, and several turns need one: use the model's chat "
                "version, or set chat_template in its tokenizer_config.json"
            )
        encoder, end = encoder_of(tokenizer), turn_end(tokenizer)
        if encoder is None or end is None:
            raise ConfigError(
                f"{self._name} has no close token: it writes no control token after the answer of "
                "a chat (user, assistant), so the end of a turn cannot be told from text. Use a "
                "template that closes turns with a token, as ChatML does with <|im_end|>"
            )
        self._tokenizer, self._encoder, self.roles = tokenizer, encoder, tuple(roles)
        self.stop_ids = (end,)
        self._end = next(name for name, number in encoder.controls.items() if number == end)
        # the first mark hides names in contents, the second one is the answer
        self._marks = unused_marks(2, str(tokenizer.chat_template))
        for role in self.roles:
            self._check(role)

    def ids_after(
        self, turn_ids: Sequence[int], messages: Sequence[Mapping[str, str]]
    ) -> list[int]:
        """Return the tokens to append after a sampled turn, up to the start of the next turn.

        They begin with the close token if the turn has ended in another way: by another token that
        ends sequences, or by its length. Names of control tokens in the messages are plain text.

        Args:
            turn_ids: the sampled tokens of the turn; only the last one matters.
            messages: the new messages, each with "role" and "content".
        """
        glue = self._encode(self._pairs(messages))
        # the glue's first token is the close token
        return glue[1:] if len(turn_ids) and turn_ids[-1] == self.stop_ids[0] else glue

    def _check(self, role: str) -> None:
        """Raise ConfigError if the rule of the mark fails for one message of a role."""
        advice = f"leave {role!r} out of the roles and give its messages to the role 'user'"
        if role == "user":
            advice = "use a chat template for conversations of several turns"
        if role == ASSISTANT or self._encoder.has_controls(role):
            raise ConfigError(f"{role!r} is no role of a new message: {advice}")
        hidden, mark = self._marks
        try:
            glue = self._glue([(role, hidden)], mark)
        except DataError as error:
            raise ConfigError(f"{error}: {advice}") from error
        before, *rest = glue.split(hidden)
        if len(rest) != 1:
            raise ConfigError(
                f"{self._name} writes a message of the role {role!r} {len(rest)} times: {advice}"
            )
        # some vocabularies have runs of blanks as added tokens, which do no harm
        for name in filter(str.strip, self._encoder.controls):
            parts = ((name[:end], name[end:]) for end in range(1, len(name)))
            # for example, a template writes <{{ content }}> and a message is the text think
            if any(before.endswith(a) or rest[0].startswith(b) for a, b in parts):
                raise ConfigError(
                    f"{self._name} writes a part of {name} directly beside a message of the role "
                    f"{role!r}, so that a text could complete the token: {advice}"
                )

    def _pairs(self, messages: Sequence[Mapping[str, str]]) -> Messages:
        for message in messages:
            if message.keys() != _KEYS or not all(isinstance(x, str) for x in message.values()):
                raise DataError(
                    f"{dict(message)!r:.200} is no chat message: give it the texts role and content"
                )
            if message["role"] not in self.roles:
                raise DataError(
                    f"a chat message has the role {message['role']!r:.80}: give it one of "
                    f"{', '.join(self.roles)}"
                )
            try:
                message["content"].encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"character {error.start} of a message of the role {message['role']} is half "
                    "of a surrogate pair, which is no Unicode text: decode outputs with "
                    'errors="replace"'
                ) from error
        return [(message["role"], message["content"]) for message in messages]

    def _encode(self, messages: Messages) -> list[int]:
        """Return the close token and the glue."""
        contents = [content for _, content in messages]
        marks = self._marks
        if any(mark in content for content in contents for mark in marks):
            marks = unused_marks(2, *contents, str(self._tokenizer.chat_template))
        hidden, mark = marks
        shown = [(role, self._encoder.hide(content, hidden)) for role, content in messages]
        # some tokenizers treat the beginning of a text in another way, so the close token is there
        return self._encoder.encode(self._end + self._glue(shown, mark), hidden)

    def _glue(self, messages: Messages, mark: str) -> str:
        """Return the template's text after the close token of an answer, which is the mark.

        The template sees the new messages themselves, as it may trim them or write them as JSON.
        """
        roles = ", ".join(role for role, _ in messages)
        try:
            text = chat_text([("user", "0"), (ASSISTANT, mark), *messages], self._tokenizer)
        except jinja2.TemplateError as error:
            raise DataError(
                f"{self._name} refuses messages of the roles ({roles}) after an answer: {error}"
            ) from error
        # as in `turn_end`, there may be blanks before the close token
        _, *rest = text.split(mark)
        if len(rest) != 1 or not rest[0].lstrip().startswith(self._end):
            raise DataError(
                f"{self._name} writes an answer {len(rest)} times before messages of the roles "
                f"({roles}), or does not close it with {self._end} there"
            )
        return rest[0].lstrip().removeprefix(self._end)
