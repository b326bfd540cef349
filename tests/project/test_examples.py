"""The examples, as a newcomer copies and starts them."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from examples.environment.guess import Guess
from megadapo.cli import main
from megadapo.config import load_config
from megadapo.config.preflight import check_run
from megadapo.data.sources import read_rows
from megadapo.environments.environment import Action, Task
from megadapo.environments.worker import load
from megadapo.plan.cards import H100
from megadapo.plan.fit import problems
from megadapo.plan.phases import models_of
from tests.support import REPOSITORY

EXAMPLES = REPOSITORY / "examples"


def test_own_data_has_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = str(EXAMPLES / "own_data" / "problems.csv")
    assert main(["new", "Qwen/Qwen2.5-0.5B", source, "--gpu", "RTX-4090"]) == 0
    config = load_config("recipe.toml")
    assert not [line for line in check_run(config) if "data." in line]
    sizes = [len([*read_rows(one)]) for one in (config.data.train, config.data.held_out)]
    assert sizes == [231, 25]


def test_own_reward_is_imported_in_its_worker(monkeypatch):
    monkeypatch.chdir(EXAMPLES / "own_reward")
    config = load_config("recipe.toml")
    assert [one.function for one in config.reward.functions] == ["my_rewards:short_and_right"]
    check_run(config)


def test_prepared_games_and_prompts_are_those_of_the_environment(tmp_path):
    """Held-out prompts that are trained on, or have no number, would measure something else."""
    folder = tmp_path / "environment"
    shutil.copytree(EXAMPLES / "environment", folder, ignore=shutil.ignore_patterns("*.jsonl"))
    ran = subprocess.run(
        [sys.executable, folder / "prepare.py"],
        check=True,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    seen: set[tuple[int, int]] = set()
    for name, size in (("train", 1024), ("held_out", 64)):
        text = (folder / f"{name}.jsonl").read_text()
        assert text == (EXAMPLES / "environment" / f"{name}.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        ranges = [tuple(map(int, re.findall(r"\d+", row["prompt"]))) for row in rows]
        numbers = [int(row["ground_truth"]) for row in rows]
        assert all(a <= n <= b for n, (a, b) in zip(numbers, ranges, strict=True))
        assert len(set(zip(ranges, numbers, strict=True))) == len(rows) == size
        # halving finds one of 15 numbers in 4 guesses; every number has two digits
        assert all(12 <= b - a + 1 <= 15 and a >= 10 and b <= 99 for a, b in ranges)
        assert not seen & set(ranges)
        seen |= set(ranges)
    share = float(re.search(r"won: ([0-9.]+)", ran.stdout)[1])
    assert 0.3 < share < 0.45, "a base model of these games has little to learn, or cannot"


def test_recipe_of_verifiers_has_options_of_its_environment():
    """The package itself is needed to play it; see test_verifiers_package.py."""
    config = load_config(EXAMPLES / "verifiers" / "recipe.toml")
    [entry] = config.rollout.environments
    given = {"options": entry.options, "recovery": entry.recovery}
    assert load({"path": entry.path, "pickle": None, **given}).uses_tokens
    assert entry.options["model"] == config.model.path and entry.network


def started(hidden: int, first: int = 12, last: int = 26) -> Guess:
    game = Guess()
    prompt = {"role": "user", "content": f"Find my number from {first} to {last}."}
    game.reset(Task(id="0", messages=[prompt], ground_truth=str(hidden)))
    return game


@pytest.mark.parametrize("hidden", [12, 20, 26])
def test_halving_wins_the_game_in_four_guesses(hidden):
    """A wrong answer, or a range that is one too small, would lose the number."""
    game = started(hidden)
    for _ in range(4):
        low, high = game.possible.start, game.possible.stop - 1
        observation = game.step(Action(text=str((low + high) // 2)))
        assert observation.metrics == {"guesses": 1, "notes": 0, "wasted": 0}
        if observation.done:
            break
    assert observation.done and observation.reward == 1.0


@pytest.mark.parametrize("text", ["", "x", "11", "27", "-27", "3.4", "２０", "20 27", "9" * 5000])
def test_a_bad_guess_is_answered_and_wasted(text):
    """An exception would count as a failure of the environment, not of the model."""
    game = started(20)
    observation = game.step(Action(text=text))
    (message,) = observation.messages
    assert message == {"role": "user", "content": "not a number from 12 to 26"}
    assert not observation.done and observation.reward == 0.0 and observation.metrics["wasted"]
    assert game.step(Action(text=" 20\n")).reward == 1.0


def test_the_last_number_is_the_guess_and_the_others_are_notes():
    game = started(20)
    observation = game.step(Action(text="from 12 to 26: 20"))
    assert observation.done and observation.metrics["notes"]


def test_a_guess_that_an_answer_has_ruled_out_is_wasted():
    game = started(20)
    guesses = [("17", "higher", 0), ("17", "higher", 1), ("13", "higher", 1), ("21", "lower", 0)]
    for guess, answer, wasted in [*guesses, ("26", "lower", 1), ("19", "higher", 0)]:
        observation = game.step(Action(text=guess))
        assert observation.messages[0]["content"] == answer
        assert observation.metrics["wasted"] == wasted, guess


def test_one_gpu_recipe_fits_in_every_phase():
    config = load_config(EXAMPLES / "one_gpu" / "recipe.toml")
    assert problems(config, models_of(config), H100) == []
