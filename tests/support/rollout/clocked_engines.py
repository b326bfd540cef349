"""Engines whose tokens depend on seed, tokens so far and weights, and whose speed is random."""

import hashlib
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megadapo.data.group import Response
from megadapo.rollout.types import EngineActivity, OpenGroup, StopReport, continued_seed

END_SHARE = 8
"""A response ends after each token with a probability of 1 / END_SHARE."""


@dataclass
class _Running:
    group: OpenGroup
    version: int
    engine: int
    responses: list[Response]
    noise: list[random.Random]


class ClockedEngines:
    """Some engines that a random clock drives; one of them may lose its groups.

    As in vLLM, the noise of a request restarts with the tokens so far, so a response that is
    stopped at another token continues differently.
    """

    def __init__(self, clock: random.Random, *, num_engines=1, slots=60, loss=0.0) -> None:
        self.policy_version = 0
        self.num_lost = 0
        self._clock, self._slots, self._loss = clock, slots, loss
        self._speeds = [clock.choice([1, 2, 5, 12]) for _ in range(num_engines)]
        self._running: dict[int, _Running] = {}

    def resize(self, num_engines: int) -> None:
        """Let engines join or leave; an engine that leaves loses its groups, which start again."""
        self._speeds = [self._clock.choice([1, 2, 5, 12]) for _ in range(num_engines)]
        for key, one in list(self._running.items()):
            if one.engine >= num_engines:
                self._start(self._running.pop(key).group)

    @property
    def num_in_flight(self) -> int:
        return len(self._running)

    @property
    def capacity(self) -> int:
        used = sum(len(one.group.seeds) for one in self._running.values())
        return max(0, self._slots * len(self._speeds) - used)

    def submit(self, groups: Sequence[OpenGroup]) -> None:
        assert not {group.key for group in groups} & self._running.keys(), "requested twice at once"
        for group in groups:
            self._start(group)

    def finished(self, timeout_s: float | None = None) -> list[OpenGroup]:
        """Generate some tokens on every engine, and return what has ended."""
        done: list[OpenGroup] = []
        self._lose_engine()
        for one in list(self._running.values()):
            for place, response in enumerate(one.responses):
                for _ in range(self._clock.randint(0, self._speeds[one.engine])):
                    response = self._next(one, place, response)
                one.responses[place] = response
            if all(self._has_ended(one, place) for place in range(len(one.responses))):
                done.append(self._report(one))
        for group in done:
            del self._running[group.key]
        self._clock.shuffle(done)
        return done

    def stop(self, keys: Collection[int] | None = None, *, keep: bool) -> StopReport:
        """Stop groups; an engine that dies meanwhile takes their new tokens with it."""
        self._lose_engine()
        chosen = [key for key in self._running if keys is None or key in keys]
        stopped = [self._report(self._running.pop(key)) for key in chosen]
        num_tokens = sum(group.num_tokens for group in stopped)
        return StopReport(
            keys=tuple(chosen), unfinished=tuple(stopped) if keep else (), num_tokens=num_tokens
        )

    def activity(self) -> list[EngineActivity]:
        return []

    def _lose_engine(self) -> None:
        """Let an engine die from time to time; its groups start again as they were submitted."""
        if self._clock.random() < self._loss:
            lost = self._clock.randrange(len(self._speeds))
            for one in [one for one in self._running.values() if one.engine == lost]:
                self.num_lost += 1
                self._start(one.group)

    def _start(self, group: OpenGroup) -> None:
        empty = Response(
            token_ids=np.zeros(0, dtype=np.int32),
            logprobs=np.zeros(0, dtype=np.float32),
            finish_reason="unfinished",
            text="",
            policy_versions=np.zeros(0, dtype=np.int32),
        )
        responses = list(group.responses) or [empty] * len(group.seeds)
        noise = [
            random.Random(f"{continued_seed(seed, one.token_ids)}/{self.policy_version}")
            for seed, one in zip(group.seeds, responses, strict=True)
        ]
        engine = self._clock.randrange(len(self._speeds))
        self._running[group.key] = _Running(group, self.policy_version, engine, responses, noise)

    def _has_ended(self, one: _Running, place: int) -> bool:
        response, until = one.responses[place], one.group.stop_at_tokens
        is_cut = bool(until) and len(response.token_ids) >= until[place]
        return response.finish_reason != "unfinished" or is_cut

    def _next(self, one: _Running, place: int, response: Response) -> Response:
        one.responses[place] = response
        if self._has_ended(one, place):
            return response
        noise = one.noise[place]
        token, ends = noise.randint(3, 12), noise.randrange(END_SHARE) == 0
        num_tokens = len(response.token_ids) + 1
        limit = one.group.settings.max_tokens
        reason = "length" if num_tokens == limit else "stop" if ends else "unfinished"
        return replace(
            response,
            token_ids=_appended(response.token_ids, token),
            logprobs=_appended(response.logprobs, -noise.random()),
            policy_versions=_appended(response.policy_versions, one.version),
            finish_reason=reason,
            text=response.text + str(token - 3),
        )

    def _report(self, one: _Running) -> OpenGroup:
        return replace(one.group, responses=tuple(one.responses), seconds=0.5)


def _appended(array: np.ndarray, value: float) -> np.ndarray:
    """Return an array with one more value, sooner than np.append."""
    longer = np.empty(len(array) + 1, dtype=array.dtype)
    longer[:-1], longer[-1] = array, value
    return longer


def weights_after(version: int, batch) -> str:
    """Return a fingerprint that depends on the batch, as trained weights do."""
    parts = [
        (
            g.prompt_index,
            g.rewards,
            *(r.token_ids.tobytes() + r.policy_versions.tobytes() for r in g.responses),
        )
        for g in batch.groups
    ]
    return hashlib.sha256(repr((version, parts)).encode()).hexdigest()
