"""Hosts of the environments of `hostile_environments`, and what engines ask them."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.environment import Action, Task
from megadapo.rollout.episodes.host import EpisodeHost
from megadapo.rollout.episodes.types import SampledTurn

MODULE = "tests.support.rollout.hostile_environments"


def config_of(name: str, **fields: Any) -> EnvironmentConfig:
    return EnvironmentConfig(environment=f"{MODULE}:{name}", **{"memory_mib": 1024, **fields})


def task_of(episode: str, seed: int = 5) -> Task:
    return Task(id=episode, messages=[{"role": "user", "content": "play"}], seed=seed)


def turn_of(text: str) -> SampledTurn:
    """Return a turn whose digest is its text."""
    return SampledTurn(text, f"ids of {text}".encode(), Action(text=text))


def content_of(outcome: Any) -> str:
    assert outcome.failure is None, outcome.failure
    return outcome.observation.messages[0]["content"]


def with_host(
    configs: list[EnvironmentConfig],
    play: Callable[[EpisodeHost], Awaitable[Any]],
    folder: Path | None = None,
    *,
    version: int = 1,
    weights: str = "weights",
) -> Any:
    """Run `play` with a host that is ready, and stop the host."""

    async def run() -> Any:
        host = EpisodeHost(configs, folder)
        try:
            await host.start()
            host.begin(version, weights)
            return await play(host)
        finally:
            await host.stop()

    return asyncio.run(run())
