"""The `[data]` section: which prompts a run trains on and is evaluated on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeVar

from pydantic import PositiveInt, field_validator

from megadapo.data.order import Share
from megadapo.data.patterns import check_pattern
from megadapo.errors import ConfigError
from megadapo.section import Section
from megadapo.tokens.tokenizer import TemplateValue

_NAME = re.compile(r"[A-Za-z0-9_-]+")

Item = TypeVar("Item")


PROMPT_MARK = "{prompt}"
"""Stands for the prompt in data.columns.template."""


class DataColumns(Section, title="data.columns"):
    """Columns of the files with prompts, and texts around each prompt. Without these keys columns
    are found by their usual names, and prompts are taken as they are. A dotted name leads into a
    table, as in reward_model.ground_truth."""

    prompt: str | None = None
    """Column of the prompt, a text or a list of chat messages; none: the first of prompt, question,
    problem and messages."""
    ground_truth: str | None = None
    """Column of the gold answer, a text or a number; none: the first of reward_model.ground_truth,
    ground_truth, answer and solution."""
    data_source: str | None = None
    """Column with the name of a row's collection; none: data_source, and without such a column the
    name of the file, folder or Hub dataset."""
    ground_truth_pattern: str | None = None
    """Regular expression (RE2's syntax) that finds the answer in the gold text: in the last line
    that it matches, its first group or the whole match. none: "^#### (.+)" if every gold text of
    the file has such a line, as in GSM8K, else the whole text; "": always the whole text."""
    system: str | None = None
    """System prompt, put before each prompt."""
    template: str | None = None
    """Text with {prompt}, which becomes the last message of the user."""
    examples: str | None = None
    """File of few-shot examples, put before each prompt as turns: rows with messages, or with
    prompt and response, as megadapo sft reads them. The template is put around their prompts too;
    messages stay as they are."""

    def conflicts(self) -> Iterator[str]:
        if self.template is not None and PROMPT_MARK not in self.template:
            yield f"data.columns.template = {self.template!r:.60} has no {PROMPT_MARK}"
        if self.ground_truth_pattern:
            key = "data.columns.ground_truth_pattern"
            if problem := check_pattern(key, self.ground_truth_pattern):
                yield problem


class TrainingSource(Section, title="data.train.NAME"):
    """One of several training sources."""

    source: str
    """Prompts, as data.train names those of a single source."""
    weight: float = 1.0
    """Share of the prompts that are taken from it, relative to the other sources' weights."""


class DataConfig(Section, title="data"):
    """Prompts for training and evaluation, and the order they are taken in."""

    train: str | dict[str, str | TrainingSource]
    """Training prompts: a parquet, JSONL or CSV file or a folder of them, a Hub dataset
    ORG/NAME[@REVISION][/PATH], or a built-in task NAME:SPLIT:NUM[:SEED]. NAME is arithmetic (sums
    of three terms), arithmetic-chain (3 to 40 terms, so lengths have a long tail),
    arithmetic-styles (3 to 7, in a wordy or a short way) or reasoning-gym:WHAT. WHAT is a dataset
    of that package or a TOML file with several (docs/rollouts.md). A table of names has several
    sources, such as {math = "a.jsonl", code = {source = "b.jsonl", weight = 0.5}}: prompts are
    taken in proportion to the weights, which are 1 by default, and a source with few prompts
    repeats earlier."""
    held_out: str | dict[str, str] | None = None
    """Evaluation prompts, named in the same ways; none means that the run is not evaluated. A table
    of names has several sets, each with its own accuracy; the run's accuracy is their mean, with
    the same weight for each set."""
    overlap: Literal["warn", "drop"] = "warn"
    """Whether training prompts that are also held-out problems are reported, or left out of
    training and counted."""
    columns: DataColumns = DataColumns()
    chat_template_kwargs: dict[str, TemplateValue] = {}
    """Variables that the model's chat template reads, such as {enable_thinking = false} for Qwen3
    or {date_string = "26 Jul 2024"} for Llama 3."""
    max_prompt_tokens: PositiveInt = 2048
    """Longest prompt, in tokens after the chat template."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """Whether a prompt above max_prompt_tokens stops the run or is dropped and counted."""
    shuffle: bool = True
    """Take the prompts in a new random order in each epoch, drawn from run.seed."""

    @field_validator("train", mode="before")
    @classmethod
    def _name_wrong_keys(cls, value: object) -> object:
        """Check each source's table, as the error of a union would name no key in it."""
        problems: list[str] = []
        for name, one in value.items() if isinstance(value, dict) else ():
            known = TrainingSource.model_fields
            if isinstance(one, dict) and (unknown := one.keys() - known):
                hint = f"unknown key; known here: {', '.join(known)}"
                problems += [f"data.train.{name}.{key}: {hint}" for key in sorted(unknown)]
            elif isinstance(one, dict):
                try:
                    TrainingSource.model_validate(one)
                except ConfigError as error:
                    problems.append(str(error).replace("data.train.NAME", f"data.train.{name}"))
            elif not isinstance(one, str | TrainingSource):
                kind = type(one).__name__
                problems.append(f"data.train.{name}: expected str or a table, found {kind}")
        if problems:
            raise ValueError("\n".join(problems))
        return value

    def conflicts(self) -> Iterator[str]:
        yield from _bad_names("data.train", self.train)
        yield from _bad_names("data.held_out", self.held_out)
        for name in self.chat_template_kwargs:
            if not name.isidentifier():
                yield f"data.chat_template_kwargs: {name!r} is no name of a variable"
        for key, source in self.train_sources.items():
            if not source.source.strip():
                yield f"{key} is empty; name a file, a Hub dataset or arithmetic:..."
            if source.weight <= 0.0:
                yield f"{key}.weight = {source.weight:g} must be above 0"
        for key, held_out in self.held_out_sources.items():
            if not held_out.strip():
                yield f"{key} is empty; leave it out to run without evaluation"

    @property
    def train_sources(self) -> dict[str, TrainingSource]:
        """Training sources by their dotted keys; `data.train` if there is one without a name."""
        if isinstance(self.train, str):
            return {"data.train": TrainingSource(source=self.train)}
        return {
            f"data.train.{name}": TrainingSource(source=one) if isinstance(one, str) else one
            for name, one in self.train.items()
        }

    @property
    def held_out_sources(self) -> dict[str, str]:
        """Held-out sets by their dotted keys; `data.held_out` if there is one without a name."""
        if self.held_out is None:
            return {}
        if isinstance(self.held_out, str):
            return {"data.held_out": self.held_out}
        return {f"data.held_out.{name}": source for name, source in self.held_out.items()}

    def load_train(self, load: Callable[[str], Sequence[Item]]) -> tuple[list[Item], list[Share]]:
        """Return the items of all training sources, one source after another, and their shares."""
        items: list[Item] = []
        shares = []
        for key, one in self.train_sources.items():
            loaded = load(one.source)
            items += loaded
            shares.append(Share(_name(key), len(loaded), one.weight))
        return items, shares

    def load_held_out(self, load: Callable[[str], Sequence[Item]]) -> dict[str, Sequence[Item]]:
        """Return the items of each held-out set by its name, empty for one without a name."""
        return {_name(key): load(source) for key, source in self.held_out_sources.items()}


def _name(key: str) -> str:
    """Return the name in the dotted key of a source; empty for one without a name."""
    return "".join(key.split(".")[2:])


def _bad_names(key: str, value: object) -> Iterator[str]:
    if not isinstance(value, dict):
        return
    if not value:
        yield f"{key} is an empty table; name at least one source"
    for name in value:
        if not _NAME.fullmatch(name):
            yield f"{key}: {name!r} cannot be a name; use letters, digits, - and _"
