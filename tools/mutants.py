"""Mutation testing of the pure packages: find small wrong changes that no test notices.

mutmut makes the changes and runs the tests on each. tests/mutants.toml lists the modules, their
tests, and the accepted survivors with reasons. Everything happens in a copy of the working tree.

    python tools/mutants.py [--module GLOB] [--jobs N]
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
COPY = REPOSITORY / "build" / "mutants"
SETTINGS = REPOSITORY / "tests" / "mutants.toml"
CAUGHT = {"killed", "timeout"}
SKIPPED_LINES = [r"^\s*raise ", r"^\s*assert "]
"""Lines without mutations: error messages are not arithmetic, and assertions are tests."""


@dataclass(frozen=True)
class Package:
    """Modules to change, and the tests that must notice."""

    modules: list[str]
    tests: list[str]


@dataclass(frozen=True)
class Survivor:
    """A change that no test noticed."""

    function: str
    status: str
    removed: str
    added: str


@dataclass
class Accepted:
    """An accepted survivor; the texts are regular expressions for whole strings."""

    function: str
    becomes: str
    reason: str
    was: str = ".*"
    used: bool = False

    def covers(self, survivor: Survivor) -> bool:
        pairs = (
            (self.function, survivor.function),
            (self.was, survivor.removed),
            (self.becomes, survivor.added),
        )
        return all(re.fullmatch(pattern, text, re.DOTALL) for pattern, text in pairs)


def main() -> int:
    """Run all packages or one module; return 1 if survivors have no accepted reason."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--module", default="*", help="glob of file names below the repository")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    settings = tomllib.loads(SETTINGS.read_text())
    accepted = [Accepted(**entry) for entry in settings["accepted"]]
    num_unexplained = 0
    for package in (Package(**entry) for entry in settings["package"]):
        modules = [name for name in _files(package.modules) if fnmatch(name, args.module)]
        if modules:
            num_unexplained += _judge(modules, package.tests, accepted, args.jobs)
    unused = [entry for entry in accepted if not entry.used] if args.module == "*" else []
    for entry in unused:
        print(f"accepted but not found: {entry.function}: {entry.becomes}")
    return 1 if num_unexplained or unused else 0


def _files(patterns: list[str]) -> list[str]:
    found = (path for pattern in patterns for path in REPOSITORY.glob(pattern))
    return sorted(str(path.relative_to(REPOSITORY)) for path in found)


def _judge(modules: list[str], tests: list[str], accepted: list[Accepted], jobs: int) -> int:
    """Run mutmut on some modules, print survivors, and count those without a reason."""
    _make_copy()
    _configure(modules, tests)
    statuses = _run_mutmut(jobs)
    num_unexplained = 0
    for module in modules:
        prefix = module.removesuffix(".py").replace("/", ".") + "."
        own = {name: status for name, status in statuses.items() if name.startswith(prefix)}
        survivors = [
            _survivor(module, name.removeprefix(prefix), status)
            for name, status in own.items()
            if status not in CAUGHT
        ]
        unexplained = [survivor for survivor in survivors if not _is_accepted(survivor, accepted)]
        print(
            f"{module}: {len(own)} changes, {len(own) - len(survivors)} caught,"
            f" {len(survivors) - len(unexplained)} accepted, {len(unexplained)} unexplained"
        )
        for survivor in unexplained:
            print(f"  {survivor.function} ({survivor.status})")
            print(f"    - {survivor.removed}\n    + {survivor.added}", flush=True)
        num_unexplained += len(unexplained)
    return num_unexplained


def _is_accepted(survivor: Survivor, accepted: list[Accepted]) -> bool:
    reasons = [entry for entry in accepted if entry.covers(survivor)]
    for entry in reasons:
        entry.used = True
    return bool(reasons)


def _make_copy() -> None:
    """Copy the files of the working tree that git does not ignore, following links."""
    shutil.rmtree(COPY, ignore_errors=True)
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listing, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True, text=True)
    for name in filter(None, names.stdout.split("\0")):
        source, target = REPOSITORY / name, COPY / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        elif source.exists():
            shutil.copy2(source, target)


def _configure(modules: list[str], tests: list[str]) -> None:
    """Write setup.cfg, which mutmut reads if pyproject.toml has no section for it."""
    settings = {
        "source_paths": ["megadapo"],
        "only_mutate": modules,
        # each change runs the tests again, so the long ones would take hours
        "pytest_add_cli_args_test_selection": [*tests, "-m", "not full"],
        "do_not_mutate_patterns": SKIPPED_LINES,
        "also_copy": ["configs", "tools"],
    }
    lines = ["[mutmut]"]
    for name, values in settings.items():
        lines += [f"{name} =", *(f"    {value}" for value in values)]
    (COPY / "setup.cfg").write_text("\n".join(lines) + "\n")


def _run_mutmut(jobs: int) -> dict[str, str]:
    """Run mutmut; return the status of every change by its name."""
    mutmut = [sys.executable, "-m", "mutmut"]
    # one thread each: changes are tested in forks of a process that has loaded torch
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # tests must import the copy, not the repository
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in paths if path and Path(path).resolve() != REPOSITORY]
    environment["PYTHONPATH"] = os.pathsep.join(kept)
    with (COPY / "mutmut.log").open("w") as log:
        command = [*mutmut, "run", "--max-children", str(jobs)]
        run = subprocess.run(
            command, cwd=COPY, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    if run.returncode != 0:
        sys.exit(f"mutmut failed, see {COPY / 'mutmut.log'}")
    results = subprocess.run(
        [*mutmut, "results", "--all", "true"],
        cwd=COPY,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    pairs = (line.strip().rsplit(": ", 1) for line in results.stdout.splitlines() if ": " in line)
    return {name: status for name, status in pairs}


def _survivor(module: str, name: str, status: str) -> Survivor:
    """Compare the original and the changed function in mutmut's output."""
    source = (COPY / "mutants" / module).read_text()
    original = re.sub(r"__mutmut_\d+$", "__mutmut_orig", name)
    bodies = {
        node.name: ast.get_source_segment(source, node) or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name in (name, original)
    }
    before, after = bodies[original].splitlines(), bodies[name].splitlines()
    # the first lines differ in the function's name
    lines = list(difflib.ndiff(before[1:], after[1:]))
    return Survivor(
        function=module.removesuffix(".py").replace("/", ".") + "." + _plain(name),
        status=status,
        removed=_changed(lines, "- "),
        added=_changed(lines, "+ "),
    )


def _changed(lines: list[str], mark: str) -> str:
    return "\n".join(line.removeprefix(mark).strip() for line in lines if line.startswith(mark))


def _plain(name: str) -> str:
    """Return the function's own name, without mutmut's prefix, class and number."""
    name = re.sub(r"__mutmut_\d+$", "", name)
    return name.removeprefix("x_") if name.startswith("x_") else ".".join(name.split("\u01c1")[1:])


if __name__ == "__main__":
    sys.exit(main())
