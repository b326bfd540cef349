"""Names, examples and links of the pages.

Backticked names of the pages are looked up: files, functions in files, commands with their options,
configuration keys, metrics, errors and make targets.
"""

import argparse
import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from megadapo import errors
from megadapo.cli import build_parser
from megadapo.config import RunConfig, from_dict, load_config
from megadapo.config.problems import known_keys
from megadapo.config.recipe import merge_tables
from megadapo.lab.ablation.rows import RowsFile
from megadapo.observe.metrics.names import METRIC_NAMES
from megadapo.observe.oracles import BOUNDED

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/faults.md")), *DOCS]
MAX_README_LINES = 120
REQUIRED = {
    "run": {"folder": "run", "num_steps": 1},
    "model": {"path": "model"},
    "data": {"train": "problems.jsonl"},
}
"""Keys without a default."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FILE = re.compile(r"((?:[\w.-]+/)*[\w.-]+\.(?:py|c|toml|lock|in|sh|txt))(?::([\w.]+))?")
_FOLDER = re.compile(r"(?:[\w.-]+/)+")
_DOTTED = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")
_METRIC = re.compile(r"[a-z_]+/[a-z_0-9]+")

MADE = (
    *("log.txt", "build/", "rollouts/", "journal/", "tensorboard/", "exports/", "checkpoints/"),
    "logs/",
)
"""Files and folders that a run or make writes."""

per_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in _FENCE.findall(page.read_text()) if name == language]


def spans(page: Path) -> list[str]:
    """Return the texts in single backticks, without line breaks."""
    prose = _FENCE.sub("", page.read_text())
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


def find(name: str) -> Path | None:
    """Return the file or folder of that name, below the repository or below the package."""
    candidates = (ROOT / name, ROOT / "megadapo" / name)
    return next((path for path in candidates if path.exists()), None)


@per_page
def test_links_lead_somewhere(page):
    targets = [t for t in _LINK.findall(page.read_text()) if not t.startswith("https://")]
    missing = [t for t in targets if not (page.parent / t.partition("#")[0]).exists()]
    assert not missing


def test_pages_are_found_from_the_readme():
    found, queue = set(), [ROOT / "README.md"]
    while queue:
        page = queue.pop()
        found.add(page)
        targets = [t.partition("#")[0] for t in _LINK.findall(page.read_text())]
        pages = {(page.parent / t).resolve() for t in targets if t.endswith(".md")}
        queue += [page for page in pages - found if page.exists()]
    assert set(PAGES) <= found


@per_page
def test_files_and_functions_exist(page):
    wrong = [span for span in spans(page) if not _exists(span)]
    assert not wrong


def _exists(span: str) -> bool:
    if span in MADE:
        return True
    if _FOLDER.fullmatch(span):
        return find(span) is not None
    match = _FILE.fullmatch(span)
    if match is None:
        return True
    path = find(match[1])
    return path is not None and (match[2] is None or match[2] in definitions(path))


@cache
def definitions(path: Path) -> frozenset[str]:
    return frozenset(_defined(ast.parse(path.read_text()).body, ""))


def _defined(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _defined(node.body, f"{prefix}{node.name}.")


@per_page
def test_keys_metrics_and_errors_exist(page):
    keys = _keys()
    sections = {key for key in keys if "." not in key}
    areas = {name.partition("/")[0] for name in METRIC_NAMES if "/" in name}
    wrong = []
    for span in spans(page):
        name = span.partition(" ")[0]
        if re.fullmatch(r"\[[a-z_.]+\]", span):
            wrong += [span] * (span[1:-1] not in keys)
        elif _DOTTED.fullmatch(name) and name.partition(".")[0] in sections - {"data"}:
            wrong += [span] * (name not in keys and not _FILE.fullmatch(name))
        elif _METRIC.fullmatch(span) and span.partition("/")[0] in areas and find(span) is None:
            wrong += [span] * (span not in METRIC_NAMES)
        elif re.fullmatch(r"[A-Z]\w+Error|RunInterruptedError", name):
            wrong += [span] * (not hasattr(errors, name.partition(",")[0]))
    assert not wrong


def command_lines(page: Path) -> Iterator[str]:
    """Yield each `megadapo ...` of a page, without a block's second column."""
    texts = [*blocks(page, ""), *blocks(page, "sh")]
    in_blocks = [line for text in texts for line in re.sub(r"\\\n\s*", "", text).splitlines()]
    for line in [*spans(page), *in_blocks]:
        command = re.split(r"\s{2,}|, ", line.strip())[0]
        if re.match(r"megadapo [a-z]", command):
            yield command


@per_page
def test_commands_and_their_options_exist(page):
    # brackets surround optional words
    lines = [line.replace("[", " ").replace("]", " ") for line in command_lines(page)]
    wrong = [line for line in lines if not _is_command(shlex.split(line)[1:])]
    assert not wrong


@per_page
def test_recipes_of_commands_accept_their_keys(page):
    for line in command_lines(page):
        recipe = re.search(r"configs/[\w/.-]+\.toml", line)
        keys = [word[2:] for word in shlex.split(line) if re.match(r"--[a-z_]+\.[a-z_.]+=", word)]
        if recipe and keys:
            load_config(ROOT / recipe[0], keys)


@per_page
def test_toml_is_valid_configuration(page):
    """A page showed a key or a value that no run accepts."""
    for text in blocks(page, "toml"):
        table = tomllib.loads(text)
        if "row" in table:
            RowsFile.model_validate(table)
        else:
            from_dict(merge_tables(REQUIRED, {k: v for k, v in table.items() if k != "extends"}))


# built once: the pages have hundreds of commands
_parser = cache(build_parser)


@cache
def _keys() -> frozenset[str]:
    return frozenset(known_keys(RunConfig))


def _is_command(words: list[str]) -> bool:
    parser = _parser()
    while (inner := _subcommands(parser)) and words:
        names, *words = words
        if not all(name in inner for name in names.split("|")):
            return False
        parser = inner[names.split("|")[0]]
    # argparse shows its options in no other way
    options = {text for action in parser._actions for text in action.option_strings}
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        is_key = option[2:] in _keys() | {"section.key"} and parser.get_default("takes_overrides")
        if not (option in options or is_key):
            return False
    return True


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def test_every_command_is_listed_and_the_readme_is_short():
    listed = (ROOT / "docs" / "README.md").read_text()
    missing = [name for name in _subcommands(build_parser()) if f"\nmegadapo {name}" not in listed]
    assert not missing
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


@per_page
def test_make_targets_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([\w-]+):", makefile, re.M)
    named = [span.split()[1] for span in spans(page) if re.match(r"make [a-z]", span)]
    assert not set(named) - set(targets)


def test_packages_match_lint_contract():
    page = ROOT / "docs" / "architecture.md"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract = settings["tool"]["importlinter"]["contracts"][0]
    assert blocks(page, "layers") == ["\n".join(contract["layers"]) + "\n"]
    named = re.findall(r"`(\w+)[/.]", "".join(re.findall(r"^\|[^|]*\|", page.read_text(), re.M)))
    packages = {part for layer in contract["layers"] for part in layer.split(" | ")}
    assert packages - {"cli"} <= set(named)


def test_every_error_and_oracle_is_explained():
    page = (ROOT / "docs" / "debugging.md").read_text()
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in kinds:
        if kind is not errors.MegadapoError:
            assert f"| `{kind.__name__}`, {kind.exit_code} |" in page
    for key, metric, _ in BOUNDED:
        assert f"`{metric}`, `oracles.{key}`" in page
    assert "| `policy/skipped_updates` |" in page


def run_in(folder: Path, command: list[str], environment: dict[str, str], **options: object):
    keys = {"cwd": folder, "env": os.environ | environment, "capture_output": True, "text": True}
    return subprocess.run(command, **keys, **options)


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the sources with every diff of docs/extending.md applied."""
    folder = tmp_path_factory.mktemp("extended")
    for name in ("megadapo", "kernels", "tests/support"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    (folder / "tests" / "__init__.py").touch()
    environment = {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    for diff in blocks(ROOT / "docs" / "extending.md", "diff"):
        done = run_in(folder, ["git", "apply", "-"], environment, input=diff)
        assert done.returncode == 0, f"{done.stderr}\n{diff}"
    return folder


def test_examples_of_extending_work(extended):
    examples = blocks(ROOT / "docs" / "extending.md", "python")
    assert len(examples) == 5
    environment = {"PYTHONPATH": str(extended), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "\n".join(examples)]
    done = run_in(extended, command, environment, timeout=120)
    assert done.returncode == 0, done.stderr


def test_extending_counts_its_files():
    """Compare the counts; tests have no diff."""
    page = ROOT / "docs" / "extending.md"
    per_section = [
        len(set(re.findall(r"^\+\+\+ b/(\S+)", section, re.M)))
        for section in page.read_text().split("\n## ")[1:]
    ]
    stated = [int(count) for count in re.findall(r"^\| a [^|]*\| (\d+)", page.read_text(), re.M)]
    tests = [1, 0, 1, 1, 0]
    assert stated == [sum(pair) for pair in zip(per_section, tests, strict=True)]
