"""The memory of prompts: a wrong one would skip prompts that still teach, or ask for too few."""

from __future__ import annotations

import json

from megadapo.rollout.sampling.difficulty import Difficulty
from megadapo.rollout.sampling.sampled_batch import GroupStats


def outcome(prompt_id: str, num_correct: int, *, order: int = 0, length: int = 10) -> GroupStats:
    return GroupStats(
        num_generated=4 * length,
        order=order,
        prompt_id=prompt_id,
        num_correct=num_correct,
        num_responses=4,
        reward_sum=0.0,
        lengths=(length,) * 4,
        num_truncated=0,
        is_mixed=0 < num_correct < 4,
        seconds=1.0,
    )


def test_a_prompt_rests_after_so_many_groups_all_right_in_a_row():
    memory = Difficulty(rest_after=2, rest_epochs=3)
    for epoch, num_correct in enumerate([4, 3, 4, 4]):
        assert not memory.rests("a", epoch)
        memory.end_step([outcome("a", num_correct)], lambda _, e=epoch: e)
    assert [memory.rests("a", epoch) for epoch in range(4, 9)] == [True] * 3 + [False] * 2
    assert not memory.rests("b", 4)


def test_a_prompt_that_came_back_right_rests_again():
    memory = Difficulty(rest_after=1, rest_epochs=1)
    memory.end_step([outcome("a", 4)], lambda _: 0)
    assert memory.rests("a", 1) and not memory.rests("a", 2)
    memory.end_step([outcome("a", 4)], lambda _: 2)
    assert memory.rests("a", 3) and not memory.rests("a", 4)


def test_no_prompt_rests_where_nobody_asked_for_it():
    memory = Difficulty(rest_after=None, rest_epochs=1)
    for epoch in range(9):
        memory.end_step([outcome("a", 4)], lambda _, e=epoch: e)
    assert not memory.rests("a", 9)


def test_the_yield_is_that_of_prompts_with_the_same_past():
    """Over all prompts, a batch of solved ones would be expected to fill as fast as any."""
    memory = Difficulty(rest_after=None, rest_epochs=1)
    prompts = [f"p{i}" for i in range(300)]
    memory.end_step([outcome(p, 4 if i < 150 else 2) for i, p in enumerate(prompts)], lambda _: 0)
    memory.end_step([outcome(p, 4 if i < 150 else 2) for i, p in enumerate(prompts)], lambda _: 1)
    assert memory.estimate("p0").value < 0.05
    assert memory.estimate("p299").value > 0.95
    assert 0.4 < memory.estimate("never seen").value < 0.6


def test_the_memory_survives_a_checkpoint_exactly():
    memory = Difficulty(rest_after=1, rest_epochs=2)
    memory.end_step([outcome("a", 4), outcome("b", 0, length=7)], lambda _: 5)
    restored = Difficulty(rest_after=1, rest_epochs=2)
    restored.load_state_dict(json.loads(json.dumps(memory.state_dict())))
    assert restored.state_dict() == memory.state_dict()
    assert restored.rests("a", 6) and not restored.rests("b", 6)
    assert restored.mean_length("b") == 7.0
    assert restored.mean_length("never seen") == float("inf")
