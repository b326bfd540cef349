"""Types that both processes of `megadapo bench step` use; importable in TRL's environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megadapo.rewards.dapo_math import Rule


@dataclass(frozen=True, kw_only=True)
class TrlSettings:
    """A recipe's step in terms of TRL."""

    model: str
    folder: str
    prompts: list[tuple[list[tuple[str, str]], str]]
    """Messages as (role, content) and gold answer of each prompt, in the recipe's order."""
    rule: Rule
    responses_per_prompt: int
    responses_per_mini_batch: int
    updates_per_step: int
    max_steps: int
    max_response_tokens: int
    overlong_buffer: int
    overlong_factor: float
    temperature: float
    top_p: float
    clip_low: float
    clip_high: float
    lr: float
    warmup_steps: int
    weight_decay: float
    betas: tuple[float, ...]
    eps: float
    grad_clip: float
    seed: int
    num_threads: int
    trl_arguments: dict[str, Any]
    """Additional settings of GRPOConfig."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One whole step of one side: rollout, scoring, updates, and new weights for the next step."""

    seconds: float
    rollout_s: float
    """Time before the first update; it includes TRL's old log-probs, but not ours."""
    num_answers: int
    """Answers trained on."""
    num_tokens: int
    """Number of generated tokens."""
    accuracy: float
