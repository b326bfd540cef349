"""The step benchmark gives both sides the same task, alternates, and reports the ratio."""

import sys
from pathlib import Path

import pytest

from megadapo.config import load_config
from megadapo.data.prompts import PromptStream
from megadapo.errors import ConfigError, InfraError
from megadapo.lab.bench.step import (
    OVERRIDES,
    StepTime,
    TrlBaseline,
    alternate,
    check_python,
    parse_arguments,
    summary,
    table,
    trl_settings,
)
from tests.support.rollout.scripted_engines import make_prompts

QUICKSTART = Path(__file__).parents[4] / "configs" / "quickstart.toml"
PROMPTS = make_prompts(50)


def step_time(seconds: float, *, num_answers: int = 256, num_tokens: int = 5000) -> StepTime:
    return StepTime(
        seconds=seconds,
        rollout_s=seconds / 2,
        num_answers=num_answers,
        num_tokens=num_tokens,
        accuracy=0.5,
    )


def test_baseline_gets_the_recipes_step(tmp_path):
    config = load_config(QUICKSTART, ["run.num_steps=5", *OVERRIDES])
    settings = trl_settings(config, PROMPTS, tmp_path, {"top_k": 0})
    stream = PromptStream(PROMPTS, config.run.seed)
    used = [stream.at(index) for index in range(5 * 32)]
    assert settings["prompts"] == [(p.messages, p.ground_truth) for p in used]
    rule = {"rule": "answer", "pattern": None}
    assert settings["reward"] == {**rule, "max_length": 48, "buffer": 16, "factor": 1.0}
    grpo = settings["grpo"]
    assert settings["updates_per_step"] == grpo["steps_per_generation"] == 4
    assert (grpo["per_device_train_batch_size"], grpo["max_steps"]) == (64, 20)
    assert grpo["learning_rate"] == config.trainer.optimizer.lr == 3e-5
    assert (grpo["epsilon"], grpo["epsilon_high"]) == (0.2, 0.28)
    assert grpo["max_completion_length"] == 48 and grpo["top_k"] == 0
    assert config.sampling.selection == "all", "every sampled answer is trained on, as TRL does"


def test_sides_alternate_and_neither_is_always_first():
    turns: list[str] = []

    def side(name: str) -> StepTime:
        turns.append(name)
        return step_time(1.0)

    steps = alternate(lambda: side("ours"), lambda: side("theirs"), 3)
    assert turns == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert len(steps) == 3


def test_ratio_compares_answers_per_second():
    ours = summary("ours", [step_time(s) for s in (0.5, 0.5, 9.0)])
    theirs = summary("theirs", [step_time(s, num_answers=128) for s in (1.0, 0.5, 0.5)])
    assert ours["answers_per_s"] == pytest.approx(512.0)
    assert theirs["answers_per_s"] == pytest.approx(256.0)
    assert "ours trains on 2.00 x the answers per second of theirs" in table(ours, theirs)


def test_missing_environment_is_explained():
    with pytest.raises(ConfigError, match=r"no --trl-python is given(.|\n)*pip install trl"):
        check_python(None)
    with pytest.raises(ConfigError, match="/nowhere/python: not found"):
        check_python(Path("/nowhere/python"))
    with pytest.raises(ConfigError, match=r"No module named 'trl'(.|\n)*python -m venv"):
        check_python(Path(sys.executable))


def test_failed_baseline_is_explained(tmp_path):
    with pytest.raises(InfraError, match="TRL ended with status 1(.|\n)*No module named 'trl'"):
        TrlBaseline(Path(sys.executable), {"num_threads": 1}, tmp_path)


def test_trl_arguments_are_json_or_text():
    parsed = parse_arguments(["a=1", "b=true", "c=static", 'd={"x": 2}'])
    assert parsed == {"a": 1, "b": True, "c": "static", "d": {"x": 2}}
    with pytest.raises(ConfigError, match="--trl a: must be NAME=VALUE"):
        parse_arguments(["a"])
