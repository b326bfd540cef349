"""The virtual task is as its settings say, and a fit to a run predicts the run's times.

The recorded metrics come from the quickstart on two cores: lengths double, fewer groups are mixed.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megadapo.config import load_config
from megadapo.data.prompts import Prompt
from megadapo.errors import ConfigError, DataError
from megadapo.lab.simulate.fit import RunFit, fit_run
from megadapo.lab.simulate.task import (
    CORRECT,
    INCORRECT,
    Draw,
    EmpiricalLengths,
    LogNormalLengths,
    Task,
    TaskSettings,
    TaskVerifier,
    read_lengths,
)
from megadapo.rollout.types import response_seeds

SCORES = np.random.default_rng(3).standard_normal(200_000)


def draws(settings: TaskSettings) -> list[Draw]:
    task = Task(settings)
    return [
        task.draw((index,), response_seeds(settings.num_responses, settings.seed, index))
        for index in range(settings.num_prompts)
    ]


@pytest.mark.parametrize(
    ("keep_rate", "solved", "size"),
    [(0.35, None, 16), (0.35, 0.4, 16), (0.55, 0.4, 16), (0.2, None, 4)],
)
def test_keep_rate_is_the_share_of_mixed_groups(keep_rate, solved, size):
    found = draws(TaskSettings(keep_rate=keep_rate, solved_share=solved, num_responses=size))
    assert np.mean([draw.is_mixed for draw in found]) == pytest.approx(keep_rate, abs=0.03)
    if solved is not None:
        all_correct = np.mean([draw.correct.all() for draw in found])
        assert solved - 0.03 < all_correct < solved + 0.06


def test_lengths_have_the_given_distribution():
    lengths = np.concatenate([draw.lengths for draw in draws(TaskSettings())])
    assert lengths.max() == 20480
    assert (lengths < 12000).mean() == pytest.approx(0.95, abs=0.01)
    assert lengths.mean() == pytest.approx(4780, rel=0.03)
    assert LogNormalLengths.of(1.5, 2.0).at(SCORES).min() >= 1


def test_lengths_differ_by_prompt_and_grow_with_difficulty():
    found = draws(TaskSettings(length_difficulty=0.6))
    logs = np.log([draw.lengths for draw in found])
    between = logs.mean(axis=1).var() - logs.var(axis=1, ddof=1).mean() / 16
    assert between / logs.var() == pytest.approx(0.3, abs=0.05)
    accuracy = np.array([draw.correct.mean() for draw in found])
    assert logs[accuracy == 0].mean() > logs[accuracy == 1].mean() + 0.1


def test_same_seeds_give_the_same_answers():
    settings = TaskSettings(num_prompts=50)
    for one, other in zip(draws(settings), draws(settings), strict=True):
        assert (one.lengths == other.lengths).all() and (one.correct == other.correct).all()


@pytest.mark.parametrize(("keep_rate", "solved"), [(0.7, 0.4), (0.0, None), (1.0, None)])
def test_impossible_shares_are_refused(keep_rate, solved):
    with pytest.raises(ConfigError, match="mixed"):
        Task(TaskSettings(keep_rate=keep_rate, solved_share=solved))


def test_verifier_reads_correct_and_incorrect():
    prompt = Prompt("id", (("user", "0"),), CORRECT, "task")
    scores = TaskVerifier().score_group(prompt, [CORRECT, INCORRECT], [[], []])
    assert [score.correct for score in scores] == [True, False]
    assert [score.reward for score in scores] == [1.0, -1.0]


@pytest.mark.parametrize(("mean", "quantile"), [(100, 100), (100, 90), (100, 400), (0, 5)])
def test_impossible_mean_and_quantile_are_refused(mean, quantile):
    with pytest.raises(ConfigError, match="log-normal"):
        LogNormalLengths.of(mean, quantile)


def test_measured_lengths_keep_their_shares(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("10\n20 20\n70\n")
    lengths = read_lengths(file).at(SCORES)
    assert {int(n) for n in lengths} == {10, 20, 70}
    assert (lengths == 20).mean() == pytest.approx(0.5, abs=0.01)
    assert EmpiricalLengths([5]).at(np.array([-9.0, 0.0, 9.0])).tolist() == [5, 5, 5]


@pytest.mark.parametrize("text", ["", "12\nx", "3.5", "0\n4", "-1"])
def test_bad_lengths_file_is_named(tmp_path, text):
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    with pytest.raises(DataError, match=r"lengths\.txt"):
        read_lengths(file)
    with pytest.raises(DataError, match="missing"):
        read_lengths(tmp_path / "missing")
    with pytest.raises(DataError, match="no steps are recorded"):
        read_lengths(tmp_path)


RECIPE = Path(__file__).parents[4] / "configs" / "quickstart.toml"
RECORDED = Path(__file__).with_name("quickstart-metrics.jsonl").read_text().splitlines()


def fit_of(folder: Path, records: list[dict[str, Any]]) -> RunFit:
    config = load_config(str(RECIPE), [f"run.folder={folder}", "rollout.num_engines=1"])
    (folder / "config.json").write_text(config.model_dump_json())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return fit_run(folder)


def test_run_is_predicted_from_its_first_half(tmp_path):
    records = [json.loads(line) for line in RECORDED]
    fit = fit_of(tmp_path, records)
    assert fit.num_fitted == 15 and fit.steps == tuple(range(1, 31))
    measured, predicted = np.array(fit.measured[15:]), np.array(fit.predicted[15:])
    # metrics do not say which prompts were drawn, so single steps differ
    assert predicted.sum() == pytest.approx(measured.sum(), rel=0.15)
    assert np.abs(predicted / measured - 1.0).mean() < 0.2
    names = ("sampled", "all_correct", "all_wrong")
    sampled, *unmixed = (sum(one[f"groups/{name}"] for one in records) for name in names)
    assert fit.task.keep_rate == pytest.approx(1.0 - sum(unmixed) / sampled)


def test_short_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="3 steps"):
        fit_of(tmp_path, [json.loads(line) for line in RECORDED[:3]])


def test_slower_engines_scale_all_times(tmp_path):
    records = [json.loads(line) for line in RECORDED[:4]]
    fit = fit_of(tmp_path, records)
    slower = [{**one, "time/rollout_s": 3.0 * one["time/rollout_s"]} for one in records]
    again = fit_of(tmp_path, slower)
    assert again.engines.speed.step_s == pytest.approx(3.0 * fit.engines.speed.step_s)
    assert replace(again.task, lengths=fit.task.lengths) == fit.task


def test_idle_time_does_not_make_engines_slower(tmp_path):
    """The use of slots is over all time: dividing by it alone counted the idle time twice."""
    records = [json.loads(line) for line in RECORDED[:4]]
    idle = [
        {
            **one,
            "time/rollout_s": 2.0 * one["time/rollout_s"],
            "rollout/engine_busy_share": 0.5 * one["rollout/engine_busy_share"],
            "rollout/slot_use": 0.5 * one["rollout/slot_use"],
        }
        for one in records
    ]
    speeds = [fit_of(tmp_path, each).engines.speed for each in (records, idle)]
    assert speeds[1].step_s == pytest.approx(speeds[0].step_s)


@pytest.mark.parametrize("tokens", [0, None])
def test_step_without_engine_tokens_is_skipped(tmp_path, tokens):
    """A resumed step whose groups all came from the journal divided by 0."""
    records = [json.loads(line) for line in RECORDED[:5]]
    names = ("engine_tokens_min", "engine_tokens_max", "slot_use", "engine_busy_share")
    records[1] |= {f"rollout/{name}": tokens for name in names}
    assert fit_of(tmp_path, records).steps == (1, 3, 4, 5)
