"""The virtual task is as its settings say."""

import numpy as np
import pytest

from megadapo.data.prompts import Prompt
from megadapo.errors import ConfigError, DataError
from megadapo.lab.simulate.task import (
    CORRECT,
    INCORRECT,
    Draw,
    EmpiricalLengths,
    LogNormalLengths,
    TaskSettings,
    TaskVerifier,
    ToyTask,
    read_lengths,
)
from megadapo.rollout.types import response_seeds

SCORES = np.random.default_rng(3).standard_normal(200_000)


def draws(settings: TaskSettings) -> list[Draw]:
    task = ToyTask(settings)
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
        ToyTask(TaskSettings(keep_rate=keep_rate, solved_share=solved))


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
