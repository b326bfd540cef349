"""Export of a checkpoint to a folder that vLLM and transformers load.

It reads the checkpoint's files tensor by tensor, without trainer, engine or GPU. The folder's model
card (README.md) has origin, accuracy and recipe.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import ModelCard, ModelCardData

from megadapo import __version__
from megadapo.errors import CheckpointError, ConfigError, DataError
from megadapo.models.description import critic_config, describe_critic
from megadapo.models.folder import read_json, resolve_model_folder
from megadapo.observe.run_records import MODEL_FOLDER, RESOLVED_FILE, RunRecords
from megadapo.observe.tables import print_error
from megadapo.run.state.checkpoint import (
    CHECKPOINTS,
    MANIFEST,
    ROWS_STATE,
    Checkpoint,
    CheckpointStore,
    load,
)
from megadapo.tokens.stops import stop_ids
from megadapo.tokens.tokenizer import read_tokenizer
from megadapo.trainer.types import CRITIC_FOLDER
from megadapo.weights.disk.checkpoint_source import TrainerCheckpoint
from megadapo.weights.disk.conversion import write_hf
from megadapo.weights.disk.export import check_new, new_folder
from megadapo.weights.disk.headers import METADATA_FILE
from megadapo.weights.disk.sources import open_layout
from megadapo.weights.layout.layout import ModelLayout

GENERATION_CONFIG = "generation_config.json"
_END = "eos_token_id"
_SPECIAL_TOKENS = ("bos_token_id", _END, "pad_token_id")
CARD_FILE = "README.md"
CARD_TEMPLATE = Path(__file__).with_name("card.md.jinja")
Kind = Literal["policy", "critic", "reward model"]
RECIPE_SECTIONS = ("run", "model", "data", "reward", "sampling", "algorithm", "evaluation")
"""Sections of the configuration that the card shows."""
_RECIPE_TABLES = (*((name,) for name in RECIPE_SECTIONS), ("trainer", "optimizer"))
_TAGS = {
    "policy": ["dapo", "reinforcement-learning"],
    "fine-tuned": ["sft"],
    "critic": ["ppo", "reinforcement-learning"],
    "reward model": ["reward-model", "reinforcement-learning"],
}
_LOCAL = ("run.folder", "run.resume")
"""Keys of those sections that depend on the machine only."""


@dataclass(frozen=True)
class ExportSource:
    """A verified checkpoint, and its run if that is known."""

    checkpoint: Checkpoint
    run_folder: Path | None
    skipped: tuple[str, ...] = ()
    """One line for each newer checkpoint that is unusable."""

    def kind(self, *, critic: bool = False) -> Kind:
        """Return the model to export: the reward model if the checkpoint has no policy."""
        folder = self.checkpoint.trainer_folder
        if (folder / CRITIC_FOLDER).is_dir() and not (folder / METADATA_FILE).exists():
            return "reward model"
        return "critic" if critic else "policy"

    @property
    def is_fine_tuned(self) -> bool:
        """Whether `megadapo sft` wrote the checkpoint."""
        return ROWS_STATE in self.checkpoint.state and self.kind() == "policy"

    def run_config(self) -> dict[str, Any]:
        """Return the run's resolved configuration as plain values; empty without a run."""
        return {} if self.run_folder is None else RunRecords(self.run_folder).config


def find_source(path: Path, step: int | None = None) -> ExportSource:
    """Return the checkpoint at `path`, or a run's checkpoint of `step` or its newest one.

    Raise CheckpointError if it is missing or damaged.
    """
    path = path.resolve()
    if (path / MANIFEST).is_file() or path.parent.name == CHECKPOINTS:
        if step is not None:
            raise ConfigError(f"--step {step}: {path} is a checkpoint; name the run's folder")
        if not path.is_dir():
            there = CheckpointStore(path.parent, keep=1).steps()
            listed = ", ".join(f"step-{step}" for step in there) or "none"
            raise CheckpointError(f"there is no checkpoint {path}; in that folder: {listed}")
        run = path.parent.parent
        return ExportSource(load(path), run if (run / RESOLVED_FILE).is_file() else None)
    store = CheckpointStore(path / CHECKPOINTS, keep=1)
    steps = store.steps()
    if not steps:
        raise CheckpointError(f"{path} is neither a checkpoint nor a run that has one")
    if step is not None and step not in steps:
        listed = ", ".join(map(str, steps))
        raise CheckpointError(f"{path} has no checkpoint of step {step}; it has those of {listed}")
    run_folder = path if (path / RESOLVED_FILE).is_file() else None
    if step is not None:
        return ExportSource(load(store.folder / f"step-{step}"), run_folder)
    newest, skipped = store.newest()
    assert newest is not None, "there is a step, so a checkpoint or an error"
    return ExportSource(newest, run_folder, tuple(skipped))


def export_checkpoint(
    source: ExportSource,
    destination: Path,
    *,
    model: str | None = None,
    quantize: str | None = None,
    critic: bool = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder with tokenizer, generation config and card.

    Needs memory for one output file and one weight; with `quantize` for the whole model.

    Args:
        model: folder or Hub name of the trained model; None takes the run's model.path.
        quantize: "fp8", or None for the type of training.
        critic: whether to export the critic, as a sequence classifier with one label. A reward
            model is such a one too, and is exported if the checkpoint has no policy.
    """
    for line in source.skipped:
        print_error(f"skipped: {line}")
    kind = source.kind(critic=critic)
    if kind != "policy" and quantize is not None:
        raise ConfigError(f"--quantize works only for a policy, and this exports a {kind}")
    check_new(destination)
    config = source.run_config()
    base_name = model or _trained_model(source.checkpoint.path, config, kind)
    base = _base_folder(base_name, source.run_folder)
    weights = _open_weights(source, base, kind)
    card = _model_card(source, config, base_name, kind=kind, quantized=quantize)
    with new_folder(destination) as partial:
        write_hf(weights, partial, base, quantize=quantize)
        if kind == "policy":
            _complete_generation_config(partial, base)
        else:
            text = json.dumps(critic_config(read_json(partial / "config.json")), indent=2) + "\n"
            (partial / "config.json").write_text(text, encoding="utf-8")
            set_padding(partial)
        (partial / CARD_FILE).write_text(card, encoding="utf-8")


def _open_weights(source: ExportSource, base: Path, kind: Kind) -> TrainerCheckpoint:
    folder = source.checkpoint.trainer_folder
    if kind == "policy":
        return TrainerCheckpoint(folder, open_layout(base))
    if not (folder / CRITIC_FOLDER).is_dir():
        raise CheckpointError(f"{source.checkpoint.path} has no critic: it was trained without one")
    model = describe_critic(read_json(base / "config.json"))
    return TrainerCheckpoint(folder / CRITIC_FOLDER, ModelLayout(model.family, model.shape))


def config_folder(weights: Path, model: str | None) -> Path:
    """Return the folder of config.json and tokenizer for a folder of weights.

    It is the folder itself, or else `model` or the model that the run of the checkpoint trained.
    """
    if (weights / "config.json").is_file():
        return weights
    config, run_folder = {}, None
    if (weights.parent / MANIFEST).is_file():
        source = find_source(weights.parent)
        config, run_folder = source.run_config(), source.run_folder
    return _base_folder(model or _trained_model(weights, config, "policy"), run_folder)


def _trained_model(weights: Path, config: dict[str, Any], kind: Kind) -> str:
    section = config.get("model")
    path = section.get("path") if isinstance(section, dict) else None
    if kind == "critic" and isinstance(own := config.get("critic"), dict):
        path = own.get("path") or path
    if not isinstance(path, str):
        raise ConfigError(
            f"{weights} has no config.json, and no run's {RESOLVED_FILE} names the model that it "
            "was trained from: name that model's folder with --model"
        )
    return path


def _base_folder(name: str, run_folder: Path | None) -> Path:
    """Return the folder of a model, or the run's copy of its files if it is not here any more."""
    copy = None if run_folder is None else run_folder / MODEL_FOLDER
    if copy is not None and copy.is_dir() and not Path(name).is_dir():
        return copy
    try:
        return resolve_model_folder(name, with_weights=False)
    except DataError as error:
        raise DataError(
            f"{error}\nA path is relative to the current folder: call megadapo where the run was "
            "started, or name the model with --model"
        ) from error


def _complete_generation_config(folder: Path, base: Path) -> None:
    """Have other programs stop at the tokens at which the run stopped.

    A base model without a generation config gets one with its special tokens.
    """
    path = folder / GENERATION_CONFIG
    if path.exists():
        tokens = read_json(path)
    else:
        config = read_json(folder / "config.json")
        tokens = {key: config[key] for key in _SPECIAL_TOKENS if config.get(key) is not None}
    known = tokens.get(_END)
    ends = known if isinstance(known, list) else [known] if known is not None else []
    has_tokenizer = any(base.glob("tokenizer*"))
    of_run = stop_ids(read_tokenizer(str(base))) if has_tokenizer else ()
    missing = [end for end in of_run if end not in ends]
    if missing:
        ends = [*ends, *missing]
        tokens[_END] = ends[0] if len(ends) == 1 else ends
    if missing or not path.exists():
        path.write_text(json.dumps(tokens, indent=2) + "\n", encoding="utf-8")


def set_padding(folder: Path) -> None:
    """Delete a padding token that can end a conversation.

    transformers scores the last token that is not padding, so it would read the one before. Without
    a padding token it refuses batches.
    """
    if any(folder.glob("tokenizer*")):
        config = read_json(folder / "config.json")
        if config.get("pad_token_id") in stop_ids(read_tokenizer(str(folder))):
            text = json.dumps(config | {"pad_token_id": None}, indent=2) + "\n"
            (folder / "config.json").write_text(text, encoding="utf-8")


def _model_card(
    source: ExportSource,
    config: Mapping[str, Any],
    base_model: str,
    *,
    kind: Kind,
    quantized: str | None,
) -> str:
    """Return the card of an export.

    `config`: the run's resolved configuration as plain values; may be empty.
    """
    what = "fine-tuned" if source.is_fine_tuned else kind
    is_text = what in ("policy", "fine-tuned")
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation" if is_text else "text-classification",
        tags=["megadapo", *_TAGS[what]],
        # a base model in a folder has no name on the Hub
        base_model=None if Path(base_model).is_dir() else base_model,
    )
    evaluations = [] if source.run_folder is None else RunRecords(source.run_folder).evaluations
    by_step = {record.step: record for record in evaluations}
    held_out = _value(config, "data", "held_out") or ()
    sources = [held_out] if isinstance(held_out, str) else [*dict(held_out).values()]
    sampling = [
        (name.replace("_", "-"), value)
        for name in ("temperature", "top_p")
        if (value := _value(config, "evaluation", name)) is not None
    ]
    card = ModelCard.from_template(
        data,
        template_path=str(CARD_TEMPLATE),
        kind=what,
        name=Path(base_model).name,
        base=_code(base_model),
        step=source.checkpoint.step,
        num_steps=_value(config, "run", "num_steps"),
        quantized=quantized,
        evaluation=by_step.get(source.checkpoint.step),
        base_evaluation=by_step.get(0),
        held_out=[_code(str(one)) for one in sources],
        sampling=sampling,
        recipe="\n".join(line for table in _RECIPE_TABLES for line in _lines(config, table)),
        version=__version__,
    )
    return f"{card}\n"


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
    """Return a text that a pair of backquotes may enclose."""
    return text.replace("`", "'")
