"""A program that plays episodes with a host, and may be killed and started again.

    python -m tests.support.rollout.episode_driver FOLDER RECOVERY NUM_EPISODES NUM_TURNS SECONDS
        TICK_S

Its "model" chooses an action by the last observation. Like an engine, it forgets its responses when
it is killed, and gets back what the journal has recorded. With TICK_S the weights change all the
time: the model chooses by them too, and checkpoints keep the responses and delete older journals.
"""

import asyncio
import json
import os
import random
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from megadapo.rollout.journal.journal import delete_journals_before
from megadapo.rollout.journal.record_log import JOURNAL_FOLDER
from tests.support.rollout.hosts import config_of, content_of, task_of, turn_of, with_host


@dataclass
class Driver:
    """The state of a run, which a checkpoint has."""

    folder: Path
    num_turns: int
    version: int = 1
    responses: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Actions of each episode, with their answers."""
    failures: dict[str, str | None] = field(default_factory=dict)
    """Failure of each episode that has ended."""
    weights: str = ""

    def load(self) -> None:
        path = self.folder / "checkpoint.json"
        if path.exists():
            self.version, self.responses, self.failures = json.loads(path.read_text())

    def save(self) -> None:
        path = self.folder / "checkpoint.json"
        saved = json.dumps([self.version, self.responses, self.failures])
        path.with_suffix(".part").write_text(saved)
        path.with_suffix(".part").rename(path)
        delete_journals_before(self.folder, self.version)

    def begin(self, host) -> None:
        """Take other weights; a repeated update may have the same result or not."""
        self.weights = random.choice("ab")
        host.begin(self.version, self.weights)

    async def tick(self, host, seconds: float) -> None:
        while seconds:
            await asyncio.sleep(random.uniform(0, 2 * seconds))
            self.version += 1
            self.begin(host)
            await asyncio.sleep(random.uniform(0, seconds))
            self.save()

    async def play(self, host, name: str, seed: int, chooses_by_weights: bool) -> None:
        response = self.responses.setdefault(name, [])
        known = [action for action, _ in response]
        opened = await host.open(name, 0, task_of(name, seed), known)
        if opened.failure is not None:
            self.failures[name] = opened.failure
            return
        for one in opened.recorded:
            response.append((one.sampled.decode().removeprefix("ids of "), content_of(one.outcome)))
        last = response[-1][1] if response else content_of(opened)
        for turn in range(len(response), self.num_turns):
            number = int(re.findall(r"\d+", last)[0]) % 97
            if chooses_by_weights:
                number += 100 * self.version + (self.weights == "a")
            verb = "last" if turn == self.num_turns - 1 else f"turn-{turn}"
            action = f"{verb} {number}"
            outcome = await host.step(name, turn, turn_of(action))
            if outcome.failure is not None:
                self.failures[name] = outcome.failure
                return
            last = content_of(outcome)
            response.append((action, last))
        self.failures[name] = None
        await host.close([name])


def main(folder: Path, recovery: str, num_episodes: int, num_turns: int, *times: float) -> None:
    """Write the response and failure of each episode to results.json, when all have ended."""
    seconds, tick_s = times
    options = {"path": str(folder / "actions.txt"), "seconds": seconds}
    config = config_of("Counting", recovery=recovery, options=options, num_workers=2, max_turns=99)
    driver = Driver(folder, num_turns)
    driver.load()
    # some have ended, and others not begun, when it is killed
    slots = asyncio.Semaphore(3)

    async def play(host):
        pids = folder / "pids.json"
        pids.with_suffix(".part").write_text(json.dumps(host.process_ids))
        pids.with_suffix(".part").rename(pids)
        if tick_s:
            driver.begin(host)
        ticking = asyncio.create_task(driver.tick(host, tick_s))

        async def play_one(number: int) -> None:
            async with slots:
                name = f"episode-{number}"
                if name not in driver.failures:
                    await driver.play(host, name, number, tick_s > 0)

        await asyncio.gather(*(play_one(number) for number in range(num_episodes)))
        ticking.cancel()

    with_host([config], play, folder / JOURNAL_FOLDER, version=driver.version)
    names = [f"episode-{number}" for number in range(num_episodes)]
    results = [(driver.responses[name], driver.failures[name]) for name in names]
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    path, how, episodes, turns, *delays = sys.argv[1:]
    random.seed(os.getpid())
    main(Path(path), how, int(episodes), int(turns), *map(float, delays))
