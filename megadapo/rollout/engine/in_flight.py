"""The groups and responses that an engine generates, from vLLM's requests to arrays.

Imports vLLM: only engine.py does so, inside the actor.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase
from vllm.inputs import TokensInput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.output_processor import RequestOutputCollector

from megadapo.algorithm.groups import Branch
from megadapo.data.group import Response
from megadapo.rollout.engine.branching import choose_branches, response_prefix
from megadapo.rollout.engine.episode import EpisodeClient
from megadapo.rollout.engine.episode_response import EpisodeResponse
from megadapo.rollout.engine.response import InFlightResponse
from megadapo.rollout.types import OpenGroup


@dataclass(eq=False, kw_only=True)
class InFlightGroup:
    """A group in flight, with everything that its responses share."""

    request: OpenGroup
    policy_version: int
    add_request: Callable[
        [InFlightGroup, TokensInput, SamplingParams], Awaitable[RequestOutputCollector]
    ]
    """Function that submits a request of the group to vLLM."""
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    returns_experts: bool
    """Whether the engine returns the experts of each token."""
    episodes: EpisodeClient | None = None
    """The host of the environments, if the group has one."""
    responses: list[InFlightResponse] = field(default_factory=list)
    """One response per seed; branches are added later."""
    num_slots: int = field(init=False)
    """Number of responses that may still run at the same time."""
    num_running: int = 0
    is_stopped: bool = False
    submitted: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.num_slots = self.request.num_at_once

    @property
    def num_tokens(self) -> int:
        """Number of tokens that finished requests have generated."""
        return sum(response.num_generated for response in self.responses)

    @property
    def collectors(self) -> list[RequestOutputCollector]:
        """The vLLM requests of the group that are running."""
        return [one.collector for one in self.responses if one.collector is not None]

    @property
    def num_waiting(self) -> int:
        """Number of responses that wait for their environment."""
        return sum(isinstance(one, EpisodeResponse) and one.is_waiting for one in self.responses)

    def stop(self) -> None:
        """Submit no further requests."""
        self.is_stopped = True
        for response in self.responses:
            response.stop()

    def drop(self) -> None:
        """End the episodes of responses that are not wanted any more."""
        for response in self.responses:
            if isinstance(response, EpisodeResponse):
                response.drop()

    async def start(self) -> None:
        """Submit the first responses: new ones, or the rest of stopped ones."""
        request = self.request
        prefixes = request.responses or (None,) * len(request.seeds)
        assert len(prefixes) == len(request.seeds), "one response per seed"
        if request.until:
            assert len(request.until) == len(request.seeds), "one limit per seed"
            assert not request.settings.branching.is_on, "a branch needs its parent's end"
        for prefix in prefixes[: request.num_at_once]:
            await self._add(prefix)

    async def add_branches(self, branches: Sequence[Branch | None]) -> None:
        """Submit further responses; None: a response that starts at the prompt."""
        for branch in branches:
            prefix = None
            if branch is not None:
                parent = self.responses[branch.parent].response()
                num_prompt = len(self.request.prompt_ids)
                prefix = response_prefix(parent, branch.num_tokens, num_prompt=num_prompt)
            await self._add(prefix, branch)

    def next_branches(self, num_seen: int) -> list[Branch | None]:
        """Return where the next responses start, None for the prompt; empty if it is complete.

        An earlier call has considered the first `num_seen` responses.
        """
        request = self.request
        num_left = len(request.seeds) - len(self.responses)
        if self.is_stopped or not num_left:
            return []
        branches = choose_branches(
            [response.response() for response in self.responses],
            request.seeds,
            request.settings.branching,
            num_seen=num_seen,
            num_left=num_left,
        )
        return [*branches] or [None] * num_left

    async def _add(self, prefix: Response | None, branch: Branch | None = None) -> None:
        number, request = len(self.responses), self.request
        until = request.until[number] if request.until else None
        kind = InFlightResponse if request.episode is None else EpisodeResponse
        self.responses.append(kind(self, request.seeds[number], prefix, branch=branch, until=until))
        await self.responses[-1].submit()
