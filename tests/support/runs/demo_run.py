"""A run with groups of many kinds, one of them hostile, for browser tests of the report."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megadapo.data.prompts import Prompt
from megadapo.observe.metrics.names import METRIC_NAMES
from megadapo.observe.metrics.records import MetricsLog
from megadapo.observe.rollouts.files import rollouts_path, write_rollouts
from megadapo.observe.rollouts.saved_group import Disposition, SavedGroup, SavedResponse
from tests.support.rollout.saved_groups import saved_group, saved_response, untrained
from tests.support.runs.recorded_runs import evaluation_record

HOSTILE = "</script><img src=x onerror=alert(1)><script>alert(2)</script>\u2028<!--<script"


def demo_run(folder: Path, *, num_steps: int = 6, long_tokens: int = 4) -> Path:
    """Write a run of which steps 1 to 3 have saved groups, the last with a long response."""
    with MetricsLog(folder) as log:
        for step in range(1, num_steps + 1):
            values: dict[str, int | float | None] = dict.fromkeys(METRIC_NAMES, 0.5)
            log.record(values | {"step": step, "policy_version": step, "time/step_s": 2.0})
        for step in (0, num_steps):
            log.record_evaluation(evaluation_record(step))
    (folder / "config.json").write_text(json.dumps({"run": {"num_steps": num_steps}}))
    for step, groups in enumerate(_steps(long_tokens), start=1):
        write_rollouts(rollouts_path(folder, step), groups)
    return folder


def _steps(long_tokens: int) -> list[list[SavedGroup]]:
    clipped = _response("up down", ratios=[1.5, 0.5, 1.1, 1.0, 1.0, 1.0, 1.0])
    lowered = _response("up down", ratios=[1.5, 0.5, 1.1, 1.0, 1.0, 1.0, 1.0], correct=False)
    return [
        [
            _group(1, clipped, lowered),
            _group(2, _response("all good", trained=False), disposition="all_correct"),
        ],
        [
            _group(3, _response("needle in hay"), _response("hay", correct=False)),
            _group(
                4, _response("7"), _response("never ends", correct=False, finish_reason="length")
            ),
            _group(5, _response(HOSTILE), _response("no", correct=False, symbolic_correct=True)),
        ],
        [
            _group(
                6,
                _response(("late" * long_tokens)[:long_tokens], version=1),
                _response("fresh", correct=False, version=2),
            )
        ],
    ]


def _group(
    prompt_index: int, *responses: SavedResponse, disposition: Disposition = "trained"
) -> SavedGroup:
    question = HOSTILE if prompt_index == 5 else f"question {prompt_index}"
    return replace(
        saved_group(*responses, prompt_index=prompt_index, disposition=disposition),
        step=1 + (prompt_index > 2) + (prompt_index > 5),
        prompt=Prompt(f"id-{prompt_index}", (("user", question),), "2", "test"),
    )


def _response(
    text: str,
    *,
    correct: bool = True,
    trained: bool = True,
    ratios: Sequence[float] = (1.0,),
    version: int = 0,
    **values: object,
) -> SavedResponse:
    """A response whose tokens are its characters; `ratios` are update over old."""
    old, reward = np.full(len(text), -0.5, dtype=np.float32), 1.0 if correct else -1.0
    values |= {"correct": correct, "reward": reward, "shaped_reward": reward, "penalty": 0.0}
    values |= {"logprobs": old, "policy_versions": np.full(len(text), version, dtype=np.int32)}
    values.setdefault("symbolic_correct", None)
    if not trained:
        return untrained(text, **values)
    update = old + np.log(ratios).astype(np.float32)
    return saved_response(
        text, logprobs_old=old, logprobs_update=update, advantage=reward, **values
    )
