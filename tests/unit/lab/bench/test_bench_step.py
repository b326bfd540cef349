"""The step benchmark gives both sides the same task, alternates, and reports the ratio."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megadapo.config import RunConfig, load_config
from megadapo.data.prompts import PromptStream
from megadapo.errors import ConfigError, InfraError
from megadapo.lab.bench.step import (
    OVERRIDES,
    Side,
    TrlBaseline,
    alternate,
    check_python,
    parse_arguments,
    table,
    trl_settings,
)
from megadapo.lab.bench.trl_settings import StepTime, TrlSettings
from tests.support.rollout.scripted_engines import make_prompts

QUICKSTART = Path(__file__).parents[4] / "configs" / "quickstart.toml"
PROMPTS = make_prompts(50)


def quickstart(*overrides: str) -> RunConfig:
    return load_config(QUICKSTART, ["run.num_steps=5", *OVERRIDES, *overrides])


def settings_in(folder: Path, *overrides: str) -> TrlSettings:
    return trl_settings(quickstart(*overrides), PROMPTS, folder, {"top_k": 0})


def step_time(seconds: float, *, num_answers: int = 256, num_tokens: int = 5000) -> StepTime:
    return StepTime(
        seconds=seconds,
        rollout_s=seconds / 2,
        num_answers=num_answers,
        num_tokens=num_tokens,
        accuracy=0.5,
    )


def test_baseline_gets_the_recipes_step(tmp_path: Path) -> None:
    config, settings = quickstart(), settings_in(tmp_path)
    stream = PromptStream(PROMPTS, config.run.seed)
    used = [stream.at(index) for index in range(5 * 32)]
    assert settings.prompts == [(list(p.messages), p.ground_truth) for p in used]
    assert settings.updates_per_step == 4 and settings.responses_per_mini_batch == 64
    assert settings.lr == config.trainer.optimizer.lr == 3e-5
    assert (settings.clip_low, settings.clip_high) == (0.2, 0.28)
    assert settings.max_response_tokens == 48 and settings.overlong_buffer == 16
    assert settings.trl_arguments == {"top_k": 0}
    assert config.sampling.selection == "all", "every sampled answer is trained on, as TRL does"


def test_sides_alternate_and_neither_is_always_first() -> None:
    turns: list[str] = []

    def side(name: str) -> StepTime:
        turns.append(name)
        return step_time(1.0)

    steps = alternate(lambda: side("ours"), lambda: side("theirs"), 3)
    assert turns == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert len(steps) == 3


def test_ratio_compares_answers_per_second() -> None:
    ours = Side(name="ours", steps=[step_time(s) for s in (0.5, 0.5, 9.0)])
    theirs = Side(name="theirs", steps=[step_time(s, num_answers=128) for s in (1.0, 0.5, 0.5)])
    assert ours.answers_per_s == pytest.approx(512.0)
    assert theirs.answers_per_s == pytest.approx(256.0)
    assert "ours trains on 2.00 x the answers per second of theirs" in table(ours, theirs)


def test_missing_environment_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"no --trl-python is given(.|\n)*pip install trl"):
        check_python(None)
    with pytest.raises(ConfigError, match="/nowhere/python: not found"):
        check_python(Path("/nowhere/python"))
    with pytest.raises(ConfigError, match=r"No module named 'trl'(.|\n)*python -m venv"):
        check_python(Path(sys.executable))


def test_failed_baseline_is_explained(tmp_path: Path) -> None:
    with pytest.raises(InfraError, match="TRL ended with status 1(.|\n)*No module named 'trl'"):
        TrlBaseline(Path(sys.executable), settings_in(tmp_path), tmp_path / "log.txt")


def test_trl_arguments_are_json_or_text() -> None:
    assert parse_arguments(["a=1", "b=true", "c=static", 'd={"x": 2}']) == {
        "a": 1,
        "b": True,
        "c": "static",
        "d": {"x": 2},
    }
    with pytest.raises(ConfigError, match="--trl a: must be NAME=VALUE"):
        parse_arguments(["a"])
