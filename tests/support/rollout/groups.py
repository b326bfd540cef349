"""A scored group that uses every field, a small schedule, and the records of a file."""

import math
from pathlib import Path

import numpy as np

from megadapo.data.group import Group, Response, Score, Turn
from megadapo.rollout.journal.record_log import read_records
from megadapo.rollout.sampling.schedule import SamplingSchedule, Take, WeightPause
from tests.support.rollout.scripted_engines import make_prompts

EXPERTS = np.argsort(np.random.default_rng(0).random((9, 2, 4))).astype(np.uint8)[..., :3]


def make_group(prompt_index: int) -> Group:
    """Return a group of a correct and a truncated response, sampled from two policy versions."""
    responses = tuple(
        Response(
            token_ids=np.arange(prompt_index, prompt_index + length, dtype=np.int32),
            logprobs=np.array(([math.nan, -math.inf, -1.5, -0.1] * 3)[:length], dtype=np.float32),
            finish_reason=reason,
            policy_versions=np.repeat([3, 4], [length // 2, length - length // 2]).astype(np.int32),
            text="5 \u00e9\n\x00",
            turns=(Turn(end=1), Turn(end=length, entropy=0.25)),
            entropy=0.5,
            experts=EXPERTS[: 2 + length],
        )
        for length, reason in ((1, "stop"), (7, "length"))
    )
    return Group(
        prompt_index=prompt_index,
        prompt=make_prompts(prompt_index + 1)[prompt_index],
        prompt_ids=(5, 151_000, 7),
        responses=responses,
        scores=(
            Score(1.0, True, "5", parts=(("judge", 0.1), ("judge/failed", 0.0))),
            Score(-1.0, False, "[INVALID]", False, steps=((3, 0.1), (7, -1.0))),
        ),
        seconds=1 / 3,
    )


def payloads(path: Path) -> list[bytes]:
    """Return the records of a journal that a run may be writing."""
    seen: list[bytes] = []
    read_records(path, lambda _, payload: seen.append(payload))
    return seen


BATCH = [make_group(index) for index in (3, 5)]
COUNTS = {4: (7, 0, 12), 6: (0, 0, 0)}


def write_schedule(path: Path, rules: str = "rules", weights: str = "aa" * 32) -> Path:
    """Write a schedule with a batch between two publications."""
    schedule = SamplingSchedule(path, rules)
    schedule.pause(0, "00" * 32, 0, {})
    schedule.take(1, 8, [4, 6, 7], BATCH)
    schedule.pause(1, weights, 9, COUNTS)
    schedule.close()
    return path


def read_schedule(path: Path) -> list[Take | WeightPause]:
    """Return the intact records of a schedule with the rules "rules"."""
    schedule, found = SamplingSchedule(path, "rules"), []
    while schedule.next is not None:
        found.append(schedule.next)
        schedule.position += 1
    schedule.close()
    return found
