"""The host of all environments of a run: engines ask it, and it does every action once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.environment import Action, Task
from megadapo.environments.process import CallError
from megadapo.environments.processes import EnvironmentProcesses
from megadapo.errors import ConfigError
from megadapo.rollout.episodes.episode import Episode, identity_of
from megadapo.rollout.episodes.journal import EpisodeJournal, EpisodeRecord
from megadapo.rollout.episodes.types import EnvironmentDescription, Opened, Outcome, SampledTurn

Value = TypeVar("Value")


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
    ) -> None:
        """`journal_folder`: none keeps no journal; `log_folder`: for what environments print."""
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
                episode.branch_off(self._record_of(parent), len(begun[0]))
            self._episodes[name] = episode
        elif episode.record.identity != identity_of(config, task):
            return Opened(None, (), f"wrong call: {name} is open with another task")
        return await episode.open(*begun, self._weights)

    def _record_of(self, name: str) -> EpisodeRecord | None:
        if name in self._episodes:
            return self._episodes[name].record
        return None if self._journal is None else self._journal.find(name)

    async def step(self, episode: str, turn: int, done_turn: SampledTurn) -> Outcome:
        """Give an action to the environment, and return its answer.

        Args:
            turn: number of the episode's turns before this one.
        """
        return await self._finish(self._step(episode, turn, done_turn))

    async def _step(self, name: str, turn: int, done_turn: SampledTurn) -> Outcome:
        episode = self._episodes.get(name)
        if episode is None or self._weights is None:
            return Outcome(None, f"wrong call: {name} is not open", 0.0)
        return await episode.step(turn, done_turn, self._weights)

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

    return asyncio.run(check())
