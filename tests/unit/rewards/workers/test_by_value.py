"""Functions and classes that a Python program gives by value: their names, and their workers."""

import asyncio
import functools
import subprocess
import sys
import threading

import numpy as np
import pytest

from megadapo.data.prompts import Prompt
from megadapo.environments.config import EnvironmentConfig
from megadapo.environments.environment import Environment, Observation
from megadapo.errors import ConfigError
from megadapo.rewards.config import RewardFunction
from megadapo.rewards.function_runners import start_runner
from megadapo.rewards.workers.by_value import OBJECT_PATH, name_object
from megadapo.rollout.episodes.host import check_environments
from tests.support.rollout.hosts import content_of, task_of, turn_of, with_host

FACTOR = 3


def scaled(response):
    return float(len(response) * FACTOR)


def score(function):
    """Score a response of two letters in the worker of a function."""
    runner = start_runner(RewardFunction(function=name_object(function, {}), timeout_s=5.0))
    prompt = Prompt("id", (("user", "?"),), "12", "test")
    try:
        return runner.score_group(prompt, ["ab"], [np.arange(2, dtype=np.int32)])[0]
    finally:
        runner.close()


def test_what_a_module_has_is_imported():
    """The command line could not continue a run of a function by value."""
    for value, name in ((scaled, f"{__name__}:scaled"), (np.mean, "numpy:mean")):
        assert name_object(value, files := {}) == name and not files
        assert OBJECT_PATH.fullmatch(name)


def test_function_by_value_is_scored_and_isolated_like_any_other():
    factor = 7

    def times(response):
        return factor * len(response) + FACTOR

    def opens_a_socket(response):
        import socket

        return socket.socket().fileno()

    assert score(times).reward == 17.0
    assert score(lambda response: -1.0).reward == -1.0
    assert "reward.functions.network is false" in score(opens_a_socket).failure.reason


def test_environment_by_value_is_played_in_its_process():
    class Echo(Environment):
        def step(self, action):
            return Observation(messages=[{"role": "user", "content": f"{FACTOR} {action.text}"}])

    config = EnvironmentConfig(environment=name_object(Echo, {}), memory_mib=1024)

    async def play(host):
        await host.open("e", 0, task_of("e"))
        return content_of(await host.step("e", 0, turn_of("a")))

    async def checked():
        return [described.label for described in check_environments([config])]

    assert with_host([config], play) == "3 a"
    # as in a notebook, whose main thread has an event loop
    assert asyncio.run(checked()) == ["Echo"]
    with pytest.raises(ConfigError, match=r"environments\.python.*another Python cannot read it"):
        EnvironmentConfig(environment=config.environment, python=sys.executable)


PROGRAM = """
import re
from megadapo.rewards.workers.by_value import name_object

ALLOWED = {"a", "b", "c"}
UNUSED = 1

def helper(text):
    return [letter for letter in text if letter in ALLOWED and re.match(".", letter)]

class Counter:
    limit = 4

    def count(self, text):
        return len(helper(text))

def reward(response):
    return Counter().count(response)

print(name_object(reward, {}), name_object(Counter, {}))
"""


@pytest.mark.parametrize(
    ("before", "after", "is_other"),
    [
        ("UNUSED = 1", "UNUSED = 2\n\n# lines", False),
        ('"c"}', '"d"}', True),
        ('re.match(".", letter)', 're.match("..", letter)', True),
        ("limit = 4", "limit = 5", True),
        ("len(helper(text))", "len(helper(text)) + 1", True),
    ],
)
def test_name_changes_with_the_source_and_all_that_it_uses(tmp_path, before, after, is_other):
    """A resumed run would learn from another reward, or be refused with the same one."""
    path, found = tmp_path / "program.py", []
    for program in (PROGRAM, PROGRAM.replace(before, after)):
        path.write_text(program)
        done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
        found.append(done.stdout.split())
    assert all(map(OBJECT_PATH.fullmatch, found[0]))
    assert [one != other for one, other in zip(*found, strict=True)] == [is_other] * 2


def test_lambdas_of_one_line_have_different_names():
    """The second one would take the place of the first."""
    one, other = lambda response: 1.0, lambda response: 2.0
    assert name_object(one, {}) != name_object(other, {})


def test_objects_that_cannot_be_sent_are_refused():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"lambda cannot be sent .*lock.*create inside of it"):
        name_object(lambda response: lock.locked(), {})
    with pytest.raises(ConfigError, match="is no function and no class"):
        name_object(functools.partial(scaled), {})
