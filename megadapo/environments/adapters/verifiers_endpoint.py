"""The endpoint at which a harness of verifiers finds the model: one call is one turn.

It has the routes of a vLLM server that verifiers' train client uses.
"""

from __future__ import annotations

import asyncio
import importlib
import resource
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megadapo.environments.environment import Action

MAX_BODY_BYTES = 16 << 20
"""Size of a model call; a million token ids have 7 MB."""
MAX_WAITING = 4096
"""Connections that may wait to be accepted; all responses of a step may begin at once."""
_BODY = {"model", "token_ids", "sampling_params", "cache_salt", "priority"}
_PARAMS = {"stop_token_ids", "logprobs", "skip_special_tokens", "routed_experts_prompt_start"}


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


class Endpoint:
    """The routes of a vLLM server that verifiers' train client calls, on the loopback interface."""

    def __init__(self) -> None:
        # bound before the event loop, so that a missing network = true is noticed before the run
        self._socket = socket.create_server(("127.0.0.1", 0))
        # an episode has four sockets: a call to verifiers' own server, and one from there to here
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        # other users of the machine cannot guess it
        self._path = f"/{secrets.token_urlsafe(24)}"
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}{self._path}/v1"
        self.inboxes: dict[str, asyncio.Queue[Any]] = {}
        """Receivers of calls by session."""

    async def start(self) -> None:
        web = importlib.import_module("aiohttp.web")

        async def generate(request: Any) -> Any:
            inbox = self.inboxes.get(request.headers.get("X-Session-ID", ""))
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


def _reply(action: Action) -> dict[str, Any]:
    """Return the engine's reply to a model call. Turns that are cut off are no actions."""
    content = [
        {"token": f"token_id:{one}", "logprob": logprob}
        for one, logprob in zip(action.token_ids, action.logprobs, strict=True)
    ]
    choice = {"index": 0, "token_ids": list(action.token_ids), "finish_reason": "stop"}
    return {"choices": [{**choice, "logprobs": {"content": content}}]}
