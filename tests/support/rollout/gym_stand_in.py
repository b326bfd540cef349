"""A stand-in for the package reasoning-gym, with datasets that have its traps."""

import json
from pathlib import Path

from megadapo.data import reasoning_gym
from megadapo.data.prompts import Prompt

PACKAGE = '''
import os
import random
from dataclasses import dataclass

EVALUATING = ("countdown", "evaluated")


@dataclass
class Config:
    seed: int = 0
    size: int = 10
    max_term: int = 10**6


class Dataset:
    """Sums with partial scores, some of whose items depend on more than their place."""

    def __init__(self, name, config):
        assert config.max_term > 0, "max_term must be above 0"
        self.name, self.config, self.seed = name, config, config.seed

    def __getitem__(self, index):
        rng = random.Random(self.seed + index)
        if self.name == "unmakable" and index > 1:
            raise RuntimeError("this item cannot be made")
        if self.name == "killed":
            os.write(1, b'{"question')
            os.kill(os.getpid(), 9)
        # as datasets of the package do that go through sets or draw without their generator
        more = [hash("text") % 10**6, random.randrange(10**6)] if self.name == "unstable" else []
        terms = [*more, *(rng.randint(0, self.config.max_term) for _ in range(2))]
        question = " + ".join(map(str, terms)) + " ="
        print("one more item")
        answer = " + ".join(map(str, terms)) if self.name in EVALUATING else str(sum(terms))
        answer = None if self.name == "no_text" else answer
        return {"question": question, "answer": answer, "metadata": {"terms": tuple(terms)}}

    def score_answer(self, answer, entry):
        terms = entry["metadata"]["terms"]
        if type(terms) is not tuple:
            return 0.0
        given = eval(answer) if self.name in EVALUATING else float(answer)
        return 1.0 if given == sum(terms) else 0.01


def create_dataset(name, **config):
    return Dataset(name, Config(**config))
'''
NAMES = (
    *("chain_sum", "composite", "countdown", "evaluated", "no_text", "killed", "unmakable"),
    "unstable",
)
FACTORY = f"""
from reasoning_gym import Config, Dataset
DATASETS = {{name: (Dataset, Config) for name in {NAMES}}}
"""


def install(folder: Path) -> None:
    """Write the package into a folder of modules."""
    package = folder / "reasoning_gym"
    package.mkdir()
    (package / "__init__.py").write_text(PACKAGE)
    (package / "factory.py").write_text(FACTORY)


PRINT_ITEMS = """
import sys
from megadapo.data import reasoning_gym
for source in sys.argv[1:]:
    for row in reasoning_gym.rows(source):
        print(row["prompt"][0]["content"], row["reward_model"]["ground_truth"])
"""
"""Program that prints the items of the sources in its arguments."""


def prompts(name: str, num: int) -> list[Prompt]:
    """Return training prompts of a dataset as a checkpoint keeps them."""
    found = []
    for row in map(json.dumps, reasoning_gym.rows(f"reasoning-gym:{name}:train:{num}")):
        columns = json.loads(row)
        messages = (("user", columns["prompt"][0]["content"]),)
        gold = columns["reward_model"]["ground_truth"]
        found.append(Prompt("id", messages, gold, reasoning_gym.NAME, columns["extra_info"]))
    return found
