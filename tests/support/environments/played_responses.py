"""Responses that a real host of environments plays, with tokens that a test chooses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.environment import Task
from megadapo.environments.processes import EnvironmentDescription
from megadapo.rollout.episodes.host import EpisodeHost
from megadapo.rollout.types import EpisodeRequest, OpenGroup, SamplingSettings

TASK = Task(id="7", messages=[{"role": "user", "content": "play"}], seed=3)


class Policy:
    """Gives each request the next text, closed as a turn, or cut at a stop text or the limit.

    `abort`: number of a request that is stopped before its last token. The experts of each token
    are its position and the number of the request that read it.
    """

    def __init__(self, tokenizer, *texts, end="<|im_end|>", abort=-1):
        self._tokenizer, self._texts, self._end, self._abort = tokenizer, texts, end, abort
        self.prompts: list[list[int]] = []
        self.limits: list[int] = []

    async def add_request(self, group, prompt, params):
        from vllm.outputs import CompletionOutput, RequestOutput
        from vllm.v1.engine.output_processor import RequestOutputCollector

        number = len(self.prompts)
        self.prompts.append(prompt["prompt_token_ids"])
        self.limits.append(params.max_tokens)
        text, reason, stopped_by = self._texts[number], "stop", None
        ends = {text.find(one) + len(one): one for one in params.stop or () if one in text}
        if ends:
            text, stopped_by = text[: min(ends)], ends[min(ends)]
        ids = self._tokenizer.encode(text + self._end * (not ends), add_special_tokens=False)
        if len(ids) > params.max_tokens:
            ids, reason = ids[: params.max_tokens], "length"
        if number == self._abort:
            ids, reason = ids[:-1], "abort"
        read = np.arange(params.routed_experts_prompt_start or 0, len(self.prompts[-1] + ids) - 1)
        completion = CompletionOutput(
            index=0,
            text="",
            token_ids=ids,
            cumulative_logprob=None,
            logprobs=None,
            routed_experts=np.stack([read, np.full_like(read, number)], axis=1)[:, None],
            finish_reason=reason,
            stop_reason=stopped_by or ids[-1],
        )
        collector = RequestOutputCollector(params.output_kind, str(number))
        collector.put(RequestOutput("", None, None, None, [completion], finished=True))
        return collector


class Play:
    """One host, and responses of engines that use it."""

    def __init__(
        self,
        tmp_path: Path,
        tokenizer,
        *,
        max_turns=8,
        max_turn_tokens=None,
        parser=None,
        recovery="once",
        game="Count",
        **options,
    ):
        self.log = tmp_path / "actions"
        self.log.touch()
        self.tokenizer = tokenizer
        self.config = EnvironmentConfig(
            environment=f"tests.support.environments.games:{game}",
            options={"log": str(self.log), **options},
            recovery=recovery,
            max_turns=max_turns,
            max_turn_tokens=max_turn_tokens,
            max_observation_tokens=50,
            tool_parser=parser,
        )
        described = EnvironmentDescription(
            game,
            tools=(),
            stop=("stop",) if "in_turn" in options else (),
            output=options.get("frame", "{}"),
            uses_tokens=game == "Tokens",
        )
        self.request = EpisodeRequest(
            environment=0, config=self.config, description=described, task=TASK
        )
        self.host = EpisodeHost([self.config], tmp_path / "journal")
        self.closes = False

    async def __aenter__(self):
        await self.host.start()
        self.host.begin(1, "weights")
        return self

    async def __aexit__(self, *error):
        await self.host.stop()

    def close(self, names):
        """Close episodes if the test wants it, as engines do in a task of the host's loop."""
        if self.closes:
            asyncio.ensure_future(self.host.close(names))

    @property
    def actions(self):
        return [eval(line) for line in self.log.read_text().splitlines()]

    def response(
        self, policy, *, seed=5, begun=None, version=1, max_tokens=400, until=None, branch=None
    ):
        from megadapo.rollout.engine.episode import EpisodeResponse, EpisodeTexts
        from megadapo.rollout.engine.in_flight import InFlightGroup

        remote = {
            name: SimpleNamespace(remote=getattr(self.host, name)) for name in ("open", "step")
        }
        closed = SimpleNamespace(remote=self.close)
        end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        settings = SamplingSettings(
            temperature=1.0, top_p=1.0, max_tokens=max_tokens, stop_ids=(end,)
        )
        group = InFlightGroup(
            request=OpenGroup(
                key=0, prompt_ids=(1, 2), seeds=(5, seed), settings=settings, episode=self.request
            ),
            policy_version=version,
            add_request=policy.add_request,
            tokenizer=self.tokenizer,
            vocab_size=50,
            returns_experts=True,
        )
        return EpisodeResponse(
            group,
            seed,
            begun,
            stop_at=until,
            branch=branch,
            host=SimpleNamespace(**remote, close=closed),
            texts=EpisodeTexts(self.tokenizer),
        )

    async def finish(self, policy, **given):
        one = self.response(policy, **given)
        await asyncio.wait_for(one.finish(), 20)
        return one.response()


def call_of(arguments, name="f"):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def user_turn(text):
    return f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
