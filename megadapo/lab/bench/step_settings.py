"""What both sides of `megadapo bench step` know; importable in the rival's environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megadapo.rewards.dapo_math import Rule


@dataclass(frozen=True, kw_only=True)
class RivalSettings:
    """One step of a run, as the rival is to take it."""

    model: str
    folder: str
    prompts: list[tuple[list[tuple[str, str]], str]]
    """((role, content) of each message, gold answer), in the order they are asked."""
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
    beta1: float
    beta2: float
    eps: float
    grad_clip: float
    seed: int
    num_threads: int
    trl_arguments: dict[str, Any]
    """More of TRL's own settings."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One whole step of one side: rollout, scoring, all updates, and new weights for the next."""

    seconds: float
    rollout_s: float
    """The part before the first update; TRL's old log-probs are in it, ours are not."""
    num_answers: int
    """Trained on."""
    num_tokens: int
    """Generated."""
    accuracy: float
