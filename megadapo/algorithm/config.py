"""What a DAPO step does with its rewards: the `[algorithm]` section."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megadapo.algorithm.objective import PolicyObjective
from megadapo.errors import ConfigError

Aggregation = Literal[
    "token-mean",
    "group-token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-sum-token-mean",
    "token-sum",
]


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Advantages, reward shaping, loss reduction and mini-batches; defaults are the paper's."""

    responses_per_mini_batch: int = 512
    """Responses behind one optimizer update; a multiple of sampling.responses_per_prompt."""
    loss_aggregation: Aggregation = "token-mean"
    """How token losses are reduced over a mini-batch (see algorithm/loss_weights.py)."""
    normalize_by_std: bool = True
    """Divide group advantages by the group's standard deviation (False: Dr. GRPO)."""
    overlong_buffer: int = 4096
    """Tokens before rollout.max_response_tokens over which the length punishment grows; 0: none."""
    overlong_factor: float = 1.0
    """Scale of the soft overlong punishment."""
    overlong_filtering: bool = False
    """Leave truncated responses out of the loss instead of punishing them."""
    objective: PolicyObjective = field(default_factory=PolicyObjective)
    """The per-token objective."""

    def __post_init__(self) -> None:
        if self.responses_per_mini_batch < 1:
            raise ConfigError("algorithm.responses_per_mini_batch must be at least 1")
        if self.overlong_buffer < 0 or self.overlong_factor < 0:
            raise ConfigError(
                "algorithm.overlong_buffer and algorithm.overlong_factor must not be negative"
            )
        if self.overlong_filtering and self.overlong_buffer > 0:
            raise ConfigError(
                "algorithm.overlong_filtering = true leaves truncated responses out of the loss, "
                "so the soft punishment cannot reach them: set algorithm.overlong_buffer = 0, or "
                "turn algorithm.overlong_filtering off"
            )
