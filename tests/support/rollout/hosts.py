"""Hosts of the environments of `hostile_environments`, and what engines ask them."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from megadapo.data.group import Response
from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.environment import Action, Task
from megadapo.rollout.episodes.host import EpisodeHost
from megadapo.rollout.types import SampledTurn

MODULE = "tests.support.rollout.hostile_environments"


def config_of(name: str, **fields: Any) -> EnvironmentConfig:
    return EnvironmentConfig(environment=f"{MODULE}:{name}", **{"memory_mib": 1024, **fields})


def task_of(episode: str, seed: int = 5) -> Task:
    return Task(id=episode, messages=[{"role": "user", "content": "play"}], seed=seed)


def turn_of(text: str) -> SampledTurn:
    """Return a turn whose digest is its text."""
    ids = np.array([ord(character) for character in text], dtype=np.int32)
    sampled = Response(
        token_ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        finish_reason="unfinished",
        text="",
        policy_versions=np.zeros(len(ids), np.int32),
    )
    return SampledTurn(text, sampled, Action(text=text))


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


TURNS = [turn_of(f"act {number}") for number in range(5)]
ANSWERS = ["now 155", "now 4806", "now 148988", "now 618619", "now 177136"]
"""Answers of the environment `Counting` to these turns."""
RECOVERIES = ("replay", "state", "once")


def counting(tmp_path: Path, name: str = "Counting", **fields: Any) -> EnvironmentConfig:
    return config_of(name, options={"path": str(tmp_path / "actions.txt")}, **fields)


def all_counting(tmp_path: Path, *recoveries: str) -> list[EnvironmentConfig]:
    return [counting(tmp_path, recovery=recovery) for recovery in recoveries]


def actions(tmp_path: Path, episode: str = "a") -> list[str]:
    """Return the actions of an episode that its environment has done."""
    lines = (tmp_path / "actions.txt").read_text().splitlines()
    return [line for line in lines if line.startswith(f"{episode} ")]


async def play(host: EpisodeHost, start: int, stop: int, episode: str = "a") -> list[str]:
    return [content_of(await host.step(episode, n, TURNS[n])) for n in range(start, stop)]


def first_life(tmp_path: Path, names: dict[str, str], num_turns: int) -> None:
    """Play some turns of episodes, and stop as a killed run does: nothing is closed.

    `names`: the recovery of each episode by its name.
    """
    recoveries = sorted(set(names.values()))

    async def run(host: EpisodeHost) -> None:
        for name, recovery in names.items():
            await host.open(name, recoveries.index(recovery), task_of(name))
            await play(host, 0, num_turns, name)

    with_host(all_counting(tmp_path, *recoveries), run, tmp_path / "journal")


def digests(num_turns: int) -> list[str]:
    return [turn.digest for turn in TURNS[:num_turns]]


def recorded(opened: Any) -> list[str]:
    """Return the recorded answers of an episode that was opened again."""
    assert opened.failure is None, opened.failure
    assert opened.observation.messages[0]["content"] == "begin at 5"
    for one in opened.recorded:
        assert "".join(map(chr, one.sampled.token_ids)) == one.digest
    return [content_of(one.outcome) for one in opened.recorded]
