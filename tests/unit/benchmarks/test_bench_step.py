"""The step benchmark gives both sides the same task, alternates, and reports the ratio."""

import json
import math
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from types import SimpleNamespace

import pytest
import to_accuracy
from baselines.trl_baseline import (
    HeldOut,
    StepTime,
    TrlBaseline,
    trl_argument,
    trl_python,
    trl_settings,
)
from step import (
    OVERRIDES,
    SPEED_ALONE,
    Comparison,
    Side,
    _our_steps,
    _their_steps,
    alternate,
    summary,
    table,
)

from megadapo.config import load_config
from megadapo.data.prompts import PromptStream, render
from megadapo.errors import ConfigError, InfraError
from megadapo.run.inputs import RunPrompts, load_tokenizer

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"


def step_time(
    seconds: float, *, num_answers: int = 256, num_sampled: int = 256, num_tokens: int = 5000
) -> StepTime:
    return StepTime(
        seconds=seconds,
        rollout_s=seconds / 2,
        num_answers=num_answers,
        num_sampled=num_sampled,
        num_tokens=num_tokens,
        accuracy=0.5,
    )


def settings_of(tmp_path, *overrides, **trl_arguments):
    few = ["run.num_steps=5", "data.train=arithmetic:train:256"]
    config = load_config(QUICKSTART, [*few, *OVERRIDES, *SPEED_ALONE, *overrides])
    prompts = RunPrompts.load(config, load_tokenizer(config), further=())
    return config, prompts, trl_settings(config, prompts, None, tmp_path, trl_arguments)


def test_baseline_gets_the_recipes_step(tmp_path):
    config, prompts, settings = settings_of(tmp_path, top_k=0)
    stream = PromptStream(prompts.prompts, config.run.seed)
    used = [stream.at(index) for index in range(5 * 32)]
    ids = [(render(prompt, prompts.tokenizer), prompt.ground_truth) for prompt in used]
    assert settings["prompts"] == ids
    rule = {"rule": "answer", "pattern": None}
    assert settings["reward"] == {**rule, "max_length": 48, "buffer": 16, "factor": 1.0}
    grpo = settings["grpo"]
    assert settings["updates_per_step"] == grpo["steps_per_generation"] == 4
    assert (grpo["per_device_train_batch_size"], grpo["max_steps"]) == (64, 20)
    assert grpo["learning_rate"] == config.trainer.optimizer.lr == 3e-5
    assert settings["rate_factors"] == [0.25, 0.5, 0.75, 1.0, 1.0], "those of our own steps"
    assert (grpo["epsilon"], grpo["epsilon_high"]) == (0.2, 0.28)
    assert grpo["max_completion_length"] == 48 and grpo["top_k"] == 0
    assert config.sampling.selection == "all", "every sampled answer is trained on, as TRL does"


def test_smaller_batches_of_trl_make_the_same_updates(tmp_path):
    _, _, settings = settings_of(tmp_path, gradient_accumulation_steps=4)
    grpo = settings["grpo"]
    assert (grpo["per_device_train_batch_size"], grpo["gradient_accumulation_steps"]) == (16, 4)
    assert (settings["updates_per_step"], grpo["steps_per_generation"]) == (4, 16)
    assert grpo["max_steps"] == 20, "updates, not batches"
    for wrong in (3, "many"):
        with pytest.raises(ConfigError, match=r"does not divide algorithm.responses_per_mini"):
            settings_of(tmp_path, gradient_accumulation_steps=wrong)


def test_task_that_trl_cannot_score_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"TRL's side of the benchmark has reward.rule alone"):
        settings_of(
            tmp_path, 'reward.functions=["rule", {function = "length", options = {max_tokens = 8}}]'
        )


def test_sides_alternate_and_neither_is_always_first():
    turns: list[str] = []

    def side(name: str):
        while True:
            turns.append(name)
            yield step_time(1.0)

    steps = alternate(side("ours"), side("theirs"), 3)
    assert turns == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert len(steps) == 3


def test_our_steps_leave_out_start_and_evaluation(monkeypatch):
    # when the second step is requested, when it has ended, and after it
    clock = iter([100.0, 110.0, 110.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    record = {"time/step_s": 7.0, "time/rollout_s": 2.0, "time/evaluate_s": 1.5}
    record |= {"groups/kept": 8, "groups/sampled": 12, "tokens/trained": 300, "accuracy/mean": 0.5}
    first, second = _our_steps([record, record], 4)
    assert first.seconds == 7.0, "until the first record the processes start too"
    assert second.seconds == 8.5, "the whole time but the evaluation"
    assert (first.num_answers, first.num_sampled, first.num_tokens) == (32, 48, 300)


def test_baseline_is_evaluated_before_training_and_at_our_steps():
    turns: list[str] = []

    def evaluate(step, held_out):
        turns.append(f"evaluate {step}")
        return HeldOut(step, 0.5, 0.1, 10.0)

    baseline = SimpleNamespace(
        step=lambda: turns.append("step") or step_time(1.0), evaluate=evaluate
    )
    found: list[HeldOut] = []
    steps = _their_steps(baseline, "problems", 2, found)
    for _ in range(4):
        next(steps)
    assert turns == ["evaluate 0", "step", "step", "evaluate 2", "step", "step", "evaluate 4"]
    assert [one.step for one in found] == [0, 2, 4]
    turns.clear()
    next(_their_steps(baseline, None, 0, found))
    assert turns == ["step"], "without an accuracy nothing is evaluated"


def test_ratio_compares_answers_per_second():
    ours = summary(Side(name="ours", steps=[step_time(s) for s in (9, 0.5, 0.5)], held_out=[]), 1)
    steps = [step_time(s, num_answers=128) for s in (9.0, 0.5, 0.5)]
    theirs = summary(Side(name="theirs", steps=steps, held_out=[]), 1)
    assert ours["answers_per_s"] == pytest.approx(512.0)
    assert theirs["answers_per_s"] == pytest.approx(256.0)
    assert "ours trains on 2.00 x the answers per second of theirs" in table(ours, theirs)


def side(name: str, seconds: float, accuracies: list[float]) -> Side:
    """Return a run with an evaluation before training and after every second step."""
    return Side(
        name=name,
        steps=[step_time(seconds, num_sampled=512) for _ in range(2 * len(accuracies) - 2)],
        held_out=[HeldOut(2 * i, a, 0.01, 20.0) for i, a in enumerate(accuracies)],
    )


def comparison(ours: Side, theirs: Side) -> Comparison:
    return Comparison(sides=(ours, theirs), settings={"ours": {}, "theirs": {}})


def test_seconds_count_until_the_first_evaluation_at_the_accuracy():
    run = side("ours", 3.0, [0.2, 0.69, 0.7, 0.6, 0.9])
    found = to_accuracy.measures(run, 0.7, warmup=1)
    assert (found["steps_to_accuracy"], found["seconds_to_accuracy"]) == (4, 12.0)
    assert (found["held_out_before"], found["held_out_after"]) == (0.2, 0.9)
    assert found["sampled_per_answer"] == 2.0
    never = to_accuracy.measures(run, 0.95, warmup=1)
    assert never["steps_to_accuracy"] is never["seconds_to_accuracy"] is None


def test_ratio_is_of_each_seed_and_missing_if_one_run_is_too_slow():
    fast, slow = side("ours", 1.0, [0.2, 0.8, 0.8]), side("TRL", 3.0, [0.2, 0.4, 0.8])
    runs = {1: comparison(fast, slow), 2: comparison(fast, side("TRL", 4.0, [0.2, 0.4, 0.8]))}
    found = to_accuracy.ratio(runs, "seconds_to_accuracy", 0.7, 1)
    assert found.mean == pytest.approx((6.0 + 8.0) / 2)
    assert found.standard_error == pytest.approx(1.0)
    assert to_accuracy.ratio(runs, "answers_per_s", 0.7, 1).mean == pytest.approx(3.5)
    runs[3] = comparison(fast, side("TRL", 3.0, [0.2, 0.4, 0.5]))
    assert to_accuracy.ratio(runs, "seconds_to_accuracy", 0.7, 1) is None, "seed 3 never gets there"
    assert "10.5 \u00b1 1.5" not in to_accuracy.table(runs, 0.7, 1).text()
    assert "14.0 \u00b1 2.0 (2/3)" in to_accuracy.table(runs, 0.7, 1).text()
    # trained enough before the first step: no seconds to compare
    for pair in ((fast, side("TRL", 1.0, [0.9, 0.9])), (side("ours", 1.0, [0.9, 0.9]), slow)):
        found = to_accuracy.ratio({1: comparison(*pair)}, "seconds_to_accuracy", 0.7, 1)
        assert found is None


def test_report_writes_json_table_and_curves(tmp_path, capsys):
    # one problem has no standard error
    theirs = side("TRL 1", 3.0, [0.2, 0.4, 0.8])
    lonely = theirs.held_out[0]._replace(standard_error=math.nan)
    theirs.held_out[0] = lonely
    runs = {7: comparison(side("ours", 1.0, [0.2, 0.8, 0.8]), theirs)}
    to_accuracy.report(runs, 0.7, 1, tmp_path / "new" / "beside.json")
    record = json.loads((tmp_path / "new" / "beside.json").read_text())
    assert record["ratios"]["seconds_to_accuracy"]["mean"] == pytest.approx(6.0)
    assert record["runs"]["7"]["TRL 1"]["seconds_to_accuracy"] == 12.0
    assert len(record["runs"]["7"]["ours"]["held_out"]) == 3
    page = (tmp_path / "new" / "beside.md").read_text()
    assert "| times better | 6.00 |" in page and "(beside.png)" in page
    assert (tmp_path / "new" / "beside.png").read_bytes().startswith(b"\x89PNG")
    assert "0.7 held-out" in capsys.readouterr().out


def test_accuracy_needs_evaluations_and_a_share(capsys):
    to_accuracy.check(load_config(QUICKSTART, []))
    with pytest.raises(ConfigError, match=r"needs data.held_out, and evaluation.every above 0"):
        to_accuracy.check(load_config(QUICKSTART, ["evaluation.every=0"]))
    for option, reason in (
        ("--accuracy=50", "50: must be above 0 and at most 1"),
        ("--seeds=0", "0: must be at least 1"),
    ):
        with pytest.raises(SystemExit):
            to_accuracy.main([str(QUICKSTART), option])
        assert reason in capsys.readouterr().err


def test_missing_environment_is_explained():
    with pytest.raises(ConfigError, match=r"/nowhere/python: not found(.|\n)*pip install trl"):
        trl_python("/nowhere/python")
    with pytest.raises(ConfigError, match=r"No module named 'trl'(.|\n)*python -m venv"):
        trl_python(sys.executable)


def test_failed_baseline_is_explained(tmp_path):
    with pytest.raises(InfraError, match="TRL ended with status 1(.|\n)*No module named 'trl'"):
        TrlBaseline(Path(sys.executable), {"num_threads": 1}, tmp_path)


def test_trl_arguments_are_json_or_text():
    parsed = dict(map(trl_argument, ["a=1", "b=true", "c=static", 'd={"x": 2}']))
    assert parsed == {"a": 1, "b": True, "c": "static", "d": {"x": 2}}
    with pytest.raises(ArgumentTypeError, match="a: must be NAME=VALUE"):
        trl_argument("a")
