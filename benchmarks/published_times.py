"""Fit the constants of `megadapo plan` and `simulate` to published times, and forecast the rest.

    python benchmarks/published_times.py        # the table of docs/notes/published-times.md
    python benchmarks/published_times.py --fit  # the best constants for the fitted half

The fitted half is every other row in the order of source, model, card, GPUs and mode.
"""

from __future__ import annotations

import argparse
import math
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megadapo.config import RunConfig, load_config
from megadapo.models.description import describe_model
from megadapo.plan import engine, split, step_time
from megadapo.plan.cards import CARDS, GIB, Card
from megadapo.plan.responses import Lengths, Responses, usual_lengths
from megadapo.plan.split import StepModel

ROWS = Path(__file__).with_name("published-times.toml")
BASE = Path(__file__).parent.parent / "configs" / "qwen2.5-32b.toml"
CONSTANTS = {
    "READ_SHARE": engine,
    "PRODUCT_SHARE": engine,
    "LAYER_S": engine,
    "ALL_REDUCE_S": engine,
    "TRAIN_SHARE": step_time,
    "EXPERT_TRAIN_SHARE": step_time,
    "SWITCH_S": split,
}
"""The fitted constants and their modules."""
Row = dict[str, Any]


def read_rows() -> list[Row]:
    """Return the published rows, with their cards and models, in the order of the fit."""
    data = tomllib.loads(ROWS.read_text(encoding="utf-8"))
    keys = ("source", "model", "card", "gpus", "mode")
    rows = sorted(data["rows"], key=lambda row: [row[key] for key in keys])
    for place, row in enumerate(rows):
        row["is_fitted"] = place % 2 == 0
        row["card"] = _card(row["card"], data["cards"])
        row["description"] = describe_model(data["models"][row["model"]])
        row["config"] = _recipe(row, load_config(str(BASE), []))
        lengths, prompt = _lengths(row), row["prompt_tokens"]
        row["responses"] = Responses.of(row["config"], lengths, prompt_tokens=prompt)
    return rows


def forecast(row: Row) -> float:
    """Return the seconds of a row by the plan's model."""
    steps = StepModel(row["config"], row["description"], row["card"], row["responses"])
    seconds = steps.rollout_seconds if row["mode"] == "response" else steps.step_seconds
    return seconds(steps.own_split(), row["config"].sampling)


def errors(rows: list[Row]) -> np.ndarray:
    """Return forecast / published - 1 of each row."""
    return np.array([forecast(row) / row["seconds"] - 1.0 for row in rows])


def fit(rows: list[Row]) -> dict[str, float]:
    """Return the constants with the smallest mean square of logarithmic errors.

    Each constant in turn goes a step up or down, in steps that shrink from 30 % to 1 %.
    """
    values = {name: getattr(module, name) for name, module in CONSTANTS.items()}
    best, size = _loss(values, rows), 0.3
    while size > 0.01:
        tried = [
            values | {name: min(values[name] * factor, 0.9 if "SHARE" in name else math.inf)}
            for name in values
            for factor in (1.0 + size, 1.0 / (1.0 + size))
        ]
        loss, found = min(((_loss(one, rows), one) for one in tried), key=lambda pair: pair[0])
        if loss < best:
            best, values = loss, found
        else:
            size /= 2
    return values


def table(rows: list[Row]) -> str:
    """Return the rows and their forecasts as a table in Markdown."""
    lines = [
        "| source | run | published | forecast | error | in the fit |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row, error in zip(rows, errors(rows), strict=True):
        run = f"{row['model']}, {row['gpus']} {row['card'].name}, {row['mode']}"
        seconds = forecast(row)
        digits = 0 if seconds > 100 else 1
        lines.append(
            f"| [{row['source']}]({row['address']}) | {run} | {row['given']} | "
            f"{seconds:,.{digits}f} s | {error:+.0%} | {'yes' if row['is_fitted'] else 'no'} |"
        )
    return "\n".join(lines)


def summary(rows: list[Row]) -> str:
    """Return the median and the largest error of both halves."""
    parts = []
    for name, is_fitted in (("fitted", True), ("not fitted", False)):
        found = np.abs(errors([row for row in rows if row["is_fitted"] == is_fitted]))
        parts.append(f"{name}: median {np.median(found):.0%}, largest {found.max():.0%}")
    return "; ".join(parts)


def _card(name: str, others: dict[str, Any]) -> Card:
    if name in CARDS:
        return CARDS[name]
    sheet = others[name]
    return Card(
        name=name,
        device=name,
        memory_bytes=int(sheet["memory_gib"] * GIB),
        flops=sheet["flops"],
        memory_bandwidth=sheet["memory_bandwidth"],
        link_bandwidth=math.nan,
    )


def _recipe(row: Row, base: RunConfig) -> RunConfig:
    """Return a recipe with the row's sizes; no run could start with it."""
    tp, cp, ep, pp = row.get("trainer", (1, 1, 1, 1))
    engine_tp = row["engine_tensor_parallel"]
    num_train_gpus = row["gpus"] - (
        row["engine_gpus"] if row["mode"] in ("async", "one_step_off") else 0
    )
    mode = "sync" if row["mode"] == "response" else row["mode"]
    number = row["prompts"] * row["group"]
    replace: dict[str, dict[str, Any]] = {
        "rollout": {
            "num_engines": row["engine_gpus"] // engine_tp,
            "tensor_parallel": engine_tp,
            "max_response_tokens": row["max_tokens"],
            "max_num_seqs": 1024,
            "gpu_memory_utilization": row["memory_utilization"],
        },
        "sampling": {
            "mode": mode,
            "max_staleness": row.get("max_staleness", 0),
            "prompts_per_step": row["prompts"],
            "responses_per_prompt": row["group"],
            "selection": "all",
        },
        # the reference's pass, and the old log-probs' where the run computes them
        "algorithm": {
            # one response less than the batch: more than one update, and so a pass before the first
            "responses_per_mini_batch": max(1, number - (row.get("forwards") == 1)),
            "objective": base.algorithm.objective.model_copy(
                update={"kl_coef": 0.01 if row.get("forwards") == 2 else 0.0}
            ),
        },
        "trainer": {
            "tensor_parallel": tp,
            "context_parallel": cp,
            "expert_parallel": ep,
            "pipeline_parallel": pp,
            "data_parallel": num_train_gpus // (tp * cp * pp),
            "tokens_per_micro_batch": row["max_tokens"] + row["prompt_tokens"],
            "recompute": row.get("recompute") or [],
        },
        "cluster": {"placement": "colocated" if mode == "sync" else "separate"},
    }
    sections = {
        name: getattr(base, name).model_copy(update=values) for name, values in replace.items()
    }
    return base.model_copy(update=sections)


def _lengths(row: Row) -> Lengths:
    """Return lengths that have the row's mean after the limit."""
    if row["mean_tokens"] == row["max_tokens"]:
        return usual_lengths(1000.0 * row["max_tokens"])
    scores = np.random.default_rng(0).standard_normal(20_000)
    low, high = row["mean_tokens"], 100.0 * row["mean_tokens"]
    for _ in range(40):
        middle = math.sqrt(low * high)
        found = usual_lengths(middle)
        too_short = np.minimum(found.at(scores), row["max_tokens"]).mean() < row["mean_tokens"]
        low, high = (middle, high) if too_short else (low, middle)
    return found


def _loss(values: dict[str, float], rows: list[Row]) -> float:
    with _constants(values):
        return float(np.mean([math.log(forecast(row) / row["seconds"]) ** 2 for row in rows]))


@contextmanager
def _constants(values: dict[str, float]) -> Iterator[None]:
    old = {name: getattr(module, name) for name, module in CONSTANTS.items()}
    try:
        for name, module in CONSTANTS.items():
            setattr(module, name, values[name])
        yield
    finally:
        for name, module in CONSTANTS.items():
            setattr(module, name, old[name])


def main() -> None:
    """Print the fit, or the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit the constants, and use them")
    arguments = parser.parse_args()
    rows = read_rows()
    values = {name: getattr(module, name) for name, module in CONSTANTS.items()}
    if arguments.fit:
        values = fit([row for row in rows if row["is_fitted"]])
        print("\n".join(f"{name} = {value:.3g}" for name, value in values.items()), end="\n\n")
    with _constants(values):
        print(table(rows), summary(rows), sep="\n\n")


if __name__ == "__main__":
    main()
