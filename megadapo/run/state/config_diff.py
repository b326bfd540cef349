"""The difference between the configurations of a run's last start and of this one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megadapo.config import RunConfig, load_config, to_dict
from megadapo.config.recipe import RESOLVED_FILE
from megadapo.errors import ConfigError

RESERVE_KEYS = (
    *("data.train", "data.max_prompt_tokens", "data.overlong_prompts"),
    *("reward.rule", "reward.decide", "reward.functions"),
    *("rollout.temperature", "rollout.max_response_tokens", "rollout.tools"),
    *("sampling.responses_per_prompt", "sampling.selection", "sampling.branching"),
    "sampling.accuracy_range",
)
"""Keys that decide how a group is sampled, scored or selected: groups in the reserve depend on
them."""
SAMPLING_KEYS = (
    *RESERVE_KEYS,
    *("run.seed", "data.shuffle", "model.dtype", "rollout.quantization", "rollout.vllm"),
)
"""Keys that decide a group's tokens, log-probs and scores, given the weights."""
LEARNING_KEYS = (
    *RESERVE_KEYS,
    *("run.seed", "data.shuffle", "sampling.mode", "sampling.prompts_per_step"),
    *("sampling.max_staleness", "algorithm", "critic.path", "critic.warmup"),
)
"""Keys and tables that decide what is learned; the others decide where, how fast and what is
shown."""
START_KEYS = ("run.resume", "run.folder")
"""Keys that each start chooses."""


@dataclass(frozen=True)
class ConfigDiff:
    """The changes between a checkpoint's configuration and the resumed run's."""

    lines: tuple[str, ...] = ()
    """One line for each changed key."""
    keeps_samples: bool = True
    """Whether groups in the checkpoint still match the configuration."""


def check_config_diff(config: RunConfig, checkpoint: Path, *, accept_changes: bool) -> ConfigDiff:
    """Compare a configuration with the one of the run that wrote a checkpoint.

    A checkpoint from another folder starts a new run, whose changes are only listed.

    Raises:
        ConfigError: a run in its own folder would learn something else, and `accept_changes` is
            not set.
    """
    folder = checkpoint.parent.parent
    try:
        before = to_dict(load_config(folder, []))
    except (ConfigError, OSError):
        return ConfigDiff((f"{folder / RESOLVED_FILE} cannot be read: changes are not known",))
    old, new = dict(_leaves(before)), dict(_leaves(to_dict(config)))
    changes = {
        key: f"{json.dumps(old.get(key))} -> {json.dumps(new.get(key))}"
        for key in new | old
        if old.get(key) != new.get(key) and key not in START_KEYS
    }
    learning = [f"  {key}: {line}" for key, line in changes.items() if _within(key, LEARNING_KEYS)]
    own = folder.resolve() == config.run.folder.resolve()
    if learning and own and not accept_changes:
        raise ConfigError(
            "\n".join(
                [
                    f"the run in {folder} would learn something else with these changes:",
                    *learning,
                    "undo them, choose another run.folder, or add --accept-changes",
                ]
            )
        )
    return ConfigDiff(
        tuple(f"changed: {key}: {line}" for key, line in changes.items()),
        keeps_samples=not any(_within(key, RESERVE_KEYS) for key in changes),
    )


def samples_digest(config: RunConfig) -> str:
    """Return a digest of everything that sampled groups depend on except the weights."""
    found = {key: value for key, value in _leaves(to_dict(config)) if _within(key, SAMPLING_KEYS)}
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _leaves(plain: Mapping[str, Any], table: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values."""
    for name, value in plain.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{table}{name}.")
        else:
            yield f"{table}{name}", value


def _within(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
