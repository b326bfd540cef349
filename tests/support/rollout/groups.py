"""A scored group that uses every field, and the results in an evaluation journal."""

import math
import shutil
import tempfile
from pathlib import Path

import numpy as np

from megadapo.data.group import Group, Response, Score, Turn
from megadapo.rollout.journal.record_log import RecordLog
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
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copy(path, copy)  # opening a log cuts off an incomplete record
        RecordLog(copy, lambda _, payload: seen.append(payload)).close()
    return seen
