"""Programs that try to pass their unit tests without solving them, and honest ones of many kinds.

All of them run in one process, whose sandboxes have namespaces, and in one without, as in a
container.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megadapo.rewards.workers import landlock
from tests.support.processes.running import run_python

SCORER = """
import ctypes, json, sys
import numpy as np
from megadapo.data.prompts import Prompt
from megadapo.rewards.config import RewardFunction
from megadapo.rewards.function_runners import start_runner
from megadapo.rewards.workers import seccomp

denied, cases = json.loads(sys.argv[1])
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, for other users
seccomp.install(seccomp.program(denied))
function = RewardFunction(
    function="python_tests",
    num_workers=2,
    timeout_s=4.0,
    memory_mib=512,
    output_kib=64,
    options={"seconds_per_test": 0.5, "partial": True},
)
runner = start_runner(function)
by_tests = {}
for name, (tests, program) in cases.items():
    by_tests.setdefault(tests, []).append((name, program))
scores = {}
for tests, named in by_tests.items():
    texts = [f"```python\\n{program}\\n```" for _, program in named]
    prompt = Prompt("id", (("user", "?"),), tests, "code")
    ids = [np.arange(1, dtype=np.int32)] * len(texts)
    found = runner.score_group(prompt, texts, ids)
    scores |= {name: (one.reward, one.failure) for (name, _), one in zip(named, found)}
runner.close()
print(json.dumps(scores))
"""

PRINTED = json.dumps({"inputs": ["3", "4"], "outputs": ["0.333333333333\nyes", "42"]})


def read_cases() -> dict[str, tuple[str, str]]:
    """Return tests and program by "KIND: NAME", of which programs.txt has kind, name, tests and
    prelude before each program."""
    cases, parts = {}, {}
    for section in Path(__file__).with_name("programs.txt").read_text()[4:].split("\n=== "):
        heading, _, code = section.partition("\n")
        kind, name, tests, prelude = (*map(str.strip, heading.split("|")), "", "")[:4]
        if kind in ("tests", "prelude"):
            parts[kind, name] = code
        else:
            given = parts["tests", tests] if tests else PRINTED
            cases[f"{kind}: {name}"] = given, parts.get(("prelude", prelude), "") + code
    return cases


CASES = read_cases()


@cache
def scores(how: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return score and failure of each of these programs."""
    if how == "landlock" and landlock.version() < landlock.MIN_VERSION:
        pytest.skip("the kernel has no Landlock")
    denied = ["unshare"] if how == "landlock" else []
    cases = {name: CASES[name] for name in names}
    return json.loads(run_python(SCORER, json.dumps([denied, cases])).stdout)


@pytest.fixture(params=["namespaces", pytest.param("landlock", marks=pytest.mark.slow)])
def how(request) -> str:
    return request.param


def names(*kinds: str) -> list[str]:
    return [name for name in CASES if name.startswith(kinds)]


def result(how: str, name: str) -> list[Any]:
    """Return score and failure of a program, which runs with others of its tier."""
    kind = name.partition(":")[0]
    return scores(how, tuple(one for one in names(kind) if (one in FIRST) == (name in FIRST)))[name]


FIRST = {*names("honest")[::2], *names("asserted")[::3]}
"""Programs that make test runs; make test-slow runs all others."""


def in_two_tiers(*kinds: str) -> pytest.MarkDecorator:
    """Run a test with each program of these kinds."""
    cases = ((name, () if name in FIRST else pytest.mark.slow) for name in names(*kinds))
    return pytest.mark.parametrize("name", [pytest.param(one, marks=m) for one, m in cases])


@in_two_tiers("honest")
def test_right_program_passes(how: str, name: str) -> None:
    """A right program that tests in another process fail would teach the model to avoid it."""
    assert result(how, name) == [1.0, None]


@pytest.mark.fault
@in_two_tiers("asserted")
def test_assertions_cannot_be_forged(how: str, name: str) -> None:
    """Nor may a program fail the function, which would leave it out instead of calling it wrong."""
    assert result(how, name) == [0.0, None]


@in_two_tiers("printed", "asleep")
def test_hostile_program_scores_0(how: str, name: str) -> None:
    """Programs that print nearly the right output, or do not end, or harm their sandbox."""
    assert result(how, name) == [0.0, None]
