"""The processes of one environment: started, called, and replaced when they are lost.

Everything here belongs to one event loop. Each process plays many episodes; an episode's object
stays in one process.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.worker import MAX_RESULT_BYTES, MAX_STUCK
from megadapo.rewards.workers.by_value import pickle_of
from megadapo.rewards.workers.processes import LOST, CallError, Program, TimeLimit, WorkerProcess

PING_S = 10.0
"""Time in which a process must answer after a call has missed its limit."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 60.0
"""Pauses before further starts; each is twice the one before."""


class EnvironmentProcess(WorkerProcess):
    """A process that plays episodes of one environment."""

    def __init__(self, program: Program, num_slots: int) -> None:
        super().__init__(program)
        self.objects: set[int] = set()
        """Numbers of the objects in it."""
        self.num_stuck = 0
        """Calls that missed their limit and still occupy a thread."""
        self.slots = asyncio.Semaphore(num_slots)
        """Calls that it makes at the same time; more would wait within their time limit."""

    async def _give_up(self, message: Mapping[str, Any]) -> None:
        """Cancel a call that missed its limit; end the process if it does not answer."""
        if message["call"] == "cancel":
            await self.end("it answered nothing after a call had missed its limit")
            return
        cancelled = {"cancelled": message["number"], "object": message.get("object", 0)}
        with suppress(CallError):
            state = await self.call("cancel", TimeLimit(PING_S), **cancelled)
            self.num_stuck += state["is_stuck"]

    async def release(self, number: int) -> None:
        """Close an object and free its place; a failure of `close` is ignored."""
        self.objects.discard(number)
        with suppress(CallError):
            limit = TimeLimit(self._program.settings["timeout_s"])
            await self.call("close", limit, object=number)
        if self.num_stuck >= MAX_STUCK and not self.objects:
            await self.end("was replaced")


def _program(config: EnvironmentConfig, log_path: Path | None) -> Program:
    variables = {name: os.environ[name] for name in config.variables if name in os.environ}
    if config.python is not None:
        # its packages are those of its own Python
        paths = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        path = os.pathsep.join(os.path.abspath(path) for path in paths if path)
        variables = {"PYTHONPATH": path, **variables}
    return Program(
        module="megadapo.environments.worker",
        memory_bytes=config.memory_mib << 20,
        output_bytes=None,
        max_reply_bytes=2 * MAX_RESULT_BYTES,
        settings={
            "path": config.path,
            "pickle": pickle_of(config.path, "environment"),
            "options": config.options,
            "recovery": config.recovery,
            "network": config.network,
            "timeout_s": config.timeout_s,
        },
        variables={"PYTHONUNBUFFERED": "1", "MALLOC_ARENA_MAX": "2", **variables},
        python=config.python,
        folder=None,
        log_path=log_path,
    )


@dataclass(frozen=True)
class EnvironmentDescription:
    """An environment as prompts and sampling need to know it."""

    label: str
    """Its name in metrics."""
    tools: tuple[dict[str, Any], ...]
    """JSON schemas of its tools, for the chat template."""
    stop: tuple[str, ...]
    """Texts that end an action in the middle of a turn."""
    output: str
    """Frame of texts within the model's turn; see `Environment.output`."""
    uses_tokens: bool = False
    """Whether tasks and actions have token ids."""


class EnvironmentProcesses:
    """All processes of one entry of rollout.environments."""

    def __init__(self, config: EnvironmentConfig, log_folder: Path | None = None) -> None:
        self._config = config
        log_path = log_folder and log_folder / f"environment-{config.label}.log"
        self._program = _program(config, log_path)
        self._num_slots = 1
        self._places: list[EnvironmentProcess | None] = [None] * config.num_workers
        self._locks = [asyncio.Lock() for _ in self._places]
        self._started: list[EnvironmentProcess] = []
        self._num_objects = 0
        self.warnings: list[str] = []
        """Lost processes, and starts that failed."""
        self._num_failures = 0
        """Starts that failed since the last one that did not."""
        self._next_start = 0.0
        """Time before which no process is started."""
        self._refusal = ""
        """Reason of the last failed start."""
        self._stopping = asyncio.Event()

    async def start(self) -> EnvironmentDescription:
        """Start all processes and return what the environment says of itself.

        Raises:
            CallError: it cannot start or be created.
        """
        # the first one alone: a wrong environment is noticed once
        first = await self._process(0)
        try:
            described = await first.call("describe", TimeLimit(self._config.timeout_s))
        except CallError as error:
            raise CallError("cannot start", f"cannot be created: {error.details}") from error
        self._num_slots = described["slots"]
        first.slots = asyncio.Semaphore(self._num_slots)
        await asyncio.gather(*(self._process(place) for place in range(1, len(self._places))))
        return EnvironmentDescription(
            self._config.label,
            tuple(described["tools"]),
            tuple(described["stop"]),
            described["output"],
            described["uses_tokens"],
        )

    async def new_object(self) -> tuple[EnvironmentProcess, int]:
        """Return the process with the fewest objects, and the number of a new one in it."""
        # the others play while one cannot be started
        without_process = math.inf if time.monotonic() < self._next_start else 0

        def load(place: int) -> float:
            process = self._places[place]
            return len(process.objects) if process and process.is_alive else without_process

        process = await self._process(min(range(len(self._places)), key=load))
        self._num_objects += 1
        process.objects.add(self._num_objects)
        return process, self._num_objects

    async def stop(self) -> None:
        """Kill all processes."""
        self._stopping.set()
        await asyncio.gather(*(process.end("was stopped") for process in self._started))

    @property
    def process_ids(self) -> list[int]:
        """Pids of the processes that run."""
        return [
            process.process_id
            for process in self._places
            if process is not None and process.is_alive
        ]

    async def _process(self, place: int) -> EnvironmentProcess:
        """Return the process of a place; start one unless it can take an object."""
        num_failures = self._num_failures
        async with self._locks[place]:
            process = self._places[place]
            if process is not None and process.num_stuck >= MAX_STUCK:
                # with its last object, if it has any
                if not process.objects:
                    await process.end("was replaced")
            elif process is not None and process.is_alive:
                return process
            elif process is not None:
                self.warnings.append(f"environment {self._config.label}: {LOST}: {process.lost}")
            self._places[place] = None
            # callers that waited for a failed start fail with it
            if self._num_failures > num_failures:
                raise CallError(LOST, self._refusal)
            with suppress(TimeoutError):
                pause_s = self._next_start - time.monotonic()
                await asyncio.wait_for(self._stopping.wait(), pause_s)
            if self._stopping.is_set():
                raise CallError(LOST, "the environments have been stopped")
            process = EnvironmentProcess(self._program, self._num_slots)
            self._places[place] = process
            self._started = [one for one in self._started if not one.lost] + [process]
            try:
                await process.start()
            except CallError as error:
                # this one needs no warning
                self._places[place] = None
                raise self._failed(error) from error
            self._num_failures, self._next_start = 0, 0.0
            return process

    def _failed(self, error: CallError) -> CallError:
        """Begin a pause after a failed start, and return its error."""
        if "nknown option: -P" in error.details:
            problem = f"{self._config.python} is older than Python 3.11"
            error = CallError("cannot start", problem)
        self._num_failures += 1
        self._refusal = error.details
        pause_s = FIRST_PAUSE_S * 2 ** min(self._num_failures - 1, 10)
        self._next_start = time.monotonic() + min(pause_s, LONGEST_PAUSE_S)
        if self._num_failures == 1:
            label = self._config.label
            self.warnings.append(f"environment {label}: {error}; trying again with pauses")
        return error
