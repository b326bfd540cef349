"""The difference between the configurations of a checkpoint and of the run that resumes from it."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from megadapo.config import RunConfig, to_dict
from megadapo.errors import ConfigError
from megadapo.observe.run_records import RunRecords, leaves
from megadapo.run.state.checkpoint import Checkpoint

RESERVE_KEYS = (
    *("data.train", "data.columns", "data.chat_template_kwargs"),
    *("data.max_prompt_tokens", "data.overlong_prompts"),
    *("reward.rule", "reward.pattern", "reward.symbolic", "reward.functions"),
    *(
        "rollout.temperature",
        "rollout.max_response_tokens",
        "rollout.environments",
    ),
    *("sampling.responses_per_prompt", "sampling.selection", "sampling.branching"),
    "sampling.accuracy_range",
)
"""Keys that decide how a group is sampled, scored or selected."""
SAMPLING_KEYS = (
    *RESERVE_KEYS,
    *("run.seed", "data.shuffle", "model.dtype", "rollout.quantization", "rollout.vllm"),
    "trainer.router_replay",
)
"""Keys that decide a group's tokens, log-probs and scores, given the weights. Groups that wait in a
journal or a checkpoint are used only if none has changed."""
MODEL_KEYS = ("model.path", "model.init", "trainer.router_aux_loss_coef")
"""Keys that decide which model is trained, and its loss beside the policy's."""
LEARNING_KEYS = (
    *RESERVE_KEYS,
    *MODEL_KEYS,
    *("run.seed", "data.shuffle", "data.overlap", "sampling.mode", "sampling.prompts_per_step"),
    *("sampling.max_staleness", "algorithm", "critic.path", "critic.warmup"),
)
"""Keys and tables that decide what is learned; the others decide where, how fast and what is
shown."""
SUPERVISED_KEYS = (
    *MODEL_KEYS,
    *("data.train", "data.columns", "data.chat_template_kwargs"),
    *("data.max_prompt_tokens", "data.overlong_prompts"),
    *("rollout.max_response_tokens", "run.seed", "data.shuffle", "supervised"),
)
"""Keys and tables that decide what is learned from rows of data."""
MAX_LISTED = 5
"""Number of changed files that one message lists."""
DATA_KEYS = ("data.train", "data.shuffle", "run.seed", "algorithm.pretraining.data")
"""Keys of the training data and its order."""
START_KEYS = ("run.resume", "run.folder")
"""Keys that each start chooses."""


def check_config_diff(
    config: RunConfig,
    checkpoint: Checkpoint,
    *,
    accepted: Collection[str] = (),
    keys: tuple[str, ...] = LEARNING_KEYS,
    models: Mapping[str, Mapping[str, str]] | None = None,
) -> list[str]:
    """Compare a configuration, and the models it names, with those of the run of a checkpoint.

    A checkpoint from another folder starts a new run, whose changes are only listed.

    Args:
        accepted: keys and tables that may change although they decide what is learned.
        keys: keys and tables that decide what is learned.
        models: files of the models; a path may change to one with equal files.

    Returns:
        One line for each changed key.

    Raises:
        ConfigError: a run in its own folder would learn something else, and a key of it is not
            accepted.
    """
    changes = {
        key: f"{json.dumps(before)} -> {json.dumps(after)}"
        for key, (before, after) in changed_keys(checkpoint.config, to_dict(config)).items()
    }
    equal = set()
    for key, files in (models or {}).items():
        before = checkpoint.models.get(key)
        if before == files:
            equal.add(key)
        elif before is not None:
            names = [name for name in {**before, **files} if before.get(name) != files.get(name)]
            listed = f"other {', '.join(names[:MAX_LISTED])} than at the start of the run"
            changes[key] = f"{changes[key]}, {listed}" if key in changes else listed
    refused = [
        key
        for key in changes
        if _within(key, keys) and not _within(key, tuple(accepted)) and key not in equal
    ]
    if refused and _is_own(config, checkpoint):
        raise ConfigError(
            "\n".join(
                [
                    f"the run in {config.run.folder} would learn something else with these "
                    "changes:",
                    *(f"  {key}: {changes[key]}" for key in refused),
                    "undo them, choose another run.folder, or add "
                    f"--accept-changes={','.join(refused)}",
                ]
            )
        )
    return [f"changed: {key}: {line}" for key, line in changes.items()]


def _is_own(config: RunConfig, checkpoint: Checkpoint) -> bool:
    """Return whether the run resumes in the folder of the run that wrote the checkpoint."""
    return checkpoint.path.parent.parent.resolve() == config.run.folder.resolve()


def accepts_other_data(
    config: RunConfig, checkpoint: Checkpoint, accepted: Collection[str]
) -> bool:
    """Return whether a resumed run may have other prompts, texts or rows than its checkpoint's."""
    is_named = any(_within(key, tuple(accepted)) for key in DATA_KEYS)
    return is_named or not _is_own(config, checkpoint)


def check_accepted(config: RunConfig, accepted: Collection[str]) -> None:
    """Raise ConfigError unless all names are keys or tables of the configuration, old or new."""
    tables = (to_dict(config), RunRecords(config.run.folder).config)
    known = [key for table in tables for key, _ in leaves(table)]
    for name in accepted:
        if not any(_within(key, (name,)) or _within(name, (key,)) for key in known):
            raise ConfigError(f"--accept-changes={name}: there is no such key or section")


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return both values of each dotted key that differs, without the keys of a start."""
    # JSON has no tuples, so both sides have lists
    before, after = (dict(leaves(json.loads(json.dumps(plain)))) for plain in (old, new))
    return {
        key: (before.get(key), after.get(key))
        for key in after | before
        if before.get(key) != after.get(key) and key not in START_KEYS
    }


def decides_learning(key: str) -> bool:
    """Return whether a dotted key decides what is learned."""
    return _within(key, (*LEARNING_KEYS, *SUPERVISED_KEYS))


def samples_digest(config: RunConfig) -> str:
    """Return a digest of everything that sampled groups depend on except the weights.

    It covers the modules of reward functions, but not what these import.
    """
    found = {key: value for key, value in leaves(to_dict(config)) if _within(key, SAMPLING_KEYS)}
    sources = [_source_digest(function.function) for function in config.reward.functions]
    return hashlib.sha256(json.dumps([found, sources], sort_keys=True).encode()).hexdigest()


def _source_digest(function: str) -> str | None:
    """Return a hash of the file with MODULE:FUNCTION, which is not imported; None without one."""
    module, colon, _ = function.partition(":")
    parts = module.split(".") if colon else []
    folders: list[str] | None = [*sys.path, ""]
    spec = None
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:end]), folders)
        folders = [] if spec is None else spec.submodule_search_locations
    if spec is None or spec.origin is None:
        return None
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()


def _within(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
