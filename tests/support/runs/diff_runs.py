"""A recorded run of three steps with every file that two runs are compared by, and edits of it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megadapo.data.prompts import Prompt
from megadapo.observe.metrics.names import METRIC_NAMES
from megadapo.observe.metrics.records import METRICS_FILE, MetricsLog, read_metrics
from megadapo.observe.rollouts.files import read_rollouts, rollouts_path, write_rollouts
from megadapo.observe.rollouts.saved_group import SavedGroup, SavedResponse
from megadapo.run.state.checkpoint import CHECKPOINTS, CheckpointStore
from tests.support.rollout.saved_groups import saved_group, saved_response
from tests.support.runs.checkpoints import save_checkpoint
from tests.support.runs.exported_runs import saved
from tests.support.runs.recorded_runs import evaluation_record

NUM_STEPS, NUM_GROUPS, NUM_RESPONSES, NUM_TOKENS = 3, 4, 4, 6
CONFIG: dict[str, Any] = {
    "run": {"seed": 1, "folder": "runs/x"},
    "observe": {"saved_groups": "all"},
    "sampling": {"responses_per_prompt": NUM_RESPONSES},
    "algorithm": {"responses_per_mini_batch": 8, "passes": 1},
    "checkpoint": {"every": 1},
    "rollout": {"num_engines": 1},
}
NUM_LAYERS = 2
SHAPES = {
    "decoder.final_layernorm.weight": (4,),
    "decoder.layers.mlp.linear_fc2.weight": (NUM_LAYERS, 4, 6),
    "decoder.layers.self_attention.linear_qkv.weight": (NUM_LAYERS, 8, 4),
    "embedding.word_embeddings.weight": (10, 4),
}
"""Stored tensors of a small model, not in the order of the model, as ranks write them."""
MOMENT = "optimizer.state.exp_avg."

Tensors = dict[str, Tensor]


def record(folder: Path) -> Path:
    """Write the run; each call writes the same numbers."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with MetricsLog(folder) as log:
        log.record_evaluation(evaluation_record(0))
        for step in range(1, NUM_STEPS + 1):
            values: dict[str, int | float | None] = dict.fromkeys(METRIC_NAMES, 0.5)
            log.record(values | {"step": step, "groups/kept": NUM_GROUPS, "policy/lr": 1e-5})
            write_rollouts(rollouts_path(folder, step), _groups(step))
            write_checkpoint(folder, step, tensors(step))
        log.record_evaluation(evaluation_record(NUM_STEPS))
    return folder


def copy_of(run: Path, folder: Path) -> Path:
    """Return a copy with files that an edit may replace."""
    return Path(shutil.copytree(run, folder, copy_function=shutil.copy))


def _groups(step: int) -> list[SavedGroup]:
    first = NUM_GROUPS * (step - 1)
    return [_group(step, index) for index in range(first, first + NUM_GROUPS)]


def _group(step: int, index: int) -> SavedGroup:
    group = saved_group(
        *(_response(step, index, number) for number in range(NUM_RESPONSES)), prompt_index=index
    )
    prompt = Prompt(f"id-{index}", (("user", f"{index}+1=?"),), str(index + 1), "test")
    return replace(group, step=step, prompt=prompt, prompt_ids=(5, 100 + index, 7))


def _response(step: int, index: int, number: int) -> SavedResponse:
    random = np.random.default_rng([step, index, number])
    text = "".join(map(str, random.integers(0, 10, NUM_TOKENS)))
    old = -random.random(NUM_TOKENS, dtype=np.float32)
    return saved_response(
        text,
        logprobs=old,
        logprobs_old=old,
        logprobs_update=old - np.float32(0.01),
        policy_versions=np.full(NUM_TOKENS, step - 1, dtype=np.int32),
        correct=number < 2,
        reward=1.0 if number < 2 else -1.0,
        shaped_reward=1.0 if number < 2 else -1.0,
        penalty=0.0,
        advantage=1.0 if number < 2 else -1.0,
    )


def tensors(step: int) -> Tensors:
    """Return the weights and moments after a step; step 0 is the start."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, shape in SHAPES.items():
        start, change = (torch.randn(shape, generator=generator) for _ in range(2))
        found[name] = start + 0.01 * step * change
        found[MOMENT + name] = step * change
    return found


def write_checkpoint(folder: Path, step: int, values: Tensors) -> None:
    """Write or replace the checkpoint of a step."""
    store = CheckpointStore(folder / CHECKPOINTS, keep=9)
    shutil.rmtree(store.folder / f"step-{step}", ignore_errors=True)
    save_checkpoint(store, step, saved(values), {})


def edit_groups(
    folder: Path, step: int, edit: Callable[[list[SavedGroup]], list[SavedGroup]]
) -> None:
    """Replace the saved groups of a step."""
    path = rollouts_path(folder, step)
    write_rollouts(path, edit(list(read_rollouts(path))))


def edit_response(folder: Path, step: int, place: int, number: int, **values: object) -> None:
    """Replace fields of one response, of its `Response` and of its `Score`."""

    def edit(groups: list[SavedGroup]) -> list[SavedGroup]:
        responses = list(groups[place].responses)
        responses[number] = with_values(responses[number], **values)
        groups[place] = replace(groups[place], responses=tuple(responses))
        return groups

    edit_groups(folder, step, edit)


def with_values(saved: SavedResponse, **values: object) -> SavedResponse:
    """Return the response with other values, whichever object has them."""
    for name in ("response", "score"):
        part = getattr(saved, name)
        own = {k: v for k, v in values.items() if k in {field.name for field in fields(part)}}
        saved = replace(saved, **{name: replace(part, **own)})
        values = {k: v for k, v in values.items() if k not in own}
    return replace(saved, **values)


def edit_metrics(folder: Path, step: int, **changes: float | None) -> None:
    """Change metrics of a step; a name has `__` for its slash."""
    records = read_metrics(folder)
    for one in records:
        if one["step"] == step:
            one |= {name.replace("__", "/"): value for name, value in changes.items()}
    lines = (json.dumps(one) + "\n" for one in records)
    (folder / METRICS_FILE).write_text("".join(lines), encoding="utf-8")


def edit_config(folder: Path, section: str, key: str, value: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config[section][key] = value
    (folder / "config.json").write_text(json.dumps(config))
