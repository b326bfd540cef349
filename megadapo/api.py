"""The functions of `import megadapo`, for notebooks and scripts: docs/python.md explains them.

They call what the command line calls. Heavy packages are imported when a function needs them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from megadapo.codec import encode
from megadapo.config import RunConfig, load_config
from megadapo.config.recipe import override_texts, read_table
from megadapo.errors import DataError
from megadapo.observe.files import make_folder, replace_text
from megadapo.observe.metrics.records import EvaluationRecord, MetricRecord
from megadapo.observe.rollouts.files import HELD_OUT_FOLDER, ROLLOUTS_FOLDER
from megadapo.observe.run_records import RunRecords
from megadapo.rewards.workers.by_value import INPUTS, name_object

__all__ = ["RunFolder", "evaluate", "load_config", "train"]


@dataclass
class RunFolder:
    """A run's folder, finished or not; every call reads its files as they are now."""

    folder: Path

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)

    def __fspath__(self) -> str:
        return str(self.folder)

    def metrics(self) -> list[MetricRecord]:
        """Return the metrics of the finished steps, oldest first."""
        return RunRecords(self.folder).steps

    def evaluations(self) -> list[EvaluationRecord]:
        """Return the held-out evaluations, oldest first; step 0 is before training."""
        return RunRecords(self.folder).evaluations

    def responses(self, step: int | None = None, *, held_out: bool = False) -> list[dict[str, Any]]:
        """Return the saved responses of a step, by default the last, each with its prompt.

        `held_out`: those of the evaluation after the step.
        """
        run, name = RunRecords(self.folder), HELD_OUT_FOLDER if held_out else ROLLOUTS_FOLDER
        groups = run.groups(run.step_with_groups(step, name), name)
        return [
            {**encode(group.prompt), **response, "prompt_index": group.prompt_index}
            for group in groups
            for response in encode(group, readable=True)["responses"]
        ]

    def export(self, destination: Path | str, *, step: int | None = None) -> None:
        """Write a checkpoint, by default the newest, as a folder for vLLM and transformers."""
        from megadapo.run.export.export import export_checkpoint, find_source

        export_checkpoint(find_source(self.folder, step), Path(destination))


Source: TypeAlias = os.PathLike[str] | str | Mapping[str, Any] | RunConfig
Overrides: TypeAlias = Sequence[str] | Mapping[str, Any]
Rows: TypeAlias = str | Path | Mapping[str, Any] | Iterable[Mapping[str, Any]]


def train(
    config: Source,
    *,
    reward: Any = None,
    environment: Any = None,
    train: Rows | None = None,
    held_out: Rows | None = None,
    overrides: Overrides = (),
    accept_changes: Collection[str] = (),
) -> RunFolder:
    """Start or resume a run, train to its last step, and return its folder.

    Args:
        config: a recipe, a run's folder, nested tables, or what `load_config` returns.
        reward: a function, a name of reward.functions, a table of that list, or a list of these.
        environment: the same for a class and rollout.environments.
        train: rows of training prompts, or a value of data.train.
        held_out: rows of held-out problems, or a value of data.held_out.
        overrides: texts as on the command line, or values by dotted key.
        accept_changes: keys that may change although they decide what the resumed run learns.

    Raises:
        RunInterruptedError: an interrupt has stopped the run; the same call continues it.
    """
    from megadapo import loop
    from megadapo.run.state.resume import check_accepted

    checked = checked_config(config, overrides, reward, environment, train, held_out)
    check_accepted(checked, accept_changes)
    loop.train(checked, accept_changes=accept_changes)
    return RunFolder(checked.run.folder)


def evaluate(
    config: Source,
    *,
    reward: Any = None,
    environment: Any = None,
    held_out: Rows | None = None,
    overrides: Overrides = (),
) -> EvaluationRecord:
    """Evaluate a run's newest checkpoint, or a model without one; arguments are those of `train`.

    The responses are in the folder beside the run's whose name ends in "-eval".
    """
    from megadapo.run.evaluate import SUFFIX, evaluate_policy

    given = (reward, environment, None, held_out)
    return evaluate_policy(checked_config(config, overrides, *given, SUFFIX))


def checked_config(
    source: Source,
    overrides: Overrides,
    reward: Any,
    environment: Any,
    train: Rows | None,
    held_out: Rows | None,
    suffix: str = "",
) -> RunConfig:
    """Return the checked configuration of a run; write files of what was given in Python.

    `suffix`: end of the name of their folder, after the name of the run's.
    """
    from megadapo.config.preflight import check_run

    texts = override_texts(overrides)
    run = read_table(source, texts)[0].get("run")
    name = str(run.get("folder")) if isinstance(run, Mapping) else ""
    folder = Path(f"{Path(os.path.expanduser(name))}{suffix}")
    files: dict[str, str] = {}
    values: dict[str, Any] = {
        "reward.functions": _entries(reward, "function", files),
        "rollout.environments": _entries(environment, "environment", files),
    }
    for key, rows in (("train", train), ("held_out", held_out)):
        if rows is not None and not isinstance(rows, str | Path | Mapping):
            file = f"{INPUTS}{key}.jsonl"
            files[file], rows = "".join(_lines(key, rows)), folder / file
        values[f"data.{key}"] = rows
    given = {key: value for key, value in values.items() if value is not None}
    config = load_config(source, [*texts, *override_texts(given)])
    for file, text in files.items():
        make_folder(folder)
        replace_text(folder / file, text, with_folder=True)
    check_run(config)
    return config


def _lines(key: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield rows as lines of JSON."""
    for number, row in enumerate(rows):
        try:
            yield json.dumps(dict(row), allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            problem = "is no mapping of names to values that JSON has"
            raise DataError(f"{key}, row {number} {problem}: {error}") from error


def _entries(given: Any, key: str, files: dict[str, str]) -> list[dict[str, Any]] | None:
    """Return a list of the configuration; `key` names the function or class of an entry."""
    listed = given if isinstance(given, list | tuple) else [given]
    entries = [dict(one) if isinstance(one, Mapping) else {key: one} for one in listed]
    for entry in entries if given is not None else ():
        if not isinstance(entry.get(key, ""), str):
            entry[key] = name_object(entry[key], files)
    return None if given is None else entries
