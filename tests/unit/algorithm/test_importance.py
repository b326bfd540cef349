"""Importance weights against their definition in float64, by token and by sequence."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from megadapo.algorithm.importance import (
    ImportanceConfig,
    bounded_weights,
    importance_ratios,
    is_outside,
)
from megadapo.errors import ConfigError

LENGTHS = (3, 1, 0, 40, 7)
"""Sequence 2 has no weighted token."""


def log_probs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(sum(LENGTHS), generator=generator)
    proximal = rollout + 0.8 * torch.randn(sum(LENGTHS), generator=generator)
    return proximal, rollout, torch.repeat_interleave(torch.arange(5), torch.tensor(LENGTHS))


def ratios_of(
    proximal: torch.Tensor, rollout: torch.Tensor, sequences: torch.Tensor, **options: Any
) -> torch.Tensor:
    options = {"num_sequences": 5, "level": "sequence"} | options
    return importance_ratios(proximal, rollout, sequences, **options)


def defined(
    proximal: torch.Tensor, rollout: torch.Tensor, sequences: torch.Tensor, config: ImportanceConfig
) -> list[float]:
    """Return the documented weights, computed one token at a time."""
    gaps = [float(a) - float(b) for a, b in zip(proximal, rollout, strict=True)]
    if config.level == "sequence":
        own: dict[int, list[float]] = {}
        for gap, sequence in zip(gaps, sequences.tolist(), strict=True):
            own.setdefault(sequence, []).append(gap)
        gaps = [math.fsum(own[s]) / len(own[s]) for s in sequences.tolist()]
    ratios = [math.exp(gap) for gap in gaps]
    if config.bound == "truncate":
        return [min(max(ratio, config.low), config.high) for ratio in ratios]
    if config.bound == "mask":
        return [ratio if config.low <= ratio <= config.high else 0.0 for ratio in ratios]
    return ratios


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bound", ["truncate", "mask", "none"])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.05), (0.9, 1.1)])
def test_weights_match_definition(level, bound, low, high):
    config = ImportanceConfig(level=level, bound=bound, low=low, high=high)
    proximal, rollout, sequences = log_probs()
    ratios = ratios_of(proximal, rollout, sequences, level=level)
    weights = bounded_weights(ratios, config)
    expected = defined(proximal, rollout, sequences, config)
    np.testing.assert_allclose(weights.numpy(), expected, rtol=2e-6)
    changed = int((weights != ratios).sum())
    assert int(is_outside(ratios, config).sum()) == changed
    assert (changed > 0) == (bound != "none")


def test_sequence_ratio_bits_do_not_depend_on_micro_batch():
    """A sum in another order would make a mask of a sequence depend on the split."""
    proximal, rollout, sequences = log_probs()
    whole = ratios_of(proximal, rollout, sequences)
    for sequence in (0, 1, 3, 4):
        own = torch.nonzero(sequences == sequence).squeeze(1)
        shuffled = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(1))]
        first = torch.zeros_like(shuffled)
        alone = ratios_of(proximal[shuffled], rollout[shuffled], first, num_sequences=1)
        assert alone.unique().tolist() == whole[own].unique().tolist()


def test_sequence_ratio_bits_do_not_depend_on_rank():
    """Tokens of a sequence that another rank has must count, and a rank without any takes part."""
    proximal, rollout, sequences = log_probs()
    whole = ratios_of(proximal, rollout, sequences)
    owners = torch.arange(len(sequences)) % 2
    sums: list[torch.Tensor] = []
    for _ in range(2):
        # first what every rank has, then all of it
        parts, total = [], sum(sums) if sums else None
        for rank in range(3):
            own = owners == rank
            add_up = sums.append if total is None else lambda own, all=total: own.copy_(all)
            inputs = (values[own] for values in (proximal, rollout, sequences))
            parts.append(ratios_of(*inputs, add_up=add_up))
    assert len(sums) == 3
    for rank, found in enumerate(parts):
        assert found.tolist() == whole[owners == rank].tolist()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_extreme_log_ratios_give_finite_weights(level):
    size = 100_000
    proximal, rollout = torch.full((size,), -1e4), torch.zeros(size)
    sequences = torch.zeros(size, dtype=torch.int64)
    for sign in (1, -1):
        ratios = ratios_of(sign * proximal, rollout, sequences, num_sequences=1, level=level)
        assert ratios.isfinite().all()
        assert ratios[0].item() == pytest.approx(math.exp(-20 * sign), rel=1e-6)


def test_equal_or_no_logprobs_have_weight_one():
    """On-policy tokens under scope = "all" must train as they would without weights."""
    proximal, _, sequences = log_probs()
    for level in ("token", "sequence"):
        ratios = ratios_of(proximal, proximal, sequences, level=level)
        assert (bounded_weights(ratios, ImportanceConfig(bound="mask")) == 1.0).all()
        nothing = proximal[:0]
        ratios = ratios_of(nothing, nothing, sequences[:0], level=level)
        assert len(bounded_weights(ratios, ImportanceConfig())) == 0


def test_nan_logprob_gives_nan_weight():
    """A mask that hides it would continue to train a broken model."""
    broken = torch.tensor([math.nan, -1.0])
    ratios = ratios_of(broken, torch.zeros(2), torch.arange(2), level="token")
    for bound in ("truncate", "mask", "none"):
        weights = bounded_weights(ratios, ImportanceConfig(bound=bound))
        assert weights.isnan().tolist() == [True, False]


@pytest.mark.parametrize("values", [{"low": 1.1}, {"high": 0.9}, {"high": 0.0}, {"low": -0.1}])
def test_bounds_must_include_ratio_one(values):
    with pytest.raises(ConfigError, match="algorithm.importance"):
        ImportanceConfig(**values)


@pytest.mark.parametrize("stale_logprobs", ["rollout", "none"])
def test_keys_without_effect_are_rejected(stale_logprobs):
    """A mask that is set but never applied would mislead the user."""
    with pytest.raises(ConfigError, match=r"algorithm\.importance\.bound.*stale_logprobs"):
        ImportanceConfig(stale_logprobs=stale_logprobs, bound="mask")
    ImportanceConfig(stale_logprobs=stale_logprobs)
    ImportanceConfig(stale_logprobs=stale_logprobs, bound="mask", scope="all")
