"""Kills of drivers and of environments' processes at random points, by SIGKILL."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from megadapo.rollout.episodes.types import cause_of

DRIVER = "tests.support.rollout.episode_driver"
RECOVERIES = ("replay", "state", "once")
NUM_EPISODES, NUM_TURNS, SECONDS = 6, 8, 0.04
TICK_S = 0.1
MAX_STARTS = 40


def start(folder: Path, recovery: str, tick_s: float) -> subprocess.Popen:
    numbers = map(str, (NUM_EPISODES, NUM_TURNS, SECONDS, tick_s))
    return subprocess.Popen([sys.executable, "-m", DRIVER, str(folder), recovery, *numbers])


def killed(folder: Path, recovery: str, tick_s: float, seed: int, num_kills: int) -> int:
    """Play to the end, with kills at random times; return how many were made."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    made = 0
    for _ in range(MAX_STARTS):
        driver = start(folder, recovery, tick_s)
        while made < num_kills and driver.poll() is None:
            # the first record shows that episodes are open
            if not list((folder / "journal").glob("*")):
                time.sleep(0.01)
                continue
            time.sleep(rng.uniform(0.01, 0.3))
            made += 1
            if rng.random() < 0.5:
                driver.kill()
                break
            with suppress(ProcessLookupError, FileNotFoundError):
                os.kill(rng.choice(json.loads((folder / "pids.json").read_text())), signal.SIGKILL)
        if driver.wait() == 0:
            return made
        assert driver.returncode == -signal.SIGKILL
    raise AssertionError("never came to an end")


def check(folder: Path, recovery: str) -> tuple[list, int]:
    """Check results and effects; return the results, and the number of failed episodes."""
    results = json.loads((folder / "results.json").read_text())
    done: dict[str, list[str]] = {f"episode-{number}": [] for number in range(NUM_EPISODES)}
    for line in (folder / "actions.txt").read_text().splitlines():
        name, _, action = line.partition(" ")
        done[name].append(action)
    for seed, (response, failure) in enumerate(results):
        actions = [action for action, _ in response]
        answers = [int(answer.removeprefix("now ")) for _, answer in response]
        assert answers == answers_to(actions, seed)
        assert failure is not None or len(actions) == NUM_TURNS
        if recovery != "once":
            assert failure is None
            continue
        effects = done[f"episode-{seed}"]
        verbs = [action.partition(" ")[0] for action in effects]
        assert len(set(verbs)) == len(verbs), "a turn was done twice"
        assert effects[: len(actions)] == actions
        if failure is None:
            assert effects == actions
        else:
            assert cause_of(failure) in ("interrupted", "lost process")
    return results, sum(failure is not None for _, failure in results)


def answers_to(actions: Sequence[str], seed: int) -> list[int]:
    """Return the answers of the environment `Counting` to all actions of an episode."""
    answers, total = [], seed
    for action in actions:
        total = (31 * total + int(action.split()[1])) % 1_000_003
        answers.append(total)
    return answers


def undisturbed(seed: int) -> list[str]:
    """Return the actions that the driver chooses if the weights stay the same."""
    actions: list[str] = []
    last = seed
    for turn in range(NUM_TURNS):
        verb = "last" if turn == NUM_TURNS - 1 else f"turn-{turn}"
        actions.append(f"{verb} {last % 97}")
        last = answers_to(actions, seed)[-1]
    return actions


def campaign(folder: Path, seeds: range, num_kills: int, tick_s: float = 0.0) -> Counter:
    """Play with every recovery and seed; return counts of kills, episodes and failures."""
    counts: Counter = Counter()

    def one(recovery: str, seed: int) -> Counter:
        inner = folder / f"{recovery}-{seed}"
        made = killed(inner, recovery, tick_s, seed, num_kills)
        results, num_failed = check(inner, recovery)
        for number, (response, _) in enumerate([] if tick_s else results):
            actions = [action for action, _ in response]
            assert actions == undisturbed(number)[: len(actions)]
        counted = {"kills": made, f"{recovery} failed": num_failed}
        return Counter({**counted, f"{recovery} episodes": NUM_EPISODES})

    with ThreadPoolExecutor(3) as threads:
        played = [threads.submit(one, how, seed) for seed in seeds for how in RECOVERIES]
        for each in played:
            counts += each.result()
    print(dict(counts))
    return counts


@pytest.mark.fault
def test_killed_runs_repeat_no_action_once_and_equal_undisturbed_ones(tmp_path):
    counts = campaign(tmp_path, range(1), num_kills=2)
    assert counts["kills"] > 2


@pytest.mark.full
@pytest.mark.fault
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("tick_s", [0.0, TICK_S])
def test_many_killed_runs_repeat_no_action_once_and_equal_undisturbed_ones(tmp_path, tick_s):
    """With ticks the weights change, and killed runs continue from checkpoints."""
    counts = campaign(tmp_path, range(100, 130), num_kills=4, tick_s=tick_s)
    assert counts["kills"] > 240
    assert 0 < counts["once failed"] < counts["once episodes"]
