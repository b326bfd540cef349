"""Detection of held-out problems that are also training problems."""

from __future__ import annotations

import logging
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from megadapo.data.prompts import Prompt

logger = logging.getLogger(__name__)

MAX_LISTED = 3
"""Number of problems that a warning quotes; further ones are counted."""

MIN_CONTAINED = 24
"""Characters of the shortest problem that is searched inside others."""
WORD = re.compile(r"\s")
LINE = re.compile(r"\n")
"""Ends of the units of text."""

_PIECE = MIN_CONTAINED // 2
# every MIN_CONTAINED characters have a whole piece that begins at a multiple of this
_STRIDE = MIN_CONTAINED - _PIECE + 1
_KEPT_SYMBOLS = "+-*/=<>^%!."
_DROPPED = re.compile(rf"[^\w{re.escape(_KEPT_SYMBOLS)}]|_")


def normalised(text: str) -> str:
    """Return a problem without the differences that two copies of it may have.

    Case, character width, white space, punctuation, dollar signs and braces are removed. Signs that
    change the problem stay, and so do decimal points.
    """
    plain = _DROPPED.sub("", unicodedata.normalize("NFKC", text).casefold())
    return re.sub(r"\.(?!\d)", "", plain)


def without_template(
    texts: Sequence[str], unit: re.Pattern[str] = WORD, *, min_texts: int = 2
) -> list[str]:
    """Return texts without the beginning and the end that all of them share.

    Args:
        unit: smallest shared unit, WORD or LINE.
        min_texts: number of distinct texts below which texts are returned unchanged, as few
            problems may share a beginning by chance.
    """
    different = set(texts)
    if len(different) < min_texts:
        return list(texts)
    first = _num_shared(different, unit)
    last = _num_shared({text[first:][::-1] for text in different}, unit)
    return [text[first : len(text) - last] for text in texts]


def _num_shared(texts: set[str], unit: re.Pattern[str]) -> int:
    """Return the number of characters of the whole units with which all texts begin."""
    shared = os.path.commonprefix([min(texts), max(texts)])
    return max((end.end() for end in unit.finditer(shared)), default=0)


class ProblemIndex:
    """An index of problems that finds copies, also in another template."""

    def __init__(self, texts: Sequence[str], bare: Sequence[str]) -> None:
        """Index the texts; `bare` are the same texts without their template."""
        self._bare = [normalised(text) for text in bare]
        self._whole: dict[str, set[int]] = defaultdict(set)
        self._with_piece: dict[str, set[int]] = defaultdict(set)
        for number, (text, key) in enumerate(zip(texts, self._bare, strict=True)):
            self._whole[normalised(text)].add(number)
            if len(key) >= MIN_CONTAINED:
                for start in range(len(key) - _PIECE + 1):
                    self._with_piece[key[start : start + _PIECE]].add(number)

    def copies_of(self, text: str, bare: str) -> set[int]:
        """Return the numbers of problems that equal, contain or are contained in a text.

        `bare` is the text without its template.
        """
        found, key = set(self._whole.get(normalised(text), ())), normalised(bare)
        if len(key) < MIN_CONTAINED:
            return found
        pieces = (key[n : n + _PIECE] for n in range(0, len(key) - _PIECE + 1, _STRIDE))
        near = {number for piece in pieces for number in self._with_piece.get(piece, ())}
        contained = {n for n in near if self._bare[n] in key or key in self._bare[n]}
        return found | contained


def overlapping(training: Iterable[Prompt], held_out: Sequence[Prompt]) -> list[Prompt]:
    """Return the held-out problems that are among the training prompts, in order."""
    order, problems = _index(held_out)
    found = {
        order[place]
        for _, (text, bare) in _texts(list(training))
        for place in problems.copies_of(text, bare)
    }
    return [prompt for number, prompt in enumerate(held_out) if number in found]


def warn_of_overlap(training: Sequence[Prompt], held_out: Sequence[Prompt], name: str = "") -> None:
    """Log a warning if held-out problems, of the set `name`, are among the training prompts."""
    num_states = Counter(prompt.messages for prompt in held_out)
    # problems with the same text and another hidden state are different problems
    found = [p for p in overlapping(training, held_out) if num_states[p.messages] == 1]
    if not found:
        return
    listed = ", ".join(f"{prompt.messages[-1][1]!r:.60}" for prompt in found[:MAX_LISTED])
    more = f" and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
    logger.warning(
        "%d of %d held-out problems%s are also training prompts, so their accuracy says nothing "
        "about other problems: %s%s",
        *(len(found), len(held_out), f" of {name}" if name else "", listed, more),
    )


def without_overlap(training: Sequence[Prompt], held_out: Sequence[Prompt]) -> list[Prompt]:
    """Return the training prompts that are not among the held-out problems."""
    problems = _index(held_out)[1]
    copies = {n for n, (text, bare) in _texts(training) if problems.copies_of(text, bare)}
    num_states = Counter(prompt.messages for prompt in training)
    return [
        prompt
        for n, prompt in enumerate(training)
        # problems with the same text and another hidden state are different problems
        if n not in copies or num_states[prompt.messages] > 1
    ]


def _index(prompts: Sequence[Prompt]) -> tuple[list[int], ProblemIndex]:
    """Return the prompts' numbers in the order of the index, and the index."""
    texts = dict(_texts(prompts))
    index = ProblemIndex([text for text, _ in texts.values()], [bare for _, bare in texts.values()])
    return list(texts), index


def _texts(prompts: Sequence[Prompt]) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield each prompt's number with its text, whole and without the template of its source."""
    of_source: dict[str, list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        of_source[prompt.data_source].append(number)
    for numbers in of_source.values():
        texts = [_problem_text(prompts[number]) for number in numbers]
        yield from zip(numbers, zip(texts, without_template(texts), strict=True), strict=True)


def _problem_text(prompt: Prompt) -> str:
    """Return the messages without the system message, which all prompts share."""
    return "\n".join(content for role, content in prompt.messages if role != "system")
