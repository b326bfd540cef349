"""What a run's configuration has become since its last start, and whether that may go unsaid."""

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

SAMPLES = (
    *("data.train", "data.max_prompt_tokens", "data.overlong_prompts"),
    *("reward.rule", "reward.decide", "reward.functions"),
    *("rollout.temperature", "rollout.top_p", "rollout.max_response_tokens", "rollout.tools"),
    *("sampling.responses_per_prompt", "sampling.selection", "sampling.branching"),
    *("sampling.min_accuracy", "sampling.max_accuracy"),
)
"""Keys by which a group is asked for, answered, scored or chosen: groups in the reserve are of the
values they had."""
SAMPLED_BY = (*SAMPLES, "run.seed", "data.shuffle", "model.dtype", "rollout.quantization")
"""Keys by which a group has its tokens, log-probs and scores, given the weights."""
MEANING = (
    *SAMPLES,
    *("run.seed", "data.shuffle", "sampling.mode", "sampling.prompts_per_step"),
    *("sampling.max_staleness", "algorithm", "critic.path", "critic.warmup"),
)
"""Keys, or tables, that say what is learnt, by what and from what; the others say where, how fast,
and what is seen of it."""
FREE = ("run.resume", "run.folder")
"""What a new start chooses for itself."""


@dataclass(frozen=True)
class Drift:
    """What changed between a checkpoint's run and the one that goes on from it."""

    lines: tuple[str, ...]
    """A line for each key that changed."""
    keeps_samples: bool
    """Whether groups that wait from before are still what would be sampled."""


def check_drift(config: RunConfig, checkpoint: Path, *, accept_changes: bool) -> Drift:
    """Compare a configuration with that of the run that wrote a checkpoint.

    A run in a folder of its own may be another: only its changes are said.

    Raises:
        ConfigError: the run in this folder would mean something else, and nobody accepts that.
    """
    folder = checkpoint.parent.parent
    before = _configuration_of(folder)
    if before is None:
        return Drift((f"{folder / RESOLVED_FILE} cannot be read: what changed is not known",), True)
    changes = {
        key: f"{json.dumps(old)} -> {json.dumps(new)}"
        for key, old, new in _changed(before, to_dict(config))
        if key not in FREE
    }
    meant = [f"  {key}: {line}" for key, line in changes.items() if _within(key, MEANING)]
    own = folder.resolve() == config.run.folder.resolve()
    if meant and own and not accept_changes:
        raise ConfigError(
            "\n".join(
                [
                    f"{folder} holds a run that means something else:",
                    *meant,
                    "undo that, choose another run.folder, or go on with --accept-changes",
                ]
            )
        )
    return Drift(
        tuple(f"changed: {key}: {line}" for key, line in changes.items()),
        keeps_samples=not any(_within(key, SAMPLES) for key in changes),
    )


def samples_digest(config: RunConfig) -> str:
    """Return a name of all that groups follow from but the weights."""
    found = {key: value for key, value in _leaves(to_dict(config)) if _within(key, SAMPLED_BY)}
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _leaves(plain: Mapping[str, Any], table: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values."""
    for name, value in plain.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{table}{name}.")
        else:
            yield f"{table}{name}", value


def _configuration_of(folder: Path) -> dict[str, Any] | None:
    """The configuration of a run's last start, with the defaults of keys it did not know."""
    try:
        return to_dict(load_config(folder, []))
    except (ConfigError, OSError):
        return None


def _changed(
    before: Mapping[str, Any], after: Mapping[str, Any], table: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys whose values differ, with both values; the keys of both are the same."""
    for name, new in after.items():
        old, key = before[name], f"{table}{name}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _changed(old, new, f"{key}.")
        elif old != new:
            yield key, old, new


def _within(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
