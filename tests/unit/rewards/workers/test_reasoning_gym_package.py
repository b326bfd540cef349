"""The package reasoning-gym itself: each dataset, and answers that its scorers execute."""

import importlib.util
import json
import subprocess
import sys
import time

import numpy as np
import pytest

from megadapo.data.prompts import load_prompts
from megadapo.data.reasoning_gym import INSTALL, REFUSED
from megadapo.rewards.config import RewardConfig, RewardFunction
from megadapo.rewards.function_runners import start_runner
from tests.support.processes.running import run_python
from tests.support.rollout import gym_stand_in

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason=f"reasoning-gym is not installed: {INSTALL}",
)
EVALUATING = (
    *("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"),
    *("countdown", "puzzle24", "polynomial_multiplication", "simple_integration"),
    "intermediate_integration",
)
"""Datasets whose scorers execute the answer."""
NO_GOLD = ("boxnet", "graph_color", "rubiks_cube", "rush_hour")
"""Datasets without a text of the answer."""
EXAMPLES = """
import json
from megadapo.data.reasoning_gym import create
for name, key in (("graph_color", "possible_answer"), ("rubiks_cube", "example_correct_answer")):
    found = create(name, {}, seed=0, size=1)[0]["metadata"][key]
    print(json.dumps(found if isinstance(found, str) else json.dumps(found)))
"""
TRY_CONSTANTS = "from tests.support.rollout.gym_constants import main\nmain()"
LIST_DATASETS = "from reasoning_gym.factory import DATASETS\nprint(*DATASETS)"


@pytest.fixture(scope="module")
def runner():
    started = start_runner(RewardFunction(function="reasoning_gym", timeout_s=4.0, num_workers=2))
    yield started
    started.close()


def score(runner, prompt, *answers):
    texts = [f"<answer>{answer}</answer>" for answer in answers]
    return runner.score_group(prompt, texts, [np.arange(1, dtype=np.int32)] * len(texts))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_items", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_text_that_computes_nothing_is_wrong(num_items):
    """Catches scorers that accept NaN, a copy of the prompt or a call, or refuse a gold answer."""
    found = run_python(TRY_CONSTANTS, str(num_items), PYTHONHASHSEED="0").stdout.splitlines()
    assert found[-1] == "done" and found[:-1] == []


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gold_answer_of_each_dataset_is_right_and_other_text_is_not(runner):
    names = set(run_python(LIST_DATASETS).stdout.splitlines()[-1].split()) - REFUSED.keys()
    assert len(names) > 100
    wrong = {}
    for name in sorted(names):
        for prompt in gym_stand_in.prompts(name, 4)[2:]:
            gold, other = score(runner, prompt, prompt.ground_truth, "xyzzy")
            if (gold.correct, other.correct) != (name not in NO_GOLD, False):
                wrong[name] = gold, other
            assert not gold.failure and not other.failure, (name, gold, other)
    assert not wrong


@pytest.mark.full
def test_items_without_a_gold_text_are_scored(runner):
    examples = map(json.loads, run_python(EXAMPLES, PYTHONHASHSEED="0").stdout.splitlines()[-2:])
    for name, example in zip(NO_GOLD[1:3], examples, strict=True):
        (prompt,) = gym_stand_in.prompts(name, 1)
        assert [one.correct for one in score(runner, prompt, example, "1")] == [True, False]
    (prompt,) = gym_stand_in.prompts("rush_hour", 1)
    assert not score(runner, prompt, "A+1")[0].correct


@pytest.mark.full
@pytest.mark.fault
@pytest.mark.parametrize("name", EVALUATING)
def test_executed_answer_does_no_harm(runner, tmp_path, name):
    """Without the sandbox these answers write the file, start the process and run on."""
    marker = tmp_path / "marker"
    (prompt,) = gym_stand_in.prompts(name, 1)
    sleep = f"[__import__('os').spawnlp(1, 'sleep', 'sleep', '{time.time_ns()}')]"
    answers = [f"[open('{marker}', 'w').write('x')]", "[open('/tmp/x', 'w').write('x')]", sleep]
    started = time.perf_counter()
    found = score(runner, prompt, *answers, "9**9**9", "__import__('time').sleep(60)")
    gold = score(runner, prompt, prompt.ground_truth)
    assert time.perf_counter() - started < 20.0
    assert not any(one.correct or one.failure for one in found) and gold[0].correct
    assert not marker.exists()
    shown = subprocess.run(["ps", "ax", "-o", "args"], capture_output=True, text=True).stdout
    assert sleep.split("'")[-2] not in shown and sys.executable in shown


@pytest.mark.full
def test_items_are_the_same_in_every_process_and_in_one_split():
    names = ("knight_swap", "word_ladder", "isomorphic_strings", "polynomial_multiplication")
    sources = [f"reasoning-gym:{name}:train:3" for name in (*names, "ransom_note", "acre")]
    first, second = (
        run_python(gym_stand_in.PRINT_ITEMS, *sources, PYTHONHASHSEED=seed).stdout
        for seed in ("1", "2")
    )
    assert first == second and len(first) > 1000
    check_gold = RewardConfig(functions=("reasoning_gym",)).check_gold
    questions = [
        {prompt.messages for prompt in load_prompts(source, check_gold=check_gold)}
        for split in ("train", "held_out")
        for source in (f"reasoning-gym:chain_sum:{split}:1000{seed}" for seed in ("", ":1"))
    ]
    for number, some in enumerate(questions):
        # a sum of two short terms occurs twice by chance
        assert all(len(some & other) < 20 for other in questions[number + 1 :])
