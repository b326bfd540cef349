"""Engines with real processes and scripted responses, which start in a second.

Their classes are here and not in tests, whose imports each process would repeat.
"""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megadapo.cluster.calls import Watch
from megadapo.data.group import Response
from megadapo.rollout.config import RolloutConfig
from megadapo.rollout.engine.engine import RolloutEngine
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.pool.handle import EngineHandle
from megadapo.rollout.types import EngineCounts, OpenGroup, ScoreRequest, StopReport
from tests.support.rollout.engine_specs import engine_spec

LONGEST_S = 0.4
TOO_LONG = 50
"""Prompts of more tokens are refused."""


class ScriptedGeneration:
    """A replacement of `megadapo.rollout.engine.generation.Generation` without vLLM.

    Each response is one token, a function of its seed; a group's time is a function of its key.
    """

    def __init__(self) -> None:
        self._due: dict[int, tuple[float, OpenGroup, int]] = {}
        self._num_ended = 0
        self.num_tokens = 0

    async def submit(self, groups: Sequence[OpenGroup], policy_version: int) -> None:
        if any(len(group.prompt_ids) > TOO_LONG for group in groups):
            raise ValueError("the prompt is too long")
        for group in groups:
            due = time.monotonic() + LONGEST_S * (1 + group.key * 7 % 10) / 10
            self._due[group.key] = (due, group, policy_version)

    async def collect(
        self, max_wait_s: float, num_for_report: int
    ) -> tuple[tuple[OpenGroup, ...], EngineCounts]:
        deadline = time.monotonic() + max_wait_s
        while not (ended := self._ended()) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return tuple(self._take(key, "stop") for key in ended), self.counts()

    def counts(self) -> EngineCounts:
        return EngineCounts(num_ended=self._num_ended, num_tokens=self.num_tokens)

    async def stop(self, keys: Collection[int], *, keep: bool) -> StopReport:
        stopped = [self._take(key, "unfinished") for key in list(self._due) if key in keys]
        return StopReport(
            keys=tuple(group.key for group in stopped),
            unfinished=tuple(stopped) if keep else (),
            num_tokens=sum(group.num_tokens for group in stopped),
        )

    def _ended(self) -> list[int]:
        now = time.monotonic()
        return [key for key, (due, _, _) in self._due.items() if due < now]

    def _take(self, key: int, reason: Any) -> OpenGroup:
        _, group, version = self._due.pop(key)
        self._num_ended += len(group.seeds)
        self.num_tokens += len(group.seeds)
        responses = tuple(
            Response(
                token_ids=np.array([seed % 97], dtype=np.int32),
                logprobs=np.array([-(seed % 89) / 10], dtype=np.float32),
                finish_reason=reason,
                text=str(seed % 97),
                policy_versions=np.array([version], dtype=np.int32),
            )
            for seed in group.seeds
        )
        return replace(group, responses=responses, seconds=0.1)


class ScriptedEngine(RolloutEngine):
    """A real actor with its guard and an idle child process."""

    async def _start_vllm(self) -> None:
        self._child = subprocess.Popen(["sleep", "600"])
        self._reset_generation()

    def _reset_generation(self) -> None:
        self._generation = ScriptedGeneration()

    async def score(self, requests: Sequence[ScoreRequest], wait_s: float) -> list[np.ndarray]:
        """Give each token its position, after a while."""
        await asyncio.sleep(LONGEST_S)
        return [request.positions.astype(np.float32) for request in requests]

    async def _call(self, method: str, *args: object) -> bool:
        """End weight updates at once."""
        return True

    def child(self) -> int:
        return self._child.pid


class EndlessGeneration(ScriptedGeneration):
    """A generation whose groups end by a stop only."""

    def _ended(self) -> list[int]:
        return []


class EndlessEngine(ScriptedEngine):
    def _reset_generation(self) -> None:
        self._generation = EndlessGeneration()

    async def _answer_one(self) -> None:
        """Return None: no request would end."""

    async def rest(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class LateEngine(ScriptedEngine):
    """An engine whose start takes a minute if it is not the first one."""

    async def _start_vllm(self) -> None:
        time.sleep(60 * min(1, self._spec.index))
        await super()._start_vllm()


def note(ledger: Path, who: str, *held: str) -> None:
    """Append what a process holds on the GPU from now on."""
    with ledger.open("a") as file:
        file.write(json.dumps([who, *held]) + "\n")


class HoldingEngine(ScriptedEngine):
    """An engine that writes down what it holds, and starts slowly if a file says so."""

    async def _start_vllm(self) -> None:
        ledger = self._spec.log_file.with_name("ledger")
        note(ledger, f"engine {os.getpid()}", "awake")
        if ledger.with_name("slow").exists():
            time.sleep(2)
        await super()._start_vllm()

    async def _call(self, method: str, *args: object) -> bool:
        held = {"sleep": "asleep", "wake_up": {"weights": "weights", "kv_cache": "awake"}}
        what = held.get(method)
        if isinstance(what, dict):
            what = what[args[0][0]]
        if what is not None:
            ledger = self._spec.log_file.with_name("ledger")
            note(ledger, f"engine {os.getpid()}", what)
        return True


def start_scripted_engines(
    num_engines: int,
    log_folder: Path,
    *,
    watch: Watch | None = None,
    gpus: tuple[str, ...] = (),
    actor_class: type[ScriptedEngine] = ScriptedEngine,
    **settings: Any,
) -> Engines:
    """Start engines with weights of version 1; restarted ones get the current version.

    `gpus`: makes them sleep as on these GPUs, which need not exist.
    """
    limits = {"engine_progress_timeout_s": 6.0}
    config = RolloutConfig(num_engines=num_engines, max_num_seqs=8, **{**limits, **settings})
    engines = Engines(
        [
            EngineHandle(
                engine_spec(
                    index=index,
                    config=config,
                    gpus=gpus,
                    log_file=log_folder / f"engine-{index}.log",
                    start_timeout_s=60.0,
                ),
                {"num_cpus": 0},
                actor_class,
            )
            for index in range(num_engines)
        ],
        watch,
    )
    engines.wait_until_ready()
    give_version(engines, range(num_engines), 1)
    return engines


def give_version(
    engines: Engines, indices: Sequence[int], policy_version: int, *, any_time: bool = False
) -> None:
    """Mark the samples of engines with a version, as an update of their weights does.

    `any_time`: the version can be given again while the trainer changes its weights.
    """
    engines.finish_weight_update(
        indices,
        policy_version,
        timeout_s=30,
        republish=lambda index: give_version(engines, [index], policy_version, any_time=any_time),
        any_time=any_time,
    )
