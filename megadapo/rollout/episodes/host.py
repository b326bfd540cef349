"""The host of all environments of a run: engines ask it, and it does every action once.

An episode has an object in a process, and a record of it for the case that the object is lost.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.environment import Action, Observation, Task
from megadapo.environments.processes import (
    EnvironmentDescription,
    EnvironmentProcess,
    EnvironmentProcesses,
)
from megadapo.errors import ConfigError
from megadapo.rewards.workers.by_value import PICKLES
from megadapo.rewards.workers.processes import LOST, CallError, TimeLimit
from megadapo.rollout.episodes.journal import EpisodeJournal, EpisodeRecord, Kind
from megadapo.rollout.types import Opened, Outcome, SampledTurn

MAX_ATTEMPTS = 3
"""Number of attempts to reset, and to repeat what a lost process has not answered."""
_FINAL = ("wrong result", "not repeatable", "journal")
"""Causes that another attempt to reset would meet again."""
_OUTAGES = ("failure", "no capacity")
"""Causes that may be over in a while, such as a server that starts again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 32.0
"""Pauses between attempts to reset in an outage, about a minute in all; each is twice the one
before."""
Value = TypeVar("Value")


class Episode:
    """An episode that an engine has opened; one call at a time."""

    def __init__(
        self,
        name: str,
        config: EnvironmentConfig,
        processes: EnvironmentProcesses,
        task: Task,
        journal: EpisodeJournal | None,
    ) -> None:
        self._name, self._config, self._processes = name, config, processes
        self._task, self._journal = asdict(task) | {"episode": name}, journal
        self._process: EnvironmentProcess | None = None
        """Process of its object; None without an object."""
        self._number = 0
        """Number of its object."""
        self._seconds = 0.0
        """Time of the last call of the object."""
        self._lock = asyncio.Lock()
        self._closing = asyncio.Event()
        self._failure: str | None = None
        self._released: set[asyncio.Task[None]] = set()
        identity = identity_of(config, task)
        found = None if journal is None else journal.find(name)
        self._is_loaded = found is not None and found.identity == identity
        """Whether its record is of another episode's object, of a process that has ended or of its
        parent, and it has not been opened since."""
        self.record = found if found and self._is_loaded else EpisodeRecord(identity)

    def branch_off(self, parent: EpisodeRecord | None, num_turns: int) -> None:
        """Begin with the first turns of another episode of the same task."""
        if parent is not None and parent.identity == self.record.identity:
            own = self.record.serial
            self.record = replace(parent, turns=parent.turns[:num_turns], pending=None, serial=own)
            self._is_loaded = True

    def continues(self, digests: Sequence[str]) -> bool:
        """Return whether these are its first turns."""
        known = [turn.digest for turn in self.record.turns[: len(digests)]]
        return self.record.is_reset and known == list(digests)

    async def open(self, digests: Sequence[str], actions: Sequence[Action], weights: str) -> Opened:
        """Prepare for the next turn of a response that has these turns."""
        async with self._lock:
            if self._failure is None:
                try:
                    await self._prepare(digests, actions, weights)
                except CallError as error:
                    self._fail(error)
            if self._failure is not None:
                return Opened(self.record.observation, (), self._failure)
            turns = self.record.turns[len(digests) :]
            recorded = (replace(turn, state=None) for turn in turns if turn.outcome is not None)
            return Opened(self.record.observation, tuple(recorded), None)

    async def step(self, turn: int, given: SampledTurn, weights: str) -> Outcome:
        """Act once; return the recorded answer if this turn was done already."""
        async with self._lock:
            turns = self.record.turns
            if turn < len(turns) and turns[turn].digest == given.digest:
                known = turns[turn].outcome
                assert known is not None
                return known
            if self._failure is not None:
                return Outcome(None, self._failure, 0.0)
            if turn > len(turns):
                text = f"wrong call: turn {turn} comes after {len(turns)} turns"
                return Outcome(None, text, 0.0)
            if turn < len(turns):
                if self._config.recovery == "once":
                    text = f'turn {turn} was done with other tokens, and recovery = "once"'
                    self._fail(CallError("interrupted", text))
                    return Outcome(None, self._failure, 0.0)
                del turns[turn:]
                self._leave()
            if turns and _is_done(turns[-1]):
                return Outcome(None, "wrong call: the episode has ended", 0.0)
            return await self._act(given, weights)

    def end_pause(self) -> None:
        """Wait for no outage any more."""
        self._closing.set()

    async def close(self) -> None:
        """Release the object after the call in progress."""
        self.end_pause()
        async with self._lock:
            if self._journal is not None and self.record.is_reset:
                # nothing is lost without it
                with suppress(CallError):
                    await self._write("close")
            self._leave()
        await asyncio.gather(*self._released)

    async def _prepare(
        self, digests: Sequence[str], actions: Sequence[Action], weights: str
    ) -> None:
        """Keep the turns that the response continues, and bring an object there.

        Raises:
            CallError: that is impossible.
        """
        record = self.record
        is_once = self._config.recovery == "once"
        known = [turn.digest for turn in record.turns]
        if list(digests) != known[: len(digests)]:
            can_replay = self._config.recovery == "replay" and len(actions) == len(digests)
            if known or not can_replay:
                raise CallError("lost records", f"of {len(digests)} turns that the response has")
            pairs = zip(digests, actions, strict=True)
            record.turns = [SampledTurn(digest, None, action, weights) for digest, action in pairs]
        if self._is_loaded:
            kept = len(digests)
            while kept < len(known) and record.turns[kept].weights == weights:
                kept += 1
            if is_once and (kept < len(known) or record.pending is not None):
                text = f'turn {kept} was begun before a restart, and recovery = "once"'
                raise CallError("interrupted", text)
            del record.turns[kept:]
            record.pending = None
            self._is_loaded = False
            await self._write("open")
        ended = record.turns and _is_done(record.turns[-1])
        if not ended and len(record.turns) < self._config.max_turns:
            await self._bring_up()

    async def _bring_up(self) -> None:
        """Make sure that there is an object that has had all answered turns.

        Raises:
            CallError: that is impossible.
        """
        if self._process is not None and self._process.is_alive:
            return
        self._leave()
        turns = len(self.record.turns)
        if turns and self._config.recovery == "once":
            text = f'its process was lost after {turns} turns, and recovery = "once"'
            raise CallError("interrupted", text)
        attempt, pause_s = 0, FIRST_PAUSE_S
        while True:
            self._process, self._number = await self._processes.new_object()
            try:
                await self._reset()
            except CallError as error:
                self._leave()
                if error.cause in _OUTAGES and pause_s <= LONGEST_PAUSE_S:
                    await self._pause(pause_s, error)
                    pause_s *= 2
                    continue
                attempt += 1
                if attempt == MAX_ATTEMPTS or error.cause in _FINAL or error.cause in _OUTAGES:
                    raise
                continue
            try:
                await self._repeat()
            except CallError as error:
                self._leave()
                attempt += 1
                if attempt == MAX_ATTEMPTS or error.cause != LOST:
                    raise
                continue
            return

    async def _pause(self, seconds: float, error: CallError) -> None:
        """Wait in an outage, unless the episode is to be closed.

        Raises:
            CallError: it is.
        """
        warning = f"environment {self._config.label}: {error}; trying again for about a minute"
        if warning not in self._processes.warnings:
            self._processes.warnings.append(warning)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)
            raise error

    async def _call(self, name: str, **arguments: Any) -> Any:
        """Call a method of the object; raises what `EnvironmentProcess.call` raises."""
        process, limit_s = self._process, self._config.timeout_s
        assert process is not None, "_bring_up comes first"
        async with process.slots:
            start = time.monotonic()
            try:
                limit = TimeLimit(limit_s)
                return await process.call(name, limit, object=self._number, **arguments)
            finally:
                self._seconds = time.monotonic() - start

    async def _reset(self) -> None:
        record = self.record
        if record.is_reset and self._config.recovery == "state":
            state = record.turns[-1].state if record.turns else record.state
            await self._call("restore", task=self._task, state=state)
            return
        reply = await self._call("reset", task=self._task)
        fields = reply["observation"]
        observation = None if fields is None else Observation(**fields)
        if not record.is_reset:
            record.is_reset, record.observation, record.state = True, observation, reply["state"]
            await self._write("open")
        elif not _is_same(record.observation, observation):
            raise CallError("not repeatable", "reset returned another observation than before")

    async def _repeat(self) -> None:
        """Give a new object the recorded actions."""
        if self._config.recovery == "state":
            return
        has_records = all(turn.outcome is not None for turn in self.record.turns)
        for number, turn in enumerate(self.record.turns):
            reply = await self._call("step", action=asdict(turn.action))
            if turn.outcome is None:
                # the response has no records, so the answer cannot be compared
                self._answer(turn, reply)
            elif not _is_same(turn.outcome.observation, Observation(**reply["observation"])):
                raise CallError("not repeatable", f"turn {number} was answered differently before")
        if not has_records:
            await self._write("open")

    async def _act(self, given: SampledTurn, weights: str) -> Outcome:
        record = self.record
        # large arrays from Ray are views of its shared memory, which records would keep occupied
        record.pending = replace(copy.deepcopy(given), weights=weights)
        is_written = False
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                await self._bring_up()
                if not is_written:
                    await self._write("act")
                    is_written = True
                reply = await self._call("step", action=asdict(given.action))
            except CallError as error:
                may_repeat = error.cause == LOST and self._config.recovery != "once"
                if may_repeat and attempt < MAX_ATTEMPTS:
                    continue
                return self._failed(error)
            turn, record.pending = record.pending, None
            self._answer(turn, reply)
            record.turns.append(turn)
            try:
                await self._write("answer")
            except CallError as error:
                return self._failed(error)
            break
        outcome = record.turns[-1].outcome
        assert outcome is not None
        return outcome

    def _answer(self, turn: SampledTurn, reply: Mapping[str, Any]) -> None:
        turn.outcome = Outcome(Observation(**reply["observation"]), None, self._seconds)
        turn.state = reply["state"]

    async def _write(self, kind: Kind) -> None:
        if self._journal is None:
            return
        try:
            await self._journal.write(kind, self._name, self.record)
        except (TypeError, ValueError) as error:
            raise CallError("wrong call", f"the journal got what is not JSON: {error}") from error
        except OSError as error:
            # the journal warns for itself
            if self._config.recovery == "once":
                raise CallError("journal", f"{error.strerror}") from error

    def _failed(self, error: CallError) -> Outcome:
        seconds = 0.0 if self._process is None else self._seconds
        self._fail(error)
        return Outcome(None, self._failure, seconds)

    def _fail(self, error: CallError) -> None:
        self._failure = str(error)
        self._leave()

    def _leave(self) -> None:
        """Give the object up, if there is one."""
        if self._process is not None:
            # its method close may take long
            task = asyncio.create_task(self._process.release(self._number))
            self._released.add(task)
            task.add_done_callback(self._released.discard)
            self._process = None


def identity_of(config: EnvironmentConfig, task: Task) -> str:
    """Return a digest of all that determines an episode's answers, except for the actions."""
    fields = asdict(task)
    if not fields["prompt_ids"]:
        # older journals do not have it
        del fields["prompt_ids"]
    parts: list[Any] = [config.path, config.options, config.recovery, fields]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _is_done(turn: SampledTurn) -> bool:
    outcome = turn.outcome
    return bool(outcome and outcome.observation and outcome.observation.done)


def _is_same(one: Observation | None, other: Observation | None) -> bool:
    """Compare observations without their metrics, which may hold times."""
    if one is None or other is None:
        return one is other
    first, second = (
        ([dict(message) for message in it.messages], it.text, it.token_ids, it.reward, it.done)
        for it in (one, other)
    )
    return first == second


class EpisodeHost:
    """The environments of a run, for use in one event loop.

    An engine may die in the middle of a call, and another engine may ask again: calls are
    idempotent, and a call that was cancelled continues to its result.
    """

    def __init__(
        self,
        configs: Sequence[EnvironmentConfig],
        journal_folder: Path | None,
        log_folder: Path | None = None,
        pickles: Mapping[str, str] | None = None,
    ) -> None:
        """`journal_folder`: none keeps no journal; `log_folder`: for what environments print."""
        # the driver's, if this is another process
        PICKLES.update(pickles or {})
        self._configs = list(configs)
        self._processes = [EnvironmentProcesses(config, log_folder) for config in configs]
        self._journal = None if journal_folder is None else EpisodeJournal(journal_folder)
        self._episodes: dict[str, Episode] = {}
        self._weights: str | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._stopping = asyncio.Event()

    async def start(self) -> list[EnvironmentDescription]:
        """Start all processes.

        Raises:
            ConfigError: lists every environment that cannot be started or created.
        """
        starts = (processes.start() for processes in self._processes)
        results = await asyncio.gather(*starts, return_exceptions=True)
        described, problems = [], []
        for index, (config, result) in enumerate(zip(self._configs, results, strict=True)):
            if isinstance(result, EnvironmentDescription):
                described.append(result)
            elif isinstance(result, CallError):
                problems.append(
                    f"rollout.environments[{index}] ({config.environment}): {result.details}"
                )
            else:
                raise result
        if problems:
            await self.stop()
            raise ConfigError("\n".join(problems))
        return described

    def begin(self, policy_version: int, weights: str) -> None:
        """Note the weights that sample from now on, and continue in their journal.

        `weights`: their fingerprint. Records of open episodes are copied, so that the journals of
        earlier policy versions are not needed any more.
        """
        self._weights = f"{policy_version}/{weights}"
        if self._journal is not None:
            live = {name: episode.record for name, episode in self._episodes.items()}
            self._journal.begin(policy_version, live)

    async def open(
        self,
        episode: str,
        environment: int,
        task: Task,
        digests: Sequence[str] = (),
        parent: str | None = None,
        actions: Sequence[Action] = (),
    ) -> Opened:
        """Begin an episode, or continue a known one after the turns that a response has.

        Args:
            episode: name of the episode, the same after a restart.
            environment: index of its entry in rollout.environments.
            digests: those of the response's turns.
            parent: the episode that a new one branches off after these turns.
            actions: of these turns, to replay them if there is no journal of them.
        """
        begun = (digests, actions)
        return await self._finish(self._open(episode, environment, task, begun, parent))

    async def _open(
        self,
        name: str,
        environment: int,
        task: Task,
        begun: tuple[Sequence[str], Sequence[Action]],
        parent: str | None,
    ) -> Opened:
        if self._weights is None:
            # without a trainer no caller begins, as the weights stay the same
            self.begin(0, "")
            assert self._weights is not None
        config = self._configs[environment]
        episode = self._episodes.get(name)
        if episode is not None and parent is not None and not episode.continues(begun[0]):
            # its group was repeated, and branched off elsewhere
            await self.close([name])
            episode = None
        if episode is None:
            processes = self._processes[environment]
            episode = Episode(name, config, processes, task, self._journal)
            if parent is not None and not episode.continues(begun[0]):
                known = self._episodes.get(parent)
                found = None if self._journal is None else self._journal.find(parent)
                episode.branch_off(known.record if known else found, len(begun[0]))
            self._episodes[name] = episode
        elif episode.record.identity != identity_of(config, task):
            return Opened(None, (), f"wrong call: {name} is open with another task")
        return await episode.open(*begun, self._weights)

    async def step(self, episode: str, turn: int, done_turn: SampledTurn) -> Outcome:
        """Give an action to the environment, and return its answer.

        Args:
            turn: number of the episode's turns before this one.
        """
        known = self._episodes.get(episode)
        if known is None or self._weights is None:
            return Outcome(None, f"wrong call: {episode} is not open", 0.0)
        return await self._finish(known.step(turn, done_turn, self._weights))

    async def close(self, episodes: Sequence[str]) -> None:
        """Release the objects of episodes that have ended or are not wanted; records stay."""
        names = set(episodes) & self._episodes.keys()
        closing = [self._episodes.pop(name) for name in names]
        if self._journal is not None:
            for name in names:
                self._journal.forget(name)
        await self._finish(asyncio.gather(*(episode.close() for episode in closing)))

    async def until_stopped(self) -> None:
        """Wait for `stop`: a caller notices the death of this process."""
        await self._stopping.wait()

    async def stop(self) -> None:
        """Kill all processes; calls in progress fail."""
        self._stopping.set()
        for episode in self._episodes.values():
            episode.end_pause()
        await asyncio.gather(*(processes.stop() for processes in self._processes))
        await asyncio.gather(*self._calls, return_exceptions=True)
        if self._journal is not None:
            await self._journal.close()

    def drain_warnings(self) -> list[str]:
        """Return the warnings since the last call."""
        warnings = [] if self._journal is None else self._journal.drain_warnings()
        for processes in self._processes:
            warnings += processes.warnings
            processes.warnings = []
        return warnings

    @property
    def process_ids(self) -> list[int]:
        """Pids of all processes of environments."""
        return [pid for processes in self._processes for pid in processes.process_ids]

    async def _finish(self, work: Coroutine[Any, Any, Value] | asyncio.Future[Value]) -> Value:
        """Wait for work that continues if the caller is cancelled."""
        task = asyncio.ensure_future(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return await asyncio.shield(task)


def check_environments(configs: Sequence[EnvironmentConfig]) -> list[EnvironmentDescription]:
    """Start and end every environment once; return what prompts need to know of them."""

    async def check() -> list[EnvironmentDescription]:
        host = EpisodeHost(
            [config.model_copy(update={"num_workers": 1}) for config in configs], None
        )
        try:
            return await host.start()
        finally:
            await host.stop()

    # in a notebook this thread has an event loop already
    return ThreadPoolExecutor(1).submit(asyncio.run, check()).result()
