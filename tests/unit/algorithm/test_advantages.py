"""Advantages of groups, steps and tokens, shaping and selection, against formulas of the papers."""

import numpy as np
import pytest
import torch

from megadapo.algorithm import reference
from megadapo.algorithm.advantages import (
    advantages,
    group_advantages,
    has_mixed_steps,
    is_mixed,
    process_advantages,
    response_advantages,
    rewards_differ,
    shaped_rewards,
    whitened,
)
from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.gae import generalized_advantages, token_rewards, value_losses
from megadapo.algorithm.loss_weights import loss_weights
from megadapo.algorithm.reference import generalized_advantages as definition
from tests.support.trainer.batches import scored_group

CONFIG = AlgorithmConfig(advantage="grpo-process", overlong_buffer=0)
LENGTHS = [1, 7, 2, 1, 113, 30]


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_step_advantages_use_shaped_rewards_of_each_group(normalize_by_std):
    groups = [
        scored_group([10, 20, 15], rewards=[1.0, -1.0, -1.0]),
        scored_group([1, 1], rewards=[-1.0, 1.0]),
        scored_group([1, 1], rewards=[1.0, 1.0]),
    ]
    config = AlgorithmConfig(
        overlong_buffer=10, overlong_factor=0.5, normalize_by_std=normalize_by_std
    )
    shaped = [np.array([1.0, -1.5, -1.25]), np.array([-1.0, 1.0]), np.array([1.0, 1.0])]
    expected = [group_advantages(one, normalize_by_std=normalize_by_std) for one in shaped]
    result = advantages(groups, config, max_response_tokens=20)
    np.testing.assert_allclose(result, np.concatenate(expected), rtol=1e-15)


@pytest.mark.parametrize(
    ("rule", "rewards", "expected"),
    [
        ("grpo", [1, -1, -1, -1], [1.5, -0.5, -0.5, -0.5]),
        ("grpo", [1, 1, -1, -1], [0.866025404, 0.866025404, -0.866025404, -0.866025404]),
        ("rloo", [1, -1, -1, -1], [2, -2 / 3, -2 / 3, -2 / 3]),
        ("rloo", [1, 1, -1, -1], [4 / 3, 4 / 3, -4 / 3, -4 / 3]),
        ("rloo", [3.0, 1.0], [2.0, -2.0]),
        ("maxrl", [1, -1, -1, -1], [3.0, -1.0, -1.0, -1.0]),
        ("maxrl", [1, 0, 1, 0], [1.0, -1.0, 1.0, -1.0]),
        ("reinforce++", [1, -1, 0.5], [1.0, -1.0, 0.5]),
        ("reinforce++-baseline", [1, -1, -1, -1], [1.5, -0.5, -0.5, -0.5]),
    ],
)
def test_rules_on_one_group(rule, rewards, expected):
    np.testing.assert_allclose(group_advantages(rewards, rule=rule), expected, rtol=1e-9)


@pytest.mark.parametrize("rule", ["grpo", "rloo", "maxrl", "reinforce++-baseline"])
@pytest.mark.parametrize("rewards", [[1.0], [-1.0] * 16, [0.0, 0.0]])
def test_equal_rewards_have_zero_advantages(rule, rewards):
    """Catches NaN: of a group of one (RLOO has no others), or a mean of 0 (MaxRL's divisor)."""
    assert (group_advantages(rewards, rule=rule) == 0.0).all()


@pytest.mark.parametrize("rewards", [[1.0, 0.0, -1.0], [2.0, 1.0], [1.0, -0.5]])
def test_maxrl_rejects_other_rewards(rewards):
    with pytest.raises(ValueError, match="1 and 0, or 1 and -1"):
        group_advantages(rewards, rule="maxrl")


def test_whitening_counts_tokens_in_the_loss():
    """Compared with every token's value written out; the truncated response is not counted."""
    groups = [
        scored_group([3, 1], rewards=[1.0, -1.0]),
        scored_group([2, 7], rewards=[1.0, 5.0], truncated=[False, True]),
    ]
    for rule, third in (("reinforce++", 1.0), ("reinforce++-baseline", -2.0)):
        config = AlgorithmConfig(advantage=rule, overlong_buffer=0, overlong_filtering=True)
        tokens = np.array([1.0, 1, 1, -1, third, third])
        expected = (np.array([1.0, -1.0, third]) - tokens.mean()) / tokens.std(ddof=1)
        found = advantages(groups, config, max_response_tokens=20)
        np.testing.assert_allclose(found[:3], expected, rtol=1e-12)
        assert np.isfinite(found).all()


@pytest.mark.parametrize("num_tokens", [[4, 4], [0, 0], [1, 0]])
def test_whitening_of_equal_or_no_values_is_zero(num_tokens):
    assert (whitened(np.array([0.3, 0.3]), np.array(num_tokens)) == 0.0).all()


def test_nearly_constant_group_keeps_unit_scale():
    """An epsilon under the fraction would shrink the advantages of small differences."""
    values = group_advantages([0.0, 1e-7, 0.0, 1e-7])
    assert values.std(ddof=1) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("rewards", [[], [1.0, np.nan], [1.0, np.inf], [[1.0], [2.0]]])
def test_bad_rewards_are_rejected(rewards):
    with pytest.raises(ValueError):
        group_advantages(rewards)


@pytest.mark.parametrize(
    ("correct", "kept"),
    [([True, False], True), ([True, True], False), ([False] * 3, False), ([True], False)],
)
def test_is_mixed(correct, kept):
    assert is_mixed(correct) is kept


@pytest.mark.parametrize("rule", ["grpo", "rloo", "reinforce++-baseline"])
def test_rounding_does_not_make_rewards_different(rule):
    """0.1 + 0.2 and 0.3 differ in the last bit, which a standard deviation makes advantages of."""
    rewards = np.array([0.1 + 0.2, 0.3, 0.3, 0.3])
    found = response_advantages(rewards, [4], np.full(4, 5), rule=rule, normalize_by_std=True)
    assert rewards[0] != rewards[1] and found.tolist() == [0.0] * 4
    # the mean of equal numbers may be another one
    assert (group_advantages([0.1 + 0.2] * 3, rule=rule) == 0.0).all()
    of_fp32 = np.array([float(np.float32(0.7)), 0.7, 0.7, 0.7])
    assert (group_advantages(of_fp32, rule=rule) == 0.0).all()
    near = np.array([0.3 + 1e-5, 0.3, 0.3, 0.3])
    assert response_advantages(near, [4], np.full(4, 5), rule=rule, normalize_by_std=True).any()


@pytest.mark.parametrize("rewards", [[5.6e-17, 0.0, 0.0, 0.0], [0.0, 1e-200], [0.0, 5e-324, 0.0]])
def test_what_is_left_of_cancelled_scores_has_no_advantage(rewards):
    """A division by such a deviation makes full advantages of it, or infinite ones."""
    assert np.abs(group_advantages(rewards)).max() < 1e-6
    assert np.abs(whitened(np.array(rewards), np.full(len(rewards), 3))).max() < 1e-6
    assert not rewards_differ(rewards)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.2, 0.4], True),
        ([0.3, 0.3 + 1e-5], True),
        ([0.7, 0.7], False),
        ([7e3, 7e3 + 1e-4], False),
    ],
)
def test_rewards_differ(rewards, expected):
    assert rewards_differ(rewards) is expected


def test_filtering_leaves_the_punishment_of_complete_responses():
    """A complete response in the buffer is punished; a truncated one has no loss."""
    group = scored_group([40, 48, 10], rewards=[1.0, -1.0, 1.0], truncated=[False, True, False])
    config = AlgorithmConfig(overlong_filtering=True, overlong_buffer=16, normalize_by_std=False)
    rewards = shaped_rewards(group, config, max_response_tokens=48)
    assert rewards.tolist() == [0.5, -2.0, 1.0]
    found = advantages([group], config, max_response_tokens=48)
    np.testing.assert_allclose(found, rewards - rewards.mean(), rtol=1e-15)
    assert loss_weights([group], config).tolist() == [1 / 50, 0.0, 1 / 50]


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


def test_step_rewards_reach_gae():
    """One number at the end would say nothing of which step was right."""
    steps = (((2, 1.0), (5, 0.5)), ())
    group = scored_group([6, 3], rewards=[0.5, -1.0], steps=steps)
    config = AlgorithmConfig(advantage="gae", overlong_buffer=2)
    to_go = advantages([group], config, max_response_tokens=7)
    # the first response is punished for 1 of 2 tokens, in its last step
    assert [own.tolist() for own in to_go] == [[1, 1, 0, 0, 0, 0], [-1, -1, -1]]
    rewards = token_rewards(np.concatenate(to_go), np.repeat([0, 1], [6, 3]))
    assert rewards.tolist() == [0, 1.0, 0, 0, 0.0, 0, 0, 0, -1.0]


def test_step_reward_without_its_last_token_goes_to_the_one_before():
    """Steps of 1.0 and 0.5 end with tokens that a tool wrote; the last token is behind both."""
    rewards = token_rewards(np.array([1.5, 1.5, 0.5, 0.5, 0.0]), np.zeros(5))
    assert rewards.tolist() == [0, 1.0, 0, 0.5, 0]
    without = token_rewards(np.array([1.5, 0.5, 0.0]), np.zeros(3))
    assert without.tolist() == [1.0, 0.5, 0.0]


def test_gae_of_steps_by_hand():
    """Values of 0: a token has the scores of its step and of later ones, discounted by tokens."""
    sequences, values = np.zeros(5), np.zeros(5)
    rewards = token_rewards(np.array([1.5, 1.5, 0.5, 0.5, 0.5]), sequences)
    found = generalized_advantages(rewards, values, sequences, discount=0.5)
    assert found.tolist() == [0.5 + 0.5 / 16, 1.0 + 0.5 / 8, 0.125, 0.25, 0.5]


@pytest.mark.parametrize(("discount", "gae_lambda"), [(1, 1), (0.99, 0.95), (1, 0), (0.5, 0.25)])
def test_packed_gae_matches_plain_loops(discount, gae_lambda):
    rng = np.random.default_rng(0)
    sequences = np.repeat(np.arange(len(LENGTHS)) * 3, LENGTHS)
    rewards, values = rng.normal(size=len(sequences)), rng.normal(size=len(sequences))
    numbers = {"discount": discount, "gae_lambda": gae_lambda}
    found = generalized_advantages(rewards, values, sequences, **numbers)
    cu_seqlens = np.cumsum([0, *LENGTHS]).tolist()
    expected = definition(rewards.tolist(), values.tolist(), cu_seqlens, **numbers)
    np.testing.assert_allclose(found, expected, rtol=1e-14, atol=1e-14)


def test_no_tokens_at_all():
    """A rank's micro-batch may be padding alone."""
    nothing = np.empty(0)
    assert len(generalized_advantages(nothing, nothing, np.empty(0, dtype=np.int64))) == 0
    assert len(token_rewards(nothing, np.empty(0, dtype=np.int64))) == 0


def test_score_is_at_last_token():
    sequences = np.array([0, 0, 0, 4, 5, 5])
    scores = np.array([1.0, 1.0, 1.0, -1.0, 0.5, 0.5])
    assert token_rewards(scores, sequences).tolist() == [0, 0, 1.0, -1.0, 0, 0.5]


def _plain_loss(value: float, old: float, target: float, clip: float | None) -> tuple[float, float]:
    """Return loss and derivative of one value, case by case."""
    plain = (0.5 * (value - target) ** 2, value - target)
    if clip is None:
        return plain
    moved = min(max(value, old - clip), old + clip)
    if 0.5 * (moved - target) ** 2 <= plain[0]:
        return plain
    return 0.5 * (moved - target) ** 2, (moved - target) if moved == value else 0.0


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_matches_plain_cases(clip):
    """Values inside the band, at its edges, and beyond it on both sides."""
    offsets = [-0.5, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 5.0]
    cases = [(old + off, old, ret) for old in (0.0, 1.5) for off in offsets for ret in (-1.0, 2.0)]
    values, old, returns = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*cases, strict=True)
    )
    values.requires_grad_()
    losses, is_clipped = value_losses(values, old, returns, value_clip=clip)
    losses.sum().backward()
    expected = [_plain_loss(*case, clip) for case in cases]
    np.testing.assert_allclose(losses.detach().numpy(), [loss for loss, _ in expected], rtol=1e-14)
    assert values.grad is not None
    np.testing.assert_allclose(values.grad.numpy(), [slope for _, slope in expected], rtol=1e-14)
    assert bool(is_clipped.any()) == (clip is not None)
