"""Cooldowns and keep rates: prompts skipped too early, or too few groups requested."""

from megadapo.rollout.sampling.prompt_cursor import Difficulty
from megadapo.rollout.sampling.step import GroupStats


def stats(prompt_id: str, num_correct: int) -> GroupStats:
    return GroupStats(
        num_generated=40,
        prompt_index=0,
        prompt_id=prompt_id,
        num_correct=num_correct,
        num_responses=4,
        reward_sum=0.0,
        lengths=(10,) * 4,
        num_truncated=0,
        is_mixed=0 < num_correct < 4,
        seconds=1.0,
    )


def test_cooldown_after_all_correct_groups_in_a_row():
    difficulty = Difficulty(rest_after=2, rest_epochs=3)
    for epoch, num_correct in enumerate([4, 3, 4, 4]):
        assert not difficulty.on_cooldown("a", epoch)
        difficulty.end_step([stats("a", num_correct)], lambda _, e=epoch: e)
    assert [difficulty.on_cooldown("a", epoch) for epoch in range(4, 9)] == [True] * 3 + [False] * 2
    assert not difficulty.on_cooldown("b", 4)


def test_all_correct_group_restarts_cooldown():
    difficulty = Difficulty(rest_after=1, rest_epochs=1)
    difficulty.end_step([stats("a", 4)], lambda _: 0)
    assert difficulty.on_cooldown("a", 1) and not difficulty.on_cooldown("a", 2)
    difficulty.end_step([stats("a", 4)], lambda _: 2)
    assert difficulty.on_cooldown("a", 3) and not difficulty.on_cooldown("a", 4)


def test_keep_rate_depends_on_the_level():
    """One rate for all prompts would expect solved ones to fill a batch as fast as others."""
    difficulty = Difficulty(rest_after=None, rest_epochs=1)
    prompts = [f"p{i}" for i in range(300)]
    difficulty.end_step([stats(p, 4 if i < 150 else 2) for i, p in enumerate(prompts)], lambda _: 0)
    difficulty.end_step([stats(p, 4 if i < 150 else 2) for i, p in enumerate(prompts)], lambda _: 1)
    assert difficulty.keep_rate("p0").value < 0.05
    assert difficulty.keep_rate("p299").value > 0.95
    assert 0.4 < difficulty.keep_rate("never seen").value < 0.6
