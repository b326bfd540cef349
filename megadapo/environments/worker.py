"""The program of a process that plays episodes, many at a time, of one environment.

It may be run by a Python of the user's: so it needs the standard library alone. Calls are answered
in any order. Coroutines share one event loop; other methods run in threads.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import json
import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from megadapo.environments.environment import (
    Action,
    Environment,
    EnvironmentFailure,
    Task,
    ToolCall,
)
from megadapo.environments.functions import run_in_thread
from megadapo.environments.results import (
    ProtocolViolation,
    read_description,
    read_observation,
    read_state,
)
from megadapo.rewards.workers.worker import (
    MAX_ERROR,
    CannotStart,
    Host,
    describe_error,
    forbid,
    load_object,
    text_of,
)

SECTION = "rollout.environments"
MAX_RESULT_BYTES = 8 << 20
"""Size of a result as JSON, with the state, above which it is refused."""
MAX_THREADS = 128
MAX_STUCK = 8
"""Number of threads that may hang before the process gets no more episodes."""
COROUTINE_CALLS = 4096
"""Number of calls at the same time if `step` is a coroutine."""
CANCEL_S = 1.0
"""Time that a cancelled coroutine may take to end."""
ALARM_S = 10.0
HUNG_S = 60.0
"""Time beyond a call's limit after which a process that answers nothing ends itself."""
_STACK_BYTES = 8 << 20


def main() -> None:
    """Answer the calls of `processes.EnvironmentProcess`, many at a time."""
    host = Host()
    # an event loop opens a pair of sockets
    loop = asyncio.new_event_loop()
    worker = host.begin(partial(_prepare, loop, host))
    threading.Thread(target=_read, args=(host, loop, worker), daemon=True).start()
    loop.create_task(_set_alarms(host.settings["timeout_s"] + HUNG_S))
    loop.run_forever()


def _prepare(loop: asyncio.AbstractEventLoop, host: Host, settings: Mapping[str, Any]) -> Worker:
    forbid(network=not settings["network"], processes=False, section=SECTION)
    sys.addaudithook(_refuse_forks)
    return Worker(loop, load(settings), host)


def load(settings: Mapping[str, Any]) -> type[Environment]:
    """Load a class, and check that it is an environment with these options.

    Raises:
        CannotStart: it cannot be imported, is no environment, or takes other options.
    """
    path, options = settings["path"], settings["options"]
    loaded: type[Environment] = load_object(settings, "class", inspect.isclass)
    if not issubclass(loaded, Environment):
        raise CannotStart(
            f"{path} is not a subclass of megadapo.environments.environment.Environment"
        )
    missing = sorted(getattr(loaded, "__abstractmethods__", ()))
    if settings["recovery"] == "state":
        names = ("state", "restore")
        missing += [name for name in names if getattr(loaded, name) is getattr(Environment, name)]
    if missing:
        needed = ', which recovery = "state" needs' * (missing[0] in ("state", "restore"))
        raise CannotStart(f"{path} has no method {' and no '.join(missing)}{needed}")
    try:
        inspect.signature(loaded).bind(**options)
    except (TypeError, ValueError) as error:
        given = ", ".join(options) or "no options"
        raise CannotStart(f"{path} cannot be created with {given}: {error}") from error
    return loaded


class Worker:
    """The objects of a process and their calls in progress; used by the event loop's thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, loaded: type[Environment], host: Host
    ) -> None:
        self._loop, self._class, self._host = loop, loaded, host
        self._options = host.settings["options"]
        memory_bytes = host.settings["memory_bytes"]
        self._memory_mib = memory_bytes >> 20
        self._has_state = host.settings["recovery"] == "state"
        self._num_threads = max(1, min(MAX_THREADS, memory_bytes // 4 // _STACK_BYTES))
        self._threads = ThreadPoolExecutor(self._num_threads + MAX_STUCK)
        # asyncio.to_thread has few threads otherwise
        loop.set_default_executor(self._threads)
        self._objects: dict[int, Environment] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Calls in progress by their number."""
        self._calling: dict[int, int] = {}
        """Number of running methods by object: those of threads cannot be cancelled."""
        self._unclosed: dict[int, Mapping[str, Any]] = {}
        """Requests to close objects whose method still runs, by object."""
        self._calls: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "describe": self._describe,
            "reset": self._reset,
            "restore": self._restore,
            "step": self._step,
            "close": self._close,
            "cancel": self._cancel,
        }

    def take(self, message: Mapping[str, Any]) -> None:
        """Start to answer a request."""
        task = self._loop.create_task(self._answer(message))
        self._tasks[message["number"]] = task
        task.add_done_callback(lambda _: self._tasks.pop(message["number"], None))

    async def _answer(self, message: Mapping[str, Any]) -> None:
        reply: dict[str, Any]
        try:
            value = await self._calls[message["call"]](message)
            size = len(json.dumps(value))
            if size > MAX_RESULT_BYTES:
                raise ProtocolViolation(
                    f"returned {size:,} bytes of JSON; {MAX_RESULT_BYTES:,} is the limit"
                )
            reply = {"value": value}
        except ProtocolViolation as error:
            reply = {"cause": "wrong result", "error": str(error)}
        except EnvironmentFailure as error:
            text = text_of(error) or "no reason given"
            reply = {"cause": "failure", "error": text[:MAX_ERROR]}
        except MemoryError:
            limit = f"{SECTION}.memory_mib = {self._memory_mib}"
            reply = {"cause": "no capacity", "error": f"out of memory, by {limit}"}
        except BaseException as error:
            # a user's method may raise any exception, and exit; only ours cancels this task
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            text = describe_error(error, MAX_ERROR)
            is_thread = isinstance(error, RuntimeError) and "start new thread" in text
            cause = "no capacity" if is_thread else "exception"
            reply = {"cause": cause, "error": text + _place(error)}
        self._host.send(message["number"], **reply)

    async def _describe(self, message: Mapping[str, Any]) -> Any:
        environment = await self._call(0, self._class, **self._options)
        slots = COROUTINE_CALLS if inspect.iscoroutinefunction(self._class.step) else 0
        try:
            return read_description(environment) | {"slots": slots or self._num_threads}
        finally:
            await self._call(0, environment.close)

    async def _reset(self, message: Mapping[str, Any]) -> Any:
        number = message["object"]
        environment = await self._create(number)
        returned = await self._call(number, environment.reset, Task(**message["task"]))
        observation = None if returned is None else read_observation(returned, "reset")
        return {"observation": observation, "state": await self._state(number)}

    async def _restore(self, message: Mapping[str, Any]) -> Any:
        number, task = message["object"], Task(**message["task"])
        environment = await self._create(number)
        await self._call(number, environment.restore, task, message["state"])

    async def _create(self, number: int) -> Environment:
        environment: Environment = await self._call(number, self._class, **self._options)
        self._objects[number] = environment
        return environment

    async def _step(self, message: Mapping[str, Any]) -> Any:
        number, given = message["object"], message["action"]
        calls = tuple(ToolCall(**call) for call in given["tool_calls"])
        action = Action(**{**given, "tool_calls": calls})
        returned = await self._call(number, self._objects[number].step, action)
        observation = read_observation(returned, "step")
        return {"observation": observation, "state": await self._state(number)}

    async def _state(self, number: int) -> Any:
        if not self._has_state:
            return None
        return read_state(await self._call(number, self._objects[number].state))

    async def _close(self, message: Mapping[str, Any]) -> Any:
        number = message["object"]
        if self._calling.get(number):
            # a method that hangs still uses the object
            self._unclosed[number] = message
        elif (environment := self._objects.pop(number, None)) is not None:
            await self._call(number, environment.close)

    async def _cancel(self, message: Mapping[str, Any]) -> Any:
        """Cancel a call; return whether a method of the object continues, or waits for a thread."""
        task = self._tasks.get(message["cancelled"])
        if task is not None:
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_S)
        return {"is_stuck": bool(self._calling.get(message["object"]))}

    async def _call(
        self, number: int, method: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        """Call a method, and await what it returns if that is a coroutine."""

        def count(change: int) -> None:
            self._calling[number] = self._calling.get(number, 0) + change
            if not self._calling[number]:
                del self._calling[number]
                if (unclosed := self._unclosed.pop(number, None)) is not None:
                    # the host has its reply, and ignores the second one
                    self.take(unclosed)

        def counted(*arguments: Any, **options: Any) -> Any:
            try:
                return method(*arguments, **options)
            finally:
                self._loop.call_soon_threadsafe(count, -1)

        if inspect.iscoroutinefunction(method):
            returned = method(*arguments, **options)
        else:
            count(1)
            returned, error = await run_in_thread(counted, *arguments, **options)
            if error is not None:
                raise error
        if not inspect.isawaitable(returned):
            return returned
        count(1)
        try:
            return await returned
        finally:
            count(-1)


def _place(error: BaseException) -> str:
    """Return the line of a user's file that an exception passed last, in parentheses."""
    others = (str(Path(__file__).resolve().parents[1]), sysconfig.get_path("stdlib"), "<")
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        if not path.startswith(others) and "site-packages" not in path:
            place = f" ({os.path.basename(path)}, line {line})"
    return place


def _read(host: Host, loop: asyncio.AbstractEventLoop, worker: Worker) -> None:
    try:
        for call in host.calls():
            loop.call_soon_threadsafe(worker.take, call)
    finally:
        # the host has ended, or the environment has closed the pipe: so this process ends, and all
        # that the environment has started
        os.killpg(0, signal.SIGKILL)


async def _set_alarms(limit_s: float) -> None:
    """End this process if its threads stop for long, also if the host has ended meanwhile."""
    while True:
        faulthandler.dump_traceback_later(limit_s, exit=True)
        await asyncio.sleep(ALARM_S)


def _refuse_forks(event: str, arguments: tuple[Any, ...]) -> None:
    # a fork inside the event loop would play all episodes a second time
    if event in ("os.fork", "os.forkpty"):
        raise PermissionError('forks; use subprocess, or multiprocessing with the method "spawn"')
