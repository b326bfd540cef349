"""The `[data]` section: which prompts a run trains on and is evaluated on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megadapo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts for training and evaluation, and the order they are taken in."""

    train: str
    """Training prompts: a parquet or JSONL file or a folder of them, a Hub dataset
    ORG/NAME[@REVISION][/PATH], or arithmetic:SPLIT:NUM[:SEED]."""
    held_out: str | None = None
    """Evaluation prompts, named in the same ways; none means that the run is not evaluated."""
    max_prompt_tokens: int = 2048
    """Longest prompt, in tokens after the chat template."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """Whether a prompt above max_prompt_tokens stops the run or is dropped and counted."""
    shuffle: bool = True
    """Take the prompts in a new random order in each epoch, drawn from run.seed."""

    def __post_init__(self) -> None:
        if not self.train.strip():
            raise ConfigError("data.train is empty; name a file, a Hub dataset or arithmetic:...")
        if self.held_out is not None and not self.held_out.strip():
            raise ConfigError("data.held_out is empty; leave it out to run without evaluation")
        if self.max_prompt_tokens < 1:
            raise ConfigError(f"data.max_prompt_tokens = {self.max_prompt_tokens} is not positive")
