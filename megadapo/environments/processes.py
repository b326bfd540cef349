"""The processes of one environment: started, called, and replaced when they are lost.

Everything here belongs to one event loop. Each process plays many episodes; an episode's object
stays in one process.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.process import LOST, CallError, EnvironmentProcess
from megadapo.environments.worker import MAX_STUCK

MAX_FAILED_STARTS = 3
"""Failed starts in a row, without a pause, after which there are pauses between them."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 60.0
"""Pauses before further starts; each is twice the one before."""


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


class EnvironmentSlot:
    """A slot of a worker process, which one object of the environment has until it is released."""

    def __init__(self, process: EnvironmentProcess, number: int, timeout_s: float) -> None:
        self._process, self._number, self._timeout_s = process, number, timeout_s
        process.objects.add(number)
        self.seconds = 0.0
        """Time of the last call."""

    @property
    def is_alive(self) -> bool:
        """Whether its process still runs."""
        return self._process.is_alive

    async def call(self, name: str, **arguments: Any) -> Any:
        """Call a method of the object; raises what `EnvironmentProcess.call` raises."""
        async with self._process.slots:
            start = time.monotonic()
            try:
                return await self._process.call(
                    name, self._timeout_s, object=self._number, **arguments
                )
            finally:
                self.seconds = time.monotonic() - start

    async def release(self) -> None:
        """Close the object and free its slot; a failure of `close` is ignored."""
        if self._number not in self._process.objects:
            return
        self._process.objects.discard(self._number)
        with suppress(CallError):
            await self._process.call("close", self._timeout_s, object=self._number)
        if self._process.is_retired and not self._process.objects:
            await self._process.end("was replaced")


class EnvironmentProcesses:
    """All processes of one entry of rollout.environments."""

    def __init__(self, config: EnvironmentConfig, log_folder: Path | None = None) -> None:
        self._config = config
        self._log_path = log_folder and log_folder / f"environment-{config.label}.log"
        self._places: list[EnvironmentProcess | None] = [None] * config.num_workers
        self._locks = [asyncio.Lock() for _ in self._places]
        self._retired: list[EnvironmentProcess] = []
        self._num_objects = 0
        self.warnings: list[str] = []
        """Lost processes, and starts that failed."""
        self._num_failed_starts = 0
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
            described = await first.call("describe", self._config.timeout_s)
        except CallError as error:
            raise CallError("cannot start", f"cannot be created: {error.details}") from error
        await asyncio.gather(*(self._process(place) for place in range(1, len(self._places))))
        return EnvironmentDescription(
            self._config.label,
            tuple(described["tools"]),
            tuple(described["stop"]),
            described["output"],
            described["uses_tokens"],
        )

    async def new_slot(self) -> EnvironmentSlot:
        """Return a slot for a new object, in the process with the fewest."""
        # the others play while one cannot be started
        without_process = math.inf if time.monotonic() < self._next_start else 0

        def load(place: int) -> float:
            process = self._places[place]
            return len(process.objects) if process and process.is_alive else without_process

        process = await self._process(min(range(len(self._places)), key=load))
        self._num_objects += 1
        return EnvironmentSlot(process, self._num_objects, self._config.timeout_s)

    async def stop(self) -> None:
        """Kill all processes."""
        self._stopping.set()
        running = [*self._retired, *filter(None, self._places)]
        await asyncio.gather(*(process.end("was stopped") for process in running))

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
        num_failed_before = self._num_failed_starts
        async with self._locks[place]:
            process = self._places[place]
            if process is not None and process.num_stuck >= MAX_STUCK:
                process.is_retired = True
                if process.objects:
                    self._retired = [process for process in self._retired if process.is_alive] + [
                        process
                    ]
                else:
                    await process.end("was replaced")
            elif process is not None and process.is_alive:
                return process
            elif process is not None:
                self.warnings.append(f"environment {self._config.label}: {process.lost}")
            self._places[place] = None
            while not self._stopping.is_set():
                # callers that waited for a failed start fail with it
                is_outage = self._num_failed_starts >= MAX_FAILED_STARTS
                if is_outage and self._num_failed_starts > num_failed_before:
                    raise CallError(LOST, self._refusal)
                with suppress(TimeoutError):
                    pause_s = self._next_start - time.monotonic()
                    await asyncio.wait_for(self._stopping.wait(), pause_s)
                    break
                process = self._places[place] = EnvironmentProcess(self._config, self._log_path)
                try:
                    await process.start()
                except CallError as error:
                    # this one needs no warning
                    self._places[place] = None
                    self._note_failed_start(error)
                    if error.cause == LOST:
                        continue
                    raise
                self._num_failed_starts, self._next_start = 0, 0.0
                return process
            raise CallError(LOST, "the environments have been stopped")

    def _note_failed_start(self, error: CallError) -> None:
        """Begin a pause if it is not the first one."""
        self._num_failed_starts += 1
        num_pauses = self._num_failed_starts - MAX_FAILED_STARTS
        if num_pauses < 0:
            return
        self._refusal = (
            f"its process could not be started {MAX_FAILED_STARTS} times in a row: {error.details}"
        )
        self._next_start = time.monotonic() + min(
            FIRST_PAUSE_S * 2 ** min(num_pauses, 10), LONGEST_PAUSE_S
        )
        if num_pauses == 0:
            label = self._config.label
            self.warnings.append(f"environment {label}: {self._refusal}; trying again with pauses")
