"""Would catch: a virtual task without the keep rate, lengths or difficulties it was given."""

from __future__ import annotations

import numpy as np
import pytest

from megadapo.data.prompts import Prompt
from megadapo.errors import ConfigError
from megadapo.lab.simulate.task import RIGHT, WRONG, Draw, Task, TaskSettings, TaskVerifier
from megadapo.rollout.types import response_seeds


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
def test_groups_have_a_signal_as_often_as_asked(
    keep_rate: float, solved: float | None, size: int
) -> None:
    found = draws(TaskSettings(keep_rate=keep_rate, solved_share=solved, num_responses=size))
    assert np.mean([draw.is_mixed for draw in found]) == pytest.approx(keep_rate, abs=0.03)
    if solved is not None:
        all_right = np.mean([draw.correct.all() for draw in found])
        assert solved - 0.03 < all_right < solved + 0.06


def test_lengths_have_the_given_distribution_whatever_they_go_with() -> None:
    lengths = np.concatenate([draw.lengths for draw in draws(TaskSettings())])
    assert lengths.max() == 20480
    assert (lengths < 12000).mean() == pytest.approx(0.95, abs=0.01)
    assert lengths.mean() == pytest.approx(4780, rel=0.03)


def test_groups_have_a_typical_length_and_hard_prompts_a_longer_one() -> None:
    found = draws(TaskSettings(length_difficulty=0.6))
    logs = np.log([draw.lengths for draw in found])
    between = logs.mean(axis=1).var() - logs.var(axis=1, ddof=1).mean() / 16
    assert between / logs.var() == pytest.approx(0.3, abs=0.05)
    rights = np.array([draw.correct.mean() for draw in found])
    assert logs[rights == 0].mean() > logs[rights == 1].mean() + 0.1


def test_the_same_seeds_give_the_same_answers() -> None:
    settings = TaskSettings(num_prompts=50)
    for one, other in zip(draws(settings), draws(settings), strict=True):
        assert (one.lengths == other.lengths).all() and (one.correct == other.correct).all()


@pytest.mark.parametrize(("keep_rate", "solved"), [(0.7, 0.4), (0.0, None), (1.0, None)])
def test_impossible_shares_are_refused(keep_rate: float, solved: float | None) -> None:
    with pytest.raises(ConfigError, match="signal"):
        Task(TaskSettings(keep_rate=keep_rate, solved_share=solved))


def test_the_verifier_reads_right_and_wrong() -> None:
    prompt = Prompt("id", (("user", "0"),), RIGHT, "task")
    scores = TaskVerifier().score_group(prompt, [RIGHT, WRONG], [[], []])
    assert [score.correct for score in scores] == [True, False]
    assert [score.reward for score in scores] == [1.0, -1.0]
