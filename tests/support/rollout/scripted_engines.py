"""A stand-in for the engines: responses depend on the seed, and finish in any order."""

import random
import zlib
from collections.abc import Collection, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import cache

import numpy as np

from megadapo.data.group import Failure, Response, Score
from megadapo.data.prompts import Prompt
from megadapo.errors import RewardOutageError
from megadapo.rollout.types import EngineActivity, OpenGroup, SamplingSettings, StopReport

POLICY_VERSION = 3


class ScriptedEngines:
    """Engines whose responses are random digits drawn from the seeds."""

    def __init__(self, finish: str = "in order", *, slots: int = 64, at_once: int = 1) -> None:
        """Start idle.

        Args:
            finish: order of finishing: "in order", "last first", "short first", "at random".
            slots: number of responses that run at once.
            at_once: number of groups that one call returns.
        """
        self.asked: list[int] = []
        self.policy_version = POLICY_VERSION
        self.num_handed_back = 0
        self._finish = finish
        self._slots = slots
        self._at_once = at_once
        self._random = random.Random(finish)
        self._in_flight: dict[int, OpenGroup] = {}

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def capacity(self) -> int:
        return self.capacity_without(())

    def capacity_without(self, keys: Collection[int]) -> int:
        others = [group for key, group in self._in_flight.items() if key not in keys]
        return max(0, self._slots - sum(len(group.seeds) for group in others))

    def submit(self, groups: Sequence[OpenGroup]) -> None:
        assert not {group.key for group in groups} & self._in_flight.keys(), "asked twice at once"
        self.asked += [group.key for group in groups]
        self._in_flight.update((group.key, group) for group in groups)

    def finished(self, timeout_s: float | None = None) -> list[OpenGroup]:
        keys = list(self._in_flight)
        match self._finish:
            case "last first":
                keys.reverse()
            case "short first":
                keys.sort(key=lambda key: _num_tokens(self._in_flight[key]))
            case "at random":
                self._random.shuffle(keys)
        done = keys[: self._at_once]
        self.num_handed_back += len(done)
        return [self._answer(self._in_flight.pop(key)) for key in done]

    def stop(self, keys: Collection[int] | None = None, *, keep: bool) -> StopReport:
        """Stop groups; unfinished responses have the first half of their tokens."""
        stopped = [
            group for key, group in list(self._in_flight.items()) if keys is None or key in keys
        ]
        for group in stopped:
            del self._in_flight[group.key]
        cut = [self._answer(group, cut=True) for group in stopped]
        num_tokens = sum(len(r.token_ids) for answer in cut for r in answer.responses)
        return StopReport(
            keys=tuple(group.key for group in stopped),
            unfinished=tuple(cut) if keep else (),
            num_tokens=num_tokens,
        )

    def activity(self) -> list[EngineActivity]:
        return []

    def check(self) -> None:
        """Do nothing: these engines never die."""

    def _answer(self, group: OpenGroup, *, cut: bool = False) -> OpenGroup:
        begun = group.responses or (None,) * len(group.seeds)
        responses = tuple(
            respond(seed, group.settings, self.policy_version, begun=before, cut=cut)
            for seed, before in zip(group.seeds, begun, strict=True)
        )
        return replace(group, responses=responses, seconds=0.5)


class KilledError(Exception):
    """The driver was killed."""


class KilledAfter(ScriptedEngines):
    """Engines whose driver is killed after a number of groups."""

    def __init__(self, num_groups: int, **keys) -> None:
        super().__init__(**keys)
        self._num_groups = num_groups

    def finished(self, timeout_s: float | None = None) -> list[OpenGroup]:
        if self.num_handed_back >= self._num_groups:
            raise KilledError
        return super().finished(timeout_s)


def _num_tokens(group: OpenGroup) -> int:
    return sum(len(_drawn(seed, group.settings.max_tokens)[0]) for seed in group.seeds)


@cache
def _drawn(seed: int, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and log-probs of a whole response, which nothing may change."""
    source = random.Random(seed)
    length = source.randint(1, max_tokens)
    ids = np.array([source.randint(3, 12) for _ in range(length)], dtype=np.int32)
    logprobs = np.array([-source.random() for _ in ids], dtype=np.float32)
    logprobs[::max_tokens] = np.nan
    ids.flags.writeable = logprobs.flags.writeable = False
    return ids, logprobs


def respond(
    seed: int,
    settings: SamplingSettings,
    policy_version: int = POLICY_VERSION,
    *,
    begun: Response | None = None,
    cut: bool = False,
) -> Response:
    """Return a response of 1 to max_tokens digits; the longest ones reach the limit.

    A response in `begun` is continued, with tokens of this version.
    """
    ids, logprobs = _drawn(seed, settings.max_tokens)
    length = len(ids)
    num_begun = 0 if begun is None else len(begun.token_ids)
    versions = np.full(length, policy_version, dtype=np.int32)
    if begun is not None:
        versions[:num_begun] = begun.policy_versions
    end = num_begun + (length - num_begun) // 2 if cut else length
    whole = "length" if length == settings.max_tokens else "stop"
    return Response(
        token_ids=ids[:end],
        logprobs=logprobs[:end],
        finish_reason=whole if end == length else "unfinished",
        text="".join(str(i - 3) for i in ids[:end].tolist()),
        policy_versions=versions[:end],
    )


class AtOnce(Executor):
    """An executor that runs each call in `submit`, so that no order depends on threads."""

    def submit(self, call, /, *args, **kwargs) -> Future:
        future: Future = Future()
        future.set_result(call(*args, **kwargs))
        return future


class Slowly(Executor):
    """An executor whose results are seen only after a while, as a random clock says."""

    def __init__(self, clock: random.Random) -> None:
        self._clock = clock

    def submit(self, call, /, *args, **kwargs) -> Future:
        future = _LateFuture(self._clock)
        future.set_result(call(*args, **kwargs))
        return future


class _LateFuture(Future):
    def __init__(self, clock: random.Random) -> None:
        super().__init__()
        self._clock = clock

    def done(self) -> bool:
        return self._clock.random() < 0.4


class RightAtLeast:
    """A verifier that accepts responses whose digits sum to at least `bound`."""

    num_threads = 1

    def __init__(self, bound: int) -> None:
        self._bound = bound

    def score_group(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[Score]:
        right = [sum(map(int, text)) >= self._bound for text in texts]
        return [
            Score(1.0 if ok else -1.0, ok, text[-1:], None)
            for ok, text in zip(right, texts, strict=True)
        ]


class Grades(RightAtLeast):
    """A judge that says what a response is worth, in steps of 0.25, not whether it is correct."""

    def __init__(self, *, by_prompt: bool = False) -> None:
        """`by_prompt`: the responses to a prompt are worth the same, 0.25 or 0.75."""
        super().__init__(0)
        self._by_prompt = by_prompt
        self.given: list[float] = []

    def score_group(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[Score]:
        grades = [min(sum(map(int, text)) // 20, 3) / 4 for text in texts]
        if self._by_prompt:
            grades = [0.25 + zlib.crc32(prompt.id.encode()) % 2 / 2] * len(texts)
        self.given += grades
        return [Score(grade, None, "") for grade in grades]


class FailsOn(RightAtLeast):
    """A verifier that fails on some responses, chosen by their text."""

    def __init__(self, share, bound, *, outages=0):
        super().__init__(bound)
        self._share, self.outages = share, outages
        self.num_failed = 0

    def score_group(self, prompt, texts, token_ids):
        if self.outages:
            self.outages -= 1
            raise RewardOutageError("judge is away")
        scores = []
        for text, score in zip(texts, super().score_group(prompt, texts, token_ids), strict=True):
            fails = zlib.crc32(text.encode()) % 1000 < 1000 * self._share
            self.num_failed += fails
            parts = (("judge/failed", 0.0),)
            failed = replace(score, reward=0.0, correct=False, failure=Failure("judge", "HTTP 400"))
            scores.append(failed if fails else replace(score, parts=parts))
        return scores


class PlainTokenizer:
    """A tokenizer of code points, without a chat template."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]


def make_prompts(num_prompts: int) -> list[Prompt]:
    return [
        Prompt(f"id-{i}", (("user", f"{i}+{i}=?"),), str(2 * i), "test") for i in range(num_prompts)
    ]
