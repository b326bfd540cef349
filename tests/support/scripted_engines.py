"""A stand-in for the engines: responses are a function of the seed, and finish in any order."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megadapo.data.prompts import Prompt
from megadapo.rewards.dapo_math import Score
from megadapo.rollout.requests import GroupRequest, GroupResponse, Response, SamplingSettings

POLICY_VERSION = 3


class ScriptedEngines:
    """Answers each request with random digits drawn from its seed."""

    def __init__(
        self, finish: str = "in order", *, reverse: bool = False, num_engines: int = 1
    ) -> None:
        self.rounds: list[list[int]] = []
        self._num_engines = num_engines
        self._finish = finish
        self._reverse = reverse

    def generate(
        self, groups: Sequence[GroupRequest], settings: SamplingSettings
    ) -> Iterator[GroupResponse]:
        self.rounds.append([group.key for group in groups])
        answers = [
            GroupResponse(
                key=g.key,
                responses=tuple(respond(s, settings) for s in g.seeds),
                engine=g.key % self._num_engines,
            )
            for g in groups
        ]
        if self._finish == "short first":
            answers.sort(key=lambda a: sum(len(r.token_ids) for r in a.responses))
        yield from reversed(answers) if self._reverse else answers


def respond(seed: int, settings: SamplingSettings) -> Response:
    """One response of 1 to max_tokens digits; the longest ones count as cut."""
    source = random.Random(seed)
    length = source.randint(1, settings.max_tokens)
    ids = [source.randint(3, 12) for _ in range(length)]
    logprobs = np.array([-source.random() for _ in ids], dtype=np.float32)
    logprobs[:: settings.max_tokens] = np.nan
    return Response(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=logprobs,
        finish_reason="length" if length == settings.max_tokens else "stop",
        text="".join(str(i - 3) for i in ids),
        policy_versions=np.full(length, POLICY_VERSION, dtype=np.int32),
    )


class RightAtLeast:
    """Calls a response right where its digits sum to `bound` or more."""

    def __init__(self, bound: int) -> None:
        self._bound = bound

    def score_batch(self, responses: Sequence[str], ground_truths: Sequence[str]) -> list[Score]:
        right = [sum(map(int, response)) >= self._bound for response in responses]
        return [
            Score(1.0 if ok else -1.0, ok, response[-1:], None)
            for ok, response in zip(right, responses, strict=True)
        ]


class PlainTokenizer:
    """Encodes characters as their code points; it has no chat template."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]


def make_prompts(num_prompts: int) -> list[Prompt]:
    return [
        Prompt(f"id-{i}", (("user", f"{i}+{i}=?"),), str(2 * i), "test") for i in range(num_prompts)
    ]


def example_log(folder: Path, text: str) -> Path:
    path = folder / "engine-0.log"
    path.write_text(text)
    return path
