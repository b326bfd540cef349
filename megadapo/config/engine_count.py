"""How many engines `rollout.num_engines = "auto"` means."""

from __future__ import annotations

from typing import Any

from megadapo.cluster.config import ClusterConfig
from megadapo.cluster.this_node import has_gpu
from megadapo.errors import ConfigError
from megadapo.rollout.config import RolloutConfig
from megadapo.trainer.config import TrainerConfig

AUTO = "auto"
NUM_ON_CPU = 2
"""A model that a CPU can train gains more from a second engine than from a second thread."""


def with_number_of_engines(table: dict[str, Any]) -> dict[str, Any]:
    """A recipe of all sections, with a number where it leaves the number of engines open."""
    rollout = table["rollout"]
    if not isinstance(rollout, dict) or rollout.get("num_engines") != AUTO:
        return table
    return table | {"rollout": rollout | {"num_engines": _count(table)}}


def _count(table: dict[str, Any]) -> int:
    try:
        cluster = ClusterConfig.model_validate(table["cluster"])
        trainer = TrainerConfig.model_validate(table["trainer"])
        rollout = RolloutConfig.model_validate(table["rollout"] | {"num_engines": 1})
    except ConfigError:
        return 1  # what is wrong is said where the sections are checked
    if cluster.device == "cpu" or (cluster.device == "auto" and not has_gpu()):
        return NUM_ON_CPU
    return max(1, trainer.num_ranks // rollout.ranks_per_engine)
