"""The environment "verifiers": a task of a verifiers taskset (made for verifiers 0.4.0).

A harness of verifiers owns the conversation and calls a model. Its calls arrive here over HTTP as
token ids, and the engine samples their answers. So an observation is what the next call appends to
the sampled tokens. An action is the answer to the call before. The
endpoint of these calls has the routes of a vLLM server that verifiers' train client uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import resource
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megadapo.environments.environment import (
    Action,
    Environment,
    EnvironmentFailure,
    Observation,
    Task,
)

TASK = "task"
"""Column of a prompt's extra_info with the data of its task."""
RENDERER = "megadapo.environments.adapters.verifiers_renderer:ChatTemplateRenderer"
_CONTEXT = 8
"""Tokens that are shown around a difference."""
MAX_BODY_BYTES = 16 << 20
"""Size of a model call; a million token ids have 7 MB."""
MAX_WAITING = 4096
"""Connections that may wait to be accepted; all responses of a step may begin at once."""
_BODY = {"model", "token_ids", "sampling_params", "cache_salt", "priority"}
_PARAMS = {"stop_token_ids", "logprobs", "skip_special_tokens", "routed_experts_prompt_start"}


class Verifiers(Environment):
    """An episode of a verifiers environment, which needs `network = true`.

    Args:
        env: settings of the environment, as in the table `env` of a verifiers config.
        model: folder or name of the model, whose tokenizer renders the conversation.
        renderer: settings of one of verifiers' renderers, which is named. Without a name they are
            those of `ChatTemplateRenderer`, such as {tool_parser = "qwen3"}.
        tools: JSON schemas of the harness' tools that the chat template shows in the prompt.
    """

    uses_tokens = True

    def __init__(
        self,
        *,
        env: Mapping[str, Any],
        model: str,
        renderer: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.tools = tuple(tools)
        self._server = _Server.shared(env, model, renderer)
        self._inbox: asyncio.Queue[ModelCall | asyncio.Task[Any]] = asyncio.Queue()
        self._run: asyncio.Task[Any] | None = None
        self._call: ModelCall | None = None
        """The call that the next action answers."""
        self._known: list[int] = []
        """The prompt and all tokens since then."""
        self._num_calls = 0

    async def reset(self, task: Task) -> Observation | None:
        if TASK not in task.extra_info:
            raise ValueError(
                f"the prompt has no column extra_info.{TASK}: write the prompts of the taskset "
                "with examples/verifiers/prepare.py"
            )
        self._known = list(task.prompt_ids)
        await self._server.start()
        self._run = asyncio.create_task(self._server.play(task.extra_info[TASK], self._inbox))
        self._run.add_done_callback(self._inbox.put_nowait)
        observation = await self._observe()
        if observation.done:
            raise ValueError("the harness ended without a call of the model")
        return observation if observation.token_ids else None

    async def step(self, action: Action) -> Observation:
        assert self._call is not None, "an action follows a call"
        missed = set(self._call.stop_ids).intersection(action.token_ids[:-1])
        if missed:
            raise EnvironmentFailure(
                f"the renderer ends a turn at token {min(missed)}, and the engine does not: add it "
                "to eos_token_id in the model's generation_config.json"
            )
        self._known += action.token_ids
        self._call.answer.set_result(action)
        return await self._observe()

    async def close(self) -> None:
        if self._run is not None:
            self._run.remove_done_callback(self._inbox.put_nowait)
            self._run.cancel()
            # verifiers stops what the episode has started
            await asyncio.wait([self._run])
        calls = [self._call, *(self._inbox.get_nowait() for _ in range(self._inbox.qsize()))]
        for call in calls:
            if isinstance(call, ModelCall):
                call.answer.cancel()

    async def _observe(self) -> Observation:
        """Wait for the next call or the end of the episode.

        Raises:
            EnvironmentFailure: the call does not continue the tokens so far, or verifiers failed.
            ValueError: the call is not as the prompt or the settings of the run demand.
        """
        arrived = await self._inbox.get()
        if not isinstance(arrived, ModelCall):
            return _end(arrived.result())
        self._call = arrived
        self._num_calls += 1
        if arrived.unused:
            raise ValueError(
                f"the option env sets {', '.join(arrived.unused)} of model calls, which is not "
                "used: set them in [sampling] and [rollout] instead"
            )
        num_known = len(self._known)
        if arrived.token_ids[:num_known] != self._known:
            # a failure of reset is tried again, in case that a server is away
            mistake = ValueError if self._num_calls == 1 else EnvironmentFailure
            raise mistake(self._difference(arrived.token_ids))
        added = arrived.token_ids[num_known:]
        self._known += added
        return Observation(token_ids=added)

    def _difference(self, token_ids: Sequence[int]) -> str:
        pairs = enumerate(zip(token_ids, self._known, strict=False))
        at = next((at for at, (one, other) in pairs if one != other), len(token_ids))
        given, known = (
            self._server.decode(ids[max(0, at - _CONTEXT) : at + _CONTEXT])
            for ids in (token_ids, self._known)
        )
        where = f"from token {at} on: {given!r:.40} there, {known!r:.40} here"
        if self._num_calls == 1:
            return (
                f"the harness begins with another prompt {where}; write what it sends, such as "
                "its system prompt, into the prompts, and its tools into the option tools"
            )
        return (
            f"call {self._num_calls} of the harness does not continue the sampled tokens {where}; "
            "the harness must not change the conversation, and a renderer with a name needs "
            'thinking_retention = "all"'
        )


class _Server:
    """A verifiers environment and the endpoint of its model calls, which episodes share."""

    _servers: ClassVar[dict[str, _Server]] = {}
    _creating: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self, env: Mapping[str, Any], model: str, renderer: Mapping[str, Any] | None
    ) -> None:
        try:
            vf = importlib.import_module("verifiers.v1")
            renderers = importlib.import_module("renderers.base")
        except ImportError as error:
            raise RuntimeError(
                f"verifiers cannot be imported ({error}): install verifiers, and set "
                "rollout.environments.python to the Python that has it"
            ) from error
        self._env = vf.load_environment(vf.resolve_env_config(dict(env)))
        self._tokenizer = renderers.load_tokenizer(model)
        # bound before the event loop, so that a missing network = true is noticed before the run
        self._socket = socket.create_server(("127.0.0.1", 0))
        # an episode has four sockets: a call to verifiers' own server, and one from there to here
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        # other users of the machine cannot guess it
        self._path = f"/{secrets.token_urlsafe(24)}"
        self._inboxes: dict[str, asyncio.Queue[Any]] = {}
        """Receivers of model calls by session."""
        settings = dict(renderer or {})
        if "name" not in settings:
            settings |= {"name": "custom", "import_path": RENDERER}
        client = vf.TrainClientConfig(
            base_url=f"http://127.0.0.1:{self._socket.getsockname()[1]}{self._path}/v1",
            renderer=settings,
            renderer_model_name=model,
            # the endpoint is in this process, so a connection that takes long is no outage
            timeout={"connect": None},
        )
        self._context = vf.ModelContext(model=model, client=client)
        self._starting = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()
        self._is_started = False

    @classmethod
    def shared(cls, *settings: Any) -> _Server:
        """Return the one server of a process with these settings."""
        with cls._creating:
            key = json.dumps(settings, sort_keys=True)
            if key not in cls._servers:
                cls._servers[key] = cls(*settings)
            return cls._servers[key]

    async def start(self) -> None:
        """Start the endpoint and what episodes share in verifiers; they end with the process."""
        async with self._starting:
            if not self._is_started:
                await self._stack.enter_async_context(self._env.serving())
                await self._serve_calls()
                self._is_started = True

    async def play(self, data: Mapping[str, Any], inbox: asyncio.Queue[Any]) -> Any:
        """Play a task, whose model calls arrive in `inbox`; return verifiers' episode."""
        task_class = type(self._env.taskset).task_type()
        task = task_class(
            task_class.data_type().model_validate(data), self._env.config.taskset.task
        )
        sessions: list[str] = []

        def begin(trace: Any) -> None:
            sessions.append(trace.id)
            self._inboxes[trace.id] = inbox

        try:
            return await self._env.run_episode(task, self._context, on_trace=begin)
        finally:
            for session in sessions:
                del self._inboxes[session]

    async def _serve_calls(self) -> None:
        """Serve the routes of a vLLM server that verifiers' train client calls."""
        web = importlib.import_module("aiohttp.web")

        async def generate(request: Any) -> Any:
            inbox = self._inboxes.get(request.headers.get("X-Session-ID", ""))
            if inbox is None:
                return web.json_response({"error": "no such episode"}, status=404)
            try:
                call = ModelCall.of(await request.json())
            except (ConnectionError, KeyError, TypeError, ValueError) as error:
                # an episode that is closed breaks its connections
                return web.json_response({"error": f"no model call: {error!r}"}, status=400)
            inbox.put_nowait(call)
            reply = web.json_response(_reply(await call.answer))
            # a client in a busy process may close a connection that it has just used again
            reply.force_close()
            return reply

        async def models(request: Any) -> Any:
            # max_model_len is left out, as the engine limits the tokens
            return web.json_response({"object": "list", "data": []})

        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post(f"{self._path}/inference/v1/generate", generate)
        app.router.add_get(f"{self._path}/v1/models", models)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.SockSite(runner, self._socket, backlog=MAX_WAITING).start()

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids)))


def _end(episode: Any) -> Observation:
    """Return the rewards and metrics of an episode that has ended.

    Raises:
        EnvironmentFailure: something in verifiers failed.
    """
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        found = errors[-1] if errors else None
        raise EnvironmentFailure(f"{found.type}: {found.message}" if found else "no reason given")
    called = [trace for trace in episode.traces if trace.num_turns]
    metrics: dict[str, float] = {}
    for trace in called:
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing:
            raise EnvironmentFailure(f"no reward {missing[0]}: {trace.stop_condition}")
        metrics |= {name: reward.score for name, reward in trace.rewards.items()}
        metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
    return Observation(reward=sum(trace.reward for trace in called), done=True, metrics=metrics)


@dataclass
class ModelCall:
    """A call of the model that waits for its answer."""

    token_ids: list[int]
    stop_ids: Sequence[int]
    """Tokens that end a turn for the renderer."""
    unused: Sequence[str]
    """Settings of the call that an engine takes from the config of the run, or does not have."""
    answer: asyncio.Future[Action]

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> ModelCall:
        params = body["sampling_params"]
        unused = sorted({*params} - _PARAMS | {*body} - _BODY)
        answer = asyncio.get_running_loop().create_future()
        return cls(list(body["token_ids"]), params["stop_token_ids"], unused, answer)


def _reply(action: Action) -> dict[str, Any]:
    """Return the engine's reply to a model call. Turns that are cut off are no actions."""
    content = [
        {"token": f"token_id:{one}", "logprob": logprob}
        for one, logprob in zip(action.token_ids, action.logprobs, strict=True)
    ]
    choice = {"index": 0, "token_ids": list(action.token_ids), "finish_reason": "stop"}
    return {"choices": [{**choice, "logprobs": {"content": content}}]}
