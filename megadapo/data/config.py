"""The `[data]` section: which prompts a run trains on and is evaluated on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import PositiveInt

from megadapo.section import Section


class DataConfig(Section, title="data"):
    """Prompts for training and evaluation, and the order they are taken in."""

    train: str
    """Training prompts: a parquet or JSONL file or a folder of them, a Hub dataset
    ORG/NAME[@REVISION][/PATH], or a built-in task: arithmetic:SPLIT:NUM[:SEED] (sums of three
    terms) or arithmetic-chain:SPLIT:NUM[:SEED] (3 to 40 terms, so lengths have a long tail)."""
    held_out: str | None = None
    """Evaluation prompts, named in the same ways; none means that the run is not evaluated."""
    max_prompt_tokens: PositiveInt = 2048
    """Longest prompt, in tokens after the chat template."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """Whether a prompt above max_prompt_tokens stops the run or is dropped and counted."""
    shuffle: bool = True
    """Take the prompts in a new random order in each epoch, drawn from run.seed."""

    def conflicts(self) -> Iterator[str]:
        if not self.train.strip():
            yield "data.train is empty; name a file, a Hub dataset or arithmetic:..."
        if self.held_out is not None and not self.held_out.strip():
            yield "data.held_out is empty; leave it out to run without evaluation"
