"""Encoding of texts that must not become control tokens, such as those of users and tools.

Tokenizers turn every text `<|im_end|>` into the token that ends a turn, also in a user's message.
Here only a chat template may write control tokens. The encoder uses a copy of the tokenizer in
which each control token has a mark before its name, and puts the mark before the template's names
alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import cached_property, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, cast

from megadapo.errors import DataError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerBase

PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
"""Characters without a meaning, of which marks are chosen that no text has."""
_PLAIN = re.compile(r"[\s\u2581]+|</?(?:[a-z]+|h[1-6])>")
"""Added tokens that are no control tokens if the model's own vocabulary has them too: blanks and
tags of HTML, as Gemma has them. U+2581 is a blank of sentencepiece."""

_Tree = dict[str, "_Tree"]


class TextEncoder:
    """An encoder with the tokenizer's own results for all texts without names of control tokens.

    Control tokens are the special tokens, and all other added tokens that are not plain text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend = cast("Tokenizer", tokenizer.backend_tokenizer)
        added = self._backend.get_added_tokens_decoder()
        self._added: dict[int, AddedToken] = dict(sorted(added.items()))
        bare = self._copy()
        controls = {
            number: token.content
            for number, token in self._added.items()
            if token.special
            or bare.token_to_id(token.content) is None
            or not _PLAIN.fullmatch(token.content)
        }
        self.controls = {content: number for number, content in controls.items()}
        """Names of the control tokens with their ids."""
        self.special = {token.content for token in self._added.values() if token.special}
        """Names of the special ones, which decoding leaves out."""
        self._names = list(self.controls)
        # texts with characters of marks take turns with others, and Gemma's copy takes 20 ms
        self._marked = lru_cache(maxsize=4)(self._with_mark)

    def has_controls(self, text: str, *, special_only: bool = False) -> bool:
        """Return whether the tokenizer could make control tokens of a text."""
        return self.find(text, special_only=special_only) is not None

    def find(self, text: str, *, special_only: bool = False) -> str | None:
        """Return the first name of a control token in a text, None if it has none."""
        pattern, normalizer = self._pattern(special_only), self._backend.normalizer
        found = pattern.search(text)
        if found is None and normalizer is not None:
            # some names are looked for in the normalised text, for example with wide characters
            found = pattern.search(normalizer.normalize_str(text))
        return None if found is None else found[0]

    @cached_property
    def any_control(self) -> re.Pattern[str]:
        """A pattern of the names of control tokens; like tokenizers it takes the longest."""
        return _any_of(self.controls)

    def hide(self, text: str, mark: str, *, special_only: bool = False) -> str:
        """Return a text with stand-ins for the names in it, which `encode` restores."""
        pattern = self._pattern(special_only)
        return pattern.sub(lambda found: f"{mark}{self._names.index(found[0])}{mark}", text)

    def encode(self, text: str, hidden: str) -> list[int]:
        """Return the tokens of a text, of which all names in it are control tokens.

        Args:
            hidden: mark of the stand-ins by `hide`, which become plain text.

        Raises:
            DataError: a stand-in is damaged.
        """
        [mark] = unused_marks(1, text, hidden)
        text = self.any_control.sub(lambda found: mark + found[0], text)
        stand_in = re.compile(f"{hidden}([0-9]+){hidden}")
        text = stand_in.sub(lambda found: self._names[int(found[1])], text)
        if hidden in text:
            raise DataError("the chat template changes names of control tokens in a message")
        copy, ids = self._marked(mark)
        encoding = copy.encode(text, add_special_tokens=False)
        return [
            token
            for one, name in zip(encoding.ids, encoding.tokens, strict=True)
            for token in (self._letters(name) if self._made_of(one, name) else [ids.get(one, one)])
        ]

    @cached_property
    def _any_special(self) -> re.Pattern[str]:
        return _any_of(self.special)

    def _pattern(self, special_only: bool) -> re.Pattern[str]:
        return self._any_special if special_only else self.any_control

    def _made_of(self, number: int, name: str) -> bool:
        """Return whether the model itself made a control token of a text that has its name.

        A model does so whose vocabulary has names as pieces, as with Unigram and WordLevel.
        """
        if self.controls.get(name) != number:
            return False
        # the token of all unknown text stays
        return name != getattr(self._backend.model, "unk_token", None)

    def _letters(self, piece: str) -> list[int]:
        """Return the tokens of each letter of a piece."""
        tokenize = self._backend.model.tokenize
        return [token.id for letter in piece for token in tokenize(letter)]

    def _with_mark(self, mark: str) -> tuple[Tokenizer, dict[int, int]]:
        """Return the copy whose control tokens have a mark, and the ids of its added tokens."""
        from tokenizers import AddedToken

        copy = self._copy()
        names = {
            number: mark + token.content if token.content in self.controls else token.content
            for number, token in self._added.items()
        }
        copy.add_tokens(
            [
                # found in every text as it is: a mark that is no token's would stay in the text
                AddedToken(
                    names[number],
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized and token.content not in self.controls,
                )
                for number, token in self._added.items()
            ]
        )
        return copy, {cast(int, copy.token_to_id(name)): number for number, name in names.items()}

    def _copy(self) -> Tokenizer:
        """Return the tokenizer without added tokens; both share the vocabulary."""
        from tokenizers import Tokenizer

        copy = Tokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            copy.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            copy.pre_tokenizer = self._backend.pre_tokenizer
        return copy


def encoder_of(tokenizer: PreTrainedTokenizerBase) -> TextEncoder | None:
    """Return the encoder of a tokenizer; None for one without added tokens, such as a stand-in."""
    return None if getattr(tokenizer, "backend_tokenizer", None) is None else _encoder(tokenizer)


@lru_cache(maxsize=8)
def _encoder(tokenizer: PreTrainedTokenizerBase) -> TextEncoder:
    return TextEncoder(tokenizer)


def unused_marks(number: int, *texts: str) -> list[str]:
    """Return characters that are in none of the texts."""
    used = set(chain.from_iterable(texts))
    codes = chain.from_iterable(PRIVATE_USE)
    found: Iterator[str] = (chr(code) for code in codes if chr(code) not in used)
    marks = [mark for mark, _ in zip(found, range(number), strict=False)]
    if len(marks) < number:
        raise DataError("a text has all characters of Unicode's private use area")
    return marks


def _any_of(names: Collection[str]) -> re.Pattern[str]:
    """Return a pattern of names, as a tree of their letters: Gemma has thousands."""
    tree: _Tree = {}
    for name in names:
        node = tree
        for letter in name:
            node = node.setdefault(letter, {})
        node[""] = {}
    # a pattern without names must match nothing
    return re.compile(_pattern_of(tree) or r"(?!)")


def _pattern_of(tree: _Tree) -> str:
    branches = [re.escape(one) + _pattern_of(rest) for one, rest in tree.items() if one]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in tree else "")
