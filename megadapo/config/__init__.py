"""The whole configuration of a run: all its sections, recipes and overrides, and the checks."""

from megadapo.config.run_config import (
    RunConfig,
    RunSection,
    from_dict,
    load_config,
    to_dict,
    to_toml,
)

__all__ = ["RunConfig", "RunSection", "from_dict", "load_config", "to_dict", "to_toml"]
