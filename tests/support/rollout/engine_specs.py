"""Specs of engines, which most tests need only a part of."""

from pathlib import Path
from typing import Any

from megadapo.rollout.config import RolloutConfig
from megadapo.rollout.engine.spec import EngineSpec


def engine_spec(**changes: Any) -> EngineSpec:
    """Return the spec of a CPU engine that waits for a trainer's weights, with `changes`."""
    defaults = {
        "index": 0,
        "model": "none",
        "dtype": "float32",
        "max_model_len": 64,
        "weights_from": "trainer",
        "config": RolloutConfig(),
        "gpus": (),
        "shares_gpus": True,
        "log_file": Path("engine-0.log"),
    }
    return EngineSpec(**{**defaults, **changes})
