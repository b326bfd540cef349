"""The environment "tools": several tools in one episode, each an environment of its own."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megadapo.environments.adapters import BUILT_IN
from megadapo.environments.adapters.calls import Tool
from megadapo.environments.environment import Action, Environment, Observation, Task
from megadapo.environments.functions import observe, run_in_thread
from megadapo.environments.results import ProtocolViolation


class Toolbox(Environment):
    """Several tools. A turn goes to the one whose stop text ended it, or that it calls.

    Args:
        tools: options of each tool, by the name of a built-in environment or "MODULE:CLASS".

    Raises:
        ValueError: two tools have the same stop text or the same name.
    """

    def __init__(self, **tools: Mapping[str, Any]) -> None:
        self._members = {
            name: _load(BUILT_IN.get(name, name))(**options) for name, options in tools.items()
        }
        members = self._members.items()
        self.stop: Sequence[str] = [stop for _, member in members for stop in member.stop]
        self.tools = [tool for _, member in members for tool in member.tools]
        self._by_stop = {stop: name for name, member in members for stop in member.stop}
        self._by_call = {
            tool["function"]["name"]: name for name, member in members for tool in member.tools
        }
        if len(self._by_stop) < len(self.stop) or len(self._by_call) < len(self.tools):
            raise ValueError(
                f"two of the tools {', '.join(tools)} have the same stop text or the same name"
            )

    async def reset(self, task: Task) -> Observation | None:
        """Begin the episode; return the first observations of all tools as one."""
        found = [
            _named(name, observed)
            for name, one in self._members.items()
            if (observed := await _call(one.reset, task)) is not None
        ]
        return _joined(found) if found else None

    def step(self, action: Action) -> Awaitable[Observation]:
        """Answer a call by text, or all tool calls in order; other turns end the episode."""
        # no coroutine function, of which a process runs more at a time than it has threads: calls
        # would wait for a thread within their time limit
        return self._step(action)

    async def _step(self, action: Action) -> Observation:
        for member in self._members.values():
            if isinstance(member, Tool):
                member.begin_turn()
        ends = {
            stop: action.text.rfind(stop) + len(stop) for stop in self.stop if stop in action.text
        }
        if ends:
            # the last one, and of several the longest, as a stop text may be the end of another
            stop = max(ends, key=lambda one: (ends[one], len(one)))
            return await self._ask(self._by_stop[stop], action)
        if action.problem:
            return observe([f"Error: {action.problem}"])
        if not action.tool_calls:
            return Observation(done=True)
        observed = [
            await self._ask(self._by_call[call.name], Action(text=action.text, tool_calls=[call]))
            if call.name in self._by_call
            else observe(
                [
                    f"Error: there is no tool {json.dumps(call.name)}; "
                    f"the tools are {', '.join(self._by_call)}"
                ]
            )
            for call in action.tool_calls
        ]
        return _joined(observed)

    async def close(self) -> None:
        async with contextlib.AsyncExitStack() as closing:
            # all of them, also if one fails
            for member in self._members.values():
                closing.push_async_callback(_call, member.close)

    async def _ask(self, name: str, action: Action) -> Observation:
        one = self._members[name]
        found = await _call(one.answer if isinstance(one, Tool) else one.step, action)
        return _named(name, found)


def _named(tool: str, found: Observation) -> Observation:
    """Return an observation of a tool, with its name before the name of each metric."""
    metrics = {f"{tool}/{metric}": value for metric, value in found.metrics.items()}
    return replace(found, metrics=metrics)


def _joined(observed: Sequence[Observation]) -> Observation:
    """Return the observations of several tools or calls as one.

    Raises:
        ProtocolViolation: one has no messages, but text or token ids.
    """
    if any(one.text is not None or one.token_ids is not None for one in observed):
        raise ProtocolViolation(
            "returned text or token_ids, which cannot be joined; return messages"
        )
    metrics: dict[str, float] = {}
    for one in observed:
        for name, value in one.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value
    return Observation(
        messages=[message for one in observed for message in one.messages],
        reward=sum(one.reward for one in observed),
        done=any(one.done for one in observed),
        metrics=metrics,
    )


def _load(path: str) -> type[Environment]:
    module, _, name = path.partition(":")
    found: type[Environment] = getattr(importlib.import_module(module), name)
    return found


async def _call(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method, in a thread if it is no coroutine; await what it returns if that is one."""
    if inspect.iscoroutinefunction(method):
        returned = method(*arguments)
    else:
        running = run_in_thread(method, *arguments)
        try:
            returned, error = await asyncio.shield(running)
        finally:
            # a thread cannot be cancelled, and the tool is in use until it ends
            await asyncio.wait([running])
        if error is not None:
            raise error
    return await returned if inspect.isawaitable(returned) else returned
