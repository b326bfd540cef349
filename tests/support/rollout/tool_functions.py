"""Functions that are tools, good and bad ones."""

import asyncio
from typing import Literal

from megadapo.environments.environment import EnvironmentFailure


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    The sum is exact.

    Args:
        a: first number.
        b (int): second number,
            one by default.

    Returns:
        the sum.
    """
    return a + b


async def look_up(
    word: str, languages: list[Literal["en", "de"]] | None = None, limit: float = 1.0
) -> dict[str, object]:
    """Look a word up."""
    await asyncio.sleep(0)
    if word == "absent":
        raise KeyError(word)
    if word == "offline":
        raise EnvironmentFailure("the dictionary is offline")
    return {"wörd": word, "languages": languages}


def numbers(count: int) -> set[int]:
    return set(range(count))


def first(words: list[str]) -> str:
    return next(iter(words))


def untyped(a, b: int):
    return b


def many(*words: str) -> str:
    return " ".join(words)


def of_object(thing: object) -> str:
    return str(thing)
