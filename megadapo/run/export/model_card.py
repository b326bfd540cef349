"""The model card (README.md) of an export: origin, accuracy and recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import ModelCardData

from megadapo import __version__
from megadapo.observe.metrics.records import EvaluationRecord, read_evaluations

CARD_FILE = "README.md"

Kind = Literal["policy", "critic", "reward model"]
"""Kind of an exported model."""
RECIPE_SECTIONS = ("run", "model", "data", "reward", "sampling", "algorithm", "evaluation")
"""Sections of the configuration that the card shows."""
_RECIPE_TABLES = (*((name,) for name in RECIPE_SECTIONS), ("trainer", "optimizer"))
_TITLES = {
    "policy": "{step} steps of DAPO",
    "critic": "{step} steps of PPO, critic",
    "reward model": "{step} steps as a reward model",
}
_TAGS = {"policy": "dapo", "critic": "ppo", "reward model": "reward-model"}
_VALUE_MODELS = {
    "critic": "The critic after step {step}, initialised from {base}. Its one label is the value "
    "of a state: the expected reward of the response under the policy of that step. Every token "
    "has a value, not only the last.",
    "reward model": "A reward model after step {step}, initialised from {base} and trained on "
    "pairs with the Bradley-Terry loss. Its one label is the score of a conversation, read at the "
    "last token; only differences between answers to one prompt have a meaning.",
}
_LOCAL = ("run.folder", "run.resume")
"""Keys of those sections that depend on the machine only."""


def model_card(
    *,
    base_model: str,
    step: int,
    config: Mapping[str, Any],
    run_folder: Path | None,
    quantized: str | None,
    kind: Kind = "policy",
) -> str:
    """Return the card of one export.

    Args:
        base_model: folder or Hub name of the trained model.
        step: number of rollout steps of training.
        config: the run's resolved configuration as plain values; may be empty.
        run_folder: folder with the run's evaluations, None if there is no run.
        quantized: quantisation of the weights, if any.
        kind: of the exported model; a critic and a reward model cannot answer.
    """
    evaluations = [] if run_folder is None else read_evaluations(run_folder)
    recipe = [line for table in _RECIPE_TABLES for line in _lines(config, table)]
    parts = [
        f"---\n{_front_matter(base_model, kind)}\n---",
        f"# {Path(base_model).name}, {_TITLES[kind].format(step=step)}",
        _what_it_is(base_model, step, config, quantized)
        if kind == "policy"
        else _VALUE_MODELS[kind].format(step=step, base=_code(base_model)),
        _accuracy_table(evaluations, step, config) if kind == "policy" else "",
        "\n".join(["## Recipe", "", "```toml", *recipe, "```"]) if recipe else "",
        f"Written by megadapo {__version__}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(base_model: str, kind: Kind) -> str:
    """Return the metadata block for the Hub."""
    # a base model in a folder has no name on the Hub
    is_folder = Path(base_model).is_dir()
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation" if kind == "policy" else "text-classification",
        tags=["megadapo", _TAGS[kind], "reinforcement-learning"],
        base_model=None if is_folder else base_model,
    )
    return data.to_yaml()


def _what_it_is(
    base_model: str, step: int, config: Mapping[str, Any], quantized: str | None
) -> str:
    planned = _value(config, "run", "num_steps")
    of_all = "" if planned is None else f" of {planned}"
    weights = "unquantised" if quantized is None else f"quantised to {quantized}"
    return (
        f"The weights of {_code(base_model)} after step {step}{of_all} of reinforcement learning "
        f"with DAPO (Decoupled Clip and Dynamic sAmpling Policy Optimization), {weights}."
    )


def _accuracy_table(
    evaluations: list[EvaluationRecord], step: int, config: Mapping[str, Any]
) -> str:
    """Return a table of the held-out accuracy at this step and before training."""
    by_step = {record.step: record for record in evaluations}
    if step not in by_step:
        return "Not evaluated on held-out problems at this step."
    rows = [
        f"| {label} | {record.accuracy:.4f} ± {record.standard_error:.4f} "
        f"| {record.response_length:.1f} |"
        for label, record in (("before training", by_step.get(0)), ("this model", by_step[step]))
        if record is not None
    ]
    record = by_step[step]
    what = f"avg@{record.samples_per_problem} on {record.num_problems} held-out problems"
    held_out = _value(config, "data", "held_out")
    if held_out is not None:
        sources = held_out.values() if isinstance(held_out, dict) else (held_out,)
        what += " of " + ", ".join(_code(str(source)) for source in sources)
    sampling = [
        f"{name.replace('_', '-')} {value}"
        for name in ("temperature", "top_p")
        if (value := _value(config, "evaluation", name)) is not None
    ]
    head = "| | accuracy, with standard error | mean response length (tokens) |\n|---|---|---|"
    return "\n".join([", ".join([what, *sampling]) + ":", "", head, *rows])


def _lines(config: Mapping[str, Any], table: tuple[str, ...]) -> Iterator[str]:
    """Yield `section.key = value` for every value of a table that is set."""
    found = _value(config, *table)
    for key, value in found.items() if isinstance(found, dict) else ():
        name = ".".join((*table, key))
        if isinstance(value, dict):
            yield from _lines(config, (*table, key))
        elif value is not None and name not in _LOCAL:
            yield f"{name} = {json.dumps(value)}"


def _value(config: Mapping[str, Any], *keys: str) -> Any:
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _code(text: str) -> str:
    return f"`{text.replace('`', chr(39))}`"
