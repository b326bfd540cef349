"""The whole configuration of a run: all its sections, recipes and overrides, and the checks."""

from megadapo.config.recipe import to_toml
from megadapo.config.run_config import (
    CheckpointConfig,
    RunConfig,
    RunSection,
    from_dict,
    load_config,
    to_dict,
)

__all__ = [
    "CheckpointConfig",
    "RunConfig",
    "RunSection",
    "from_dict",
    "load_config",
    "to_dict",
    "to_toml",
]
