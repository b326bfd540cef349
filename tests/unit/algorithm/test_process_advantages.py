"""Process supervision: what scores of steps make of single tokens' advantages."""

import numpy as np
import pytest

from megadapo.algorithm import reference
from megadapo.algorithm.advantages import (
    advantages,
    group_advantages,
    has_mixed_steps,
    process_advantages,
)
from megadapo.algorithm.config import AlgorithmConfig
from tests.support.trainer.batches import scored_group

CONFIG = AlgorithmConfig(advantage="grpo-process", overlong_buffer=0)


def test_paper_example():
    """Steps scored (0.2, 0.8) and 0.4, of arXiv 2402.03300's formula with a standard deviation over
    n, where ours is over n - 1 as everywhere: all numbers differ by sqrt(2 / 3)."""
    first, second = process_advantages([((2, 0.2), (5, 0.8)), ((3, 0.4),)], [5, 3])
    to_ours = np.sqrt(2 / 3)
    np.testing.assert_allclose(
        first, to_ours * np.array([0.267261, 0.267261, 1.336306, 1.336306, 1.336306]), atol=1e-6
    )
    np.testing.assert_allclose(second, to_ours * np.full(3, -0.267261), atol=1e-6)


def test_later_steps_are_discounted():
    """A discount by tokens would make long steps count less."""
    first, second = process_advantages([((2, 0.2), (5, 0.8)), ((3, 0.4),)], [6, 3], discount=0.5)
    expected = [-1.069045 + 0.5 * 1.336306] * 2 + [1.336306] * 3 + [0.0]
    np.testing.assert_allclose(first, np.sqrt(2 / 3) * np.array(expected), atol=1e-6)
    np.testing.assert_allclose(second, np.sqrt(2 / 3) * np.full(3, -0.267261), atol=1e-6)


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_ragged_steps_match_definition(discount):
    """Equal ends, tokens behind the last step, responses without a step or a token."""
    rng = np.random.default_rng(0)
    lengths = [1, 40, 7, 13, 2, 0]
    num_steps = [1, 9, 3, 0, 2, 0]
    steps = [
        tuple(sorted((int(rng.integers(1, n + 1)), float(rng.normal())) for _ in range(k)))
        for n, k in zip(lengths, num_steps, strict=True)
    ]
    found = process_advantages(steps, lengths, discount=discount)
    definition = reference.process_advantages(steps, lengths, discount=discount)
    for own, expected in zip(found, definition, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-12, atol=1e-14)
    assert [len(own) for own in found] == lengths
    assert not found[3].any()


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_one_step_per_response_is_grpo(normalize_by_std):
    """With the overlong punishment, and whether the step is given or the response has none."""
    lengths, rewards = [10, 20, 15, 18], [1.0, -1.0, -1.0, 1.0]
    config = CONFIG.model_copy(update={"overlong_buffer": 10, "normalize_by_std": normalize_by_std})
    grpo = config.model_copy(update={"advantage": "grpo"})
    given = tuple(((n, r),) for n, r in zip(lengths, rewards, strict=True))
    expected = advantages([scored_group(lengths, rewards=rewards)], grpo, max_response_tokens=20)
    for steps in ((), given, (given[0], (), given[2], ())):
        groups = [scored_group(lengths, rewards=rewards, steps=steps)]
        found = advantages(groups, config, max_response_tokens=20)
        for own, value, length in zip(found, expected, lengths, strict=True):
            np.testing.assert_allclose(own, np.full(length, value), rtol=1e-14)


def test_groups_are_normalised_separately_and_last_step_is_punished():
    config = CONFIG.model_copy(update={"overlong_buffer": 4})
    groups = [
        scored_group([4, 1], steps=(((2, 1.0), (4, 0.0)), ((1, 1.0),))),
        scored_group([3, 7], steps=(((3, 5.0),), ((6, 1.0), (7, 3.0)))),
    ]
    found = advantages(groups, config, max_response_tokens=8)
    shaped = [[1.0, 0.0, 1.0], [5.0, 1.0, 3.0 - 0.75]]
    (a, b, c), (d, e, f) = (group_advantages(scores) for scores in shaped)
    expected = [[a + b] * 2 + [b] * 2, [c], [d] * 3, [e + f] * 6 + [f]]
    assert len(found) == 4
    for own, values in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, values, rtol=1e-14)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((((2, 1.0), (4, 0.0)), ((3, 1.0),)), True),
        ((((2, 1.0), (4, 1.0)), ((3, 1.0),)), False),
        # two steps that end together and cancel each other: no token has an advantage
        ((((4, 2.0), (4, 0.0)), ((3, 1.0),)), False),
        # the same, but for rounding; and scores that are equal but for it
        ((((4, 0.3), (4, 0.1)), ((3, 0.2),)), False),
        ((((4, 0.1 + 0.2),), ((3, 0.3),)), False),
        ((), False),
    ],
)
def test_has_mixed_steps(steps, expected):
    assert has_mixed_steps(scored_group([4, 3], steps=steps)) is expected


def test_has_mixed_steps_without_steps_uses_rewards():
    assert has_mixed_steps(scored_group([4, 3], rewards=[1.0, 0.0]))


def test_equal_steps_give_exact_zeros():
    found = process_advantages([((1, 0.1), (2, 0.1)), ((3, 0.1),)], [2, 3])
    assert all((own == 0.0).all() for own in found)
