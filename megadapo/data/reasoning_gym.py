"""Items of the package reasoning-gym as prompts: `reasoning-gym:WHAT:SPLIT:NUM[:SEED]`.

WHAT is the name of a dataset, or a TOML file with a table for each of several tasks. Some datasets
depend on PYTHONHASHSEED, so another process makes the items. The extra_info of a prompt says how
its item is made again, because an item does not survive JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megadapo.errors import DataError

NAME = "reasoning-gym"
"""Beginning of a source, and data_source of its prompts."""
INSTALL = "pip install -e '.[reasoning-gym]' in the folder of megadapo"
# item i of a dataset depends on the sum of its seed and i, which must stay below 2**32
MAX_ITEMS = 1 << 20
MAX_SEED = (1 << 11) - 1
FIRST_SEED = {"train": 0, "held_out": 1 << 31}
"""Seed of a split's first item. Seeds of a source are MAX_ITEMS apart, so none share an item."""

REFUSED = {
    "codeio": "its items depend on the order in which they are made",
    "coin_flip": "its scorer accepts the first digit of the answer",
    "composite": "name a TOML file with the tasks instead",
    "game_of_life_halting": "its scorer accepts any text as the answer",
    "propositional_logic": "its scorer accepts a copy of a premise",
}
"""Datasets that cannot be used, with the reasons."""
_ARITHMETIC = r"\d{1,30}(?!\d)|\*(?!\*)|/(?!/)|[-+()\s]"
_EXPONENT = r"\d{1,2}(?:\.\d{1,4})?(?![\d.])"
# without towers of powers, whose digits would fill the memory
_POWER = rf"\*\*\s*(?:-?{_EXPONENT}|\((?:{_EXPONENT}|[-+/\s])*\))(?!\s*\*\*)"
_NAMES = r"(?:[xXcCE]|pi|exp|log|ln|sqrt|a?sin|a?cos|a?tan)\b"
_INTEGRAL = rf"(?:{_ARITHMETIC}|{_POWER}|E\s*\*\*|{_NAMES}|\.(?=\d))*+"
_DECIMAL = r"-?\d{1,30}(?:\.\d{1,30})?"
ALLOWED = {
    # their scorers call eval
    "binary_matrix": r"[-\d\s,\[\]]*",
    "n_queens": r"[Q_\s,'\"\[\]]*",
    "spiral_matrix": r"[-\d\s,\[\]]*",
    "string_insertion": r"[A-E\s,'\"\[\]]*",
    # their scorers call sympy, which also evaluates functions such as Integral and expand
    "countdown": rf"(?:{_ARITHMETIC})*+",
    "intermediate_integration": _INTEGRAL,
    "polynomial_multiplication": rf"(?:{_ARITHMETIC}|{_POWER}|[a-zA-Z](?!\w|\s*\())*+",
    "puzzle24": rf"(?:{_ARITHMETIC})*+",
    "simple_integration": _INTEGRAL,
    # their scorers accept NaN, or a list without a number
    "complex_arithmetic": r"[-+\d.ij\s()]*",
    "number_sorting": r"[-+\d.\s,'\"\[\]]*",
    "polynomial_equations": rf'""|{_DECIMAL}(?:\s*,\s*{_DECIMAL})*',
}
"""Answers that reach the scorer of a dataset, as patterns; any answer by default."""
TASK_KEYS = ("dataset", "weight", "config")
_SOURCE = re.compile(rf"{NAME}:(.+):([a-z_]+):([0-9]{{1,9}})(?::([0-9]{{1,9}}))?")


@dataclass(frozen=True)
class DatasetShare:
    """A dataset with its configuration and its share of the items."""

    name: str
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weight: float = 1.0


@dataclass(frozen=True)
class Item:
    """All that makes an item again; the extra_info of its prompt."""

    name: str
    """Name of the dataset."""
    config: Mapping[str, Any]
    seed: int
    size: int
    """Number of items of the dataset, on which items of some datasets depend."""
    index: int

    @classmethod
    def of(cls, extra_info: Mapping[str, Any]) -> Self:
        """Return the item of a prompt.

        Raises:
            DataError: the extra_info does not name an item.
        """
        try:
            return cls(**{field.name: extra_info[field.name] for field in dataclasses.fields(cls)})
        except KeyError as error:
            raise DataError(f"the extra_info of the prompt has no {error}") from None


def is_source(source: str) -> bool:
    """Return whether a source names items of reasoning-gym."""
    return source.startswith(f"{NAME}:")


def rows(source: str) -> Iterator[dict[str, object]]:
    """Yield the items of a source as rows in the schema of DAPO-Math-17k.

    Raises:
        DataError: the source, a task or its configuration is wrong, or reasoning-gym is missing.
    """
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise DataError(
            f"{source!r} does not name items of reasoning-gym; write {NAME}:WHAT:SPLIT:NUM or "
            f"{NAME}:WHAT:SPLIT:NUM:SEED, where WHAT is a dataset or a TOML file, for example "
            f"{NAME}:chain_sum:train:4096"
        )
    what, split, num, number = match[1], match[2], int(match[3]), int(match[4] or 0)
    if split not in FIRST_SEED:
        raise DataError(f"{source}: there is no split {split!r}; use train or held_out")
    if not 0 < num <= MAX_ITEMS:
        raise DataError(f"{source}: a split has 1 to {MAX_ITEMS} items, not {num}")
    if number > MAX_SEED:
        raise DataError(f"{source}: the largest seed is {MAX_SEED}")
    tasks = read_tasks(Path(what)) if what.endswith(".toml") else [DatasetShare(what)]
    request = {
        "tasks": [dataclasses.asdict(task) for task in tasks],
        "of": {"seed": FIRST_SEED[split] + number * MAX_ITEMS, "size": num},
    }
    for made in _made_elsewhere(source, request):
        yield {
            "data_source": NAME,
            "prompt": [{"role": "user", "content": made["question"]}],
            "reward_model": {"style": "rule", "ground_truth": made["answer"]},
            "extra_info": made["item"],
        }


def read_tasks(file: Path) -> list[DatasetShare]:
    """Read tasks from a TOML file.

    Each table is a task; its `dataset` is the table's name by default, its `weight` 1 and its
    `config` empty.

    Raises:
        DataError: the file cannot be read, or a table is no task.
    """
    try:
        tables = tomllib.loads(file.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as TOML: {error}") from error
    tasks = []
    for name, table in tables.items():
        place = f"{file}: {name}"
        if not isinstance(table, dict):
            raise DataError(f"{place} is no table; write [{name}] for a task")
        for key in table:
            _check_known(key, TASK_KEYS, f"{place} has no key")
        task = DatasetShare(
            table.get("dataset", name), table.get("config", {}), table.get("weight", 1.0)
        )
        if not isinstance(task.name, str) or not isinstance(task.config, dict):
            raise DataError(f"{place}: dataset is a text, config a table")
        if type(task.weight) not in (int, float) or not 0 < task.weight < float("inf"):
            raise DataError(f"{place}.weight = {task.weight!r} must be a number above 0")
        try:
            json.dumps(task.config, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(f"{place}.config cannot be kept in a prompt as JSON: {error}") from None
        tasks.append(task)
    if not tasks:
        raise DataError(f"{file} has no tasks")
    return tasks


def create(name: str, config: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """Create a dataset of reasoning-gym in this process, whose PYTHONHASHSEED must be 0.

    Raises:
        DataError: the package is missing, there is no such dataset, or its configuration is wrong.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(f"reasoning-gym cannot be imported ({error}); run {INSTALL}") from error
    if name in REFUSED:
        raise DataError(f"reasoning-gym's {name} cannot be used: {REFUSED[name]}")
    _check_known(name, sorted(set(DATASETS) - REFUSED.keys()), "reasoning-gym has no dataset")
    keys = [field.name for field in dataclasses.fields(DATASETS[name][1])]
    for key in config:
        of_source = [key for key in keys if key not in ("seed", "size")]
        _check_known(key, of_source, f"the configuration of reasoning-gym's {name} has no key")
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **config)
    except (AssertionError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        shown = str(error) or type(error).__name__
        raise DataError(f"reasoning-gym's {name} refuses {dict(config)}: {shown}") from error


def item_at(dataset: Any, index: int) -> Mapping[str, Any]:
    """Return an item of a dataset, the same one in any order."""
    # list_functions draws from Python's own generator
    random.seed(dataset.seed + index)
    item: Mapping[str, Any] = dataset[index]
    return item


def main() -> None:
    """Write the items of the request in the first argument to stdout, one line of JSON each."""
    lines, request = sys.stdout, json.loads(sys.argv[1])
    # some datasets print
    with contextlib.redirect_stdout(sys.stderr):
        try:
            for made in _make([DatasetShare(**task) for task in request["tasks"]], **request["of"]):
                lines.write(json.dumps(made) + "\n")
        except DataError as error:
            lines.write(json.dumps({"error": str(error)}) + "\n")


def _make(tasks: Sequence[DatasetShare], seed: int, size: int) -> Iterator[dict[str, Any]]:
    datasets = [create(task.name, task.config, seed=seed, size=size) for task in tasks]
    rng, weights = random.Random(f"{NAME}/{seed}"), [task.weight for task in tasks]
    num_made = [0] * len(tasks)
    for number in rng.choices(range(len(tasks)), weights, k=size):
        task, index = tasks[number], num_made[number]
        num_made[number] += 1
        entry = item_at(datasets[number], index)
        # if there is no answer, the scorer needs the item alone
        answer = "" if entry["answer"] is None else entry["answer"]
        item = Item(task.name, task.config, seed, size, index)
        made = {"question": entry["question"], "answer": answer}
        yield {**made, "item": dataclasses.asdict(item)}


def _made_elsewhere(source: str, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the items that another process makes; it ends with this generator."""
    paths = [os.path.abspath(path) for path in sys.path]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, json.dumps(request)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            env={
                **os.environ,
                "PYTHONHASHSEED": "0",
                "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
                "PYTHONIOENCODING": "utf-8",
            },
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if not line.endswith("\n"):
                    # a killed process leaves part of a line
                    break
                made = json.loads(line)
                if "error" in made:
                    raise DataError(f"{source}: {made['error']}")
                yield made
            if process.wait() != 0:
                errors.seek(0)
                last = errors.read().strip().splitlines()[-1:]
                said = "; ".join([*last, f"exit code {process.returncode}"])
                raise DataError(f"{source}: reasoning-gym makes no further item: {said}")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _check_known(name: str, known: Iterable[str], problem: str) -> None:
    known = list(known)
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    raise DataError(f"{problem} {name!r}; {hint}")


if __name__ == "__main__":
    main()
