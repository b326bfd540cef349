"""What a rollout engine is started from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megadapo.rollout.config import RolloutConfig
from megadapo.rollout.engine.platform import EnginePlatform

WeightDtype = Literal["float32", "bfloat16"]
"""Type of an engine's weights and activations."""

WeightsFrom = Literal["folder", "trainer"]
"""Whether an engine loads the model's weights, or waits for a trainer to publish its own."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Everything one engine is started from."""

    index: int
    model: str
    """Hugging Face folder or Hub name."""
    dtype: WeightDtype
    max_model_len: int
    """Longest prompt and response together, in tokens."""
    weights_from: WeightsFrom
    config: RolloutConfig
    platform: EnginePlatform
    log_file: Path
    returns_experts: bool = False
    """Whether responses come with the experts of each token."""


def profile_folder(log_folder: Path, index: int) -> Path:
    """Where the ranks of an engine write what they profile, when they are asked to."""
    return log_folder / f"engine-{index}-profile"
