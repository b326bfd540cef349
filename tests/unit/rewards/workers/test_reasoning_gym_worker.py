"""Scorers of reasoning-gym in their sandbox, with a stand-in for the package."""

import time
from dataclasses import replace

import numpy as np
import pytest

from megadapo.data.group import Score
from megadapo.data.prompts import Prompt
from megadapo.errors import ConfigError, DataError, RewardError
from megadapo.rewards.config import RewardConfig, RewardFunction
from megadapo.rewards.function_runners import Runner, start_runner
from tests.support.rollout import gym_stand_in

FUNCTION = RewardFunction(function="reasoning_gym", timeout_s=2.0, options={"partial": True})

TOKEN = (
    "[frame.f_locals['token'] for frame, _ in __import__('traceback').walk_stack(None)"
    " if 'token' in frame.f_locals][0]"
)
"""Expression for the text before a result, which an answer beside its scorer can find."""


@pytest.fixture(scope="module", autouse=True)
def stand_in(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    gym_stand_in.install(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


@pytest.fixture(scope="module")
def runner(stand_in):
    started = start_runner(FUNCTION)
    yield started
    started.close()


def score(runner: Runner, prompt: Prompt, *texts: str) -> list[Score]:
    return runner.score_group(prompt, texts, [np.arange(1, dtype=np.int32)] * len(texts))


def test_only_a_score_of_1_is_right(runner):
    """Catches partial scores, which some scorers give to any text, that count as correct."""
    for prompt in gym_stand_in.prompts("chain_sum", 2):
        texts = [
            prompt.ground_truth,
            f"<answer>{prompt.ground_truth}</answer>",
            "Answer: 7",
            "many",
        ]
        found = score(runner, prompt, *texts)
        assert [(one.reward, one.correct) for one in found] == [
            *[(1.0, True), (1.0, True), (0.01, False), (0.0, False)]
        ]
        parts = [dict(one.parts) for one in found]
        assert parts[2] == {
            **{"partial": 0.01, "no_answer": 0.0, "errors": 0.0, "timeouts": 0.0, "failed": 0.0}
        }
        assert [one["no_answer"] for one in parts] == [0.0, 0.0, 0.0, 1.0]
    whole = start_runner(RewardFunction(function="reasoning_gym"))
    try:
        assert [one.reward for one in score(whole, prompt, *texts)] == [1.0, 1.0, 0.0, 0.0]
    finally:
        whole.close()


def test_answer_without_a_gold_text_is_scored(runner):
    (prompt,) = gym_stand_in.prompts("no_text", 1)
    right = str(sum(map(int, prompt.messages[0][1].split()[:-1:2])))
    found = score(runner, prompt, f"So\n{right}", f"Answer: {right}", f"{right}\nmany")
    assert [one.correct for one in found] == [True, True, False]
    assert dict(found[2].parts)["errors"] == 1.0


@pytest.mark.fault
@pytest.mark.parametrize(
    "attack",
    [
        "open({path!r}, 'w').write('x')",
        "open('/tmp/left', 'w')",
        "__import__('os').mkdir('/tmp/left')",
        "__import__('os').memfd_create('left')",
        "__import__('os').fork()",
        "__import__('subprocess').run(['/bin/true'])",
        "__import__('socket').socket()",
        "__import__('os').kill(1, 9)",
        "__import__('os').write(3, b'1.0') and __import__('os')._exit(0)",
        f"__import__('os').write(3, {TOKEN} + b'x') and __import__('os')._exit(0)",
        f"__import__('os').write(3, {TOKEN} + b'[' * 4000) and __import__('os')._exit(0)",
        "exit()",
        "bytes(10**12)",
        "9**9**9",
        pytest.param("__import__('time').sleep(60)", marks=pytest.mark.slow),
    ],
)
def test_answer_does_no_harm(runner, tmp_path, attack):
    """The answer is right if its attack raises no exception, so each must."""
    (prompt,) = gym_stand_in.prompts("evaluated", 1)
    attack = attack.format(path=str(tmp_path / "marker"))
    answers = [f"({attack}, {prompt.ground_truth})[1]", f"(1, {prompt.ground_truth})[1]"]
    started = time.perf_counter()
    harmful, right = score(runner, prompt, *(f"<answer>{one}</answer>" for one in answers))
    assert time.perf_counter() - started < 30.0
    assert (harmful.correct, harmful.failure) == (False, None)
    assert (right.correct, right.failure) == (True, None)
    assert not list(tmp_path.iterdir())


def test_answer_that_computes_for_the_model_does_not_reach_its_scorer(runner):
    """Catches scorers that evaluate functions, or towers of powers that take all their time."""
    (prompt,) = gym_stand_in.prompts("countdown", 1)
    gold = prompt.ground_truth
    answers = (f"({gold})", f"sum([{gold}])", f"{gold} + 0 * len(entry)", "9**9**9**9", "exit()")
    found = score(runner, prompt, *(f"<answer>{one}</answer>" for one in answers))
    assert [one.reward for one in found] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert not any(dict(one.parts)["errors"] + dict(one.parts)["timeouts"] for one in found)


def test_item_that_is_another_one_now_is_no_wrong_answer(runner):
    """Catches right answers that count as wrong after an update of the package."""
    first, second = gym_stand_in.prompts("chain_sum", 2)
    mixed = replace(first, extra_info=second.extra_info)
    found = score(runner, mixed, first.ground_truth, second.ground_truth)
    assert {one.failure.reason for one in found} == {
        "reasoning-gym makes another item now than for the prompt"
    }
    with pytest.raises(RewardError, match="has no 'name'"):
        score(runner, replace(first, extra_info={}), "7")


def test_prompts_of_other_sources_are_refused():
    config = RewardConfig(functions=("reasoning_gym",))
    assert config.check_gold("", "reasoning-gym") == ""
    with pytest.raises(DataError, match='set data_sources = \\["reasoning-gym"\\]'):
        config.check_gold("7", "math_dapo")


@pytest.mark.parametrize(
    ("options", "said"),
    [({"partial": 1}, "partial = 1: "), ({"part": True}, "there are partial")],
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        RewardConfig(functions=({"function": "reasoning_gym", "options": options},))


def test_start_without_the_package_names_the_command(tmp_path, monkeypatch):
    (tmp_path / "reasoning_gym.py").write_text("raise ImportError('none here')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="none here.*pip install -e '.\\[reasoning-gym\\]'"):
        start_runner(FUNCTION)
