"""What a DAPO step does with its rewards: the `[algorithm]` section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from megadapo.algorithm.importance import ImportanceConfig
from megadapo.algorithm.objective import PolicyObjective
from megadapo.section import Section

Aggregation = Literal[
    "token-mean",
    "group-token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-sum-token-mean",
    "token-sum",
]


class AlgorithmConfig(Section, title="algorithm"):
    """Advantages, reward shaping, loss reduction and mini-batches; defaults are the paper's."""

    responses_per_mini_batch: PositiveInt = 512
    """Responses behind one optimizer update; a multiple of sampling.responses_per_prompt."""
    loss_aggregation: Aggregation = "token-mean"
    """How token losses are reduced over a mini-batch (see algorithm/loss_weights.py)."""
    normalize_by_std: bool = True
    """Divide group advantages by the group's standard deviation (False: Dr. GRPO)."""
    overlong_buffer: NonNegativeInt = 4096
    """Tokens before rollout.max_response_tokens over which the length punishment grows; 0: none."""
    overlong_factor: NonNegativeFloat = 1.0
    """Scale of the soft overlong punishment."""
    overlong_filtering: bool = False
    """Leave truncated responses out of the loss instead of punishing them."""
    objective: PolicyObjective = PolicyObjective()
    """The per-token objective."""
    importance: ImportanceConfig = ImportanceConfig()
    """Weights of tokens that other weights than the present ones sampled."""

    def conflicts(self) -> Iterator[str]:
        if self.overlong_filtering and self.overlong_buffer > 0:
            yield (
                "algorithm.overlong_filtering = true leaves truncated responses out of the loss, "
                "so the soft punishment cannot reach them: set algorithm.overlong_buffer = 0, or "
                "turn algorithm.overlong_filtering off"
            )
