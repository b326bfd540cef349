"""Keys of `[algorithm]` that exclude each other."""

import re

import pytest

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.objective import PolicyObjective
from megadapo.errors import ConfigError


@pytest.mark.parametrize(
    ("objective", "problem"),
    [
        ({"ratio": "none"}, 'needs a ratio, and algorithm.objective.ratio is "none"'),
        ({"ratio": "sequence", "gate": "bapo"}, 'algorithm.objective.gate = "bapo" is defined on'),
        ({"gate": "weight"}, "needs algorithm.objective.weight_max"),
        ({"gate": "soft", "clip_high": 0.3}, "algorithm.objective.clip_high: not read"),
        ({"weight_max": 5.0}, "algorithm.objective.weight_max: not read"),
        ({"gate": "none", "dual_clip": 3.0}, "algorithm.objective.dual_clip: not read"),
        ({"gate": "bapo", "clip_low": 0.4}, "algorithm.objective.clip_low: not read"),
        (
            {"tau_pos": 2.0, "weight_max": 5.0},
            "algorithm.objective.tau_pos, algorithm.objective.weight_max",
        ),
        ({"kl_value": "k1"}, "algorithm.objective.kl_value: not read"),
        (
            {"kl_coef": 0.1, "kl_in": "reward", "kl_value": "k1", "kl_gradient": "k2"},
            "has no gradient",
        ),
        *(
            ({"kl_coef": 0.1, "kl_in": "reward", "kl_value": kind}, 'only "k1" has the gradient')
            for kind in ("k2", "k3", "corrected-k3")
        ),
        ({"ratio": "sequence", "kl_coef": 1.0, "kl_value": "corrected-k3"}, "its own ratio"),
        ({"ratio": "sequence", "old_kl_coef": 1.0}, "a token's own divergence"),
    ],
)
def test_contradictory_objectives_are_rejected(objective, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        PolicyObjective(**objective)


IN_REWARD = {"kl_coef": 0.1, "kl_in": "reward", "kl_value": "k1"}
RLOO_WITH_KL = {"objective": IN_REWARD, "advantage": "rloo"}


@pytest.mark.parametrize(
    ("algorithm", "problem"),
    [
        ({"advantage": "rloo", "normalize_by_std": False}, "normalize_by_std: read only with"),
        ({"advantage": "maxrl"}, "set algorithm.overlong_buffer = 0"),
        ({"loss_aggregation": "seq-mean-token-sum-norm"}, "set both or neither"),
        ({"loss_length": 100}, "set both or neither"),
        ({"loss_aggregation": "vl"}, '"seq-mean-token-sum-norm" or "vl" need each other'),
        ({"length_exponent": 0.5}, "algorithm.length_exponent: read only with"),
        *(
            ({"loss_aggregation": "balanced"} | other, "the sign of each response's advantage")
            for other in ({"advantage": "gae"}, RLOO_WITH_KL)
        ),
        ({"overlong_buffer": 0, "overlong_factor": 0.5}, "algorithm.overlong_factor: nothing is"),
        (
            {"objective": {"kl_coef": 0.1, "kl_gradient": "k1"}},
            'algorithm.objective.kl_gradient = "k1" has a mean of 0',
        ),
        (
            {
                "objective": {"ratio": "none", "gate": "none"},
                "importance": {"stale_logprobs": "rollout"},
            },
            'algorithm.objective.ratio = "none" has none',
        ),
        ({"bapo": {"target_share": 0.5}}, "algorithm.bapo: read only with"),
        ({"bapo": {"low": [0.9, 0.6, 0.02]}}, "algorithm.bapo.low = [0.9, 0.6, 0.02] must be"),
        ({"bapo": {"high": [0.9, 1.6, 0.02]}}, "must be [first, last, step] with 1 <= first"),
        ({"bapo": {"high": [1.2, 3.0, 0.0]}}, "algorithm.bapo.high = [1.2, 3.0, 0.0] must be"),
        ({"pretraining": {"coef": 2.0, "max_text_tokens": 9}}, "algorithm.pretraining.coef, algor"),
        ({"pretraining": {"data": " "}}, "algorithm.pretraining.data is empty"),
        (
            {"pretraining": {"data": "x", "tokens_per_mini_batch": 64, "max_text_tokens": 65}},
            "algorithm.pretraining.max_text_tokens = 65 does not fit",
        ),
        ({"kl_control": {"target": 0.1}}, "algorithm.kl_control.target: only the KL divergence in"),
        ({"entropy_control": {"delta": 0.1}}, "algorithm.entropy_control.delta: read only with"),
        ({"kl_control": {"horizon": 5}}, "algorithm.kl_control.horizon: read only with"),
        ({"kl_control": {"rule": "doubling"}}, "algorithm.kl_control.rule: read only with"),
        (
            {"kl_control": {"target": 0.1, "rule": "doubling", "horizon": 5}},
            'not read with algorithm.kl_control.rule = "doubling"',
        ),
        ({"kl_control": {"old_target": 0.1}}, "read only with algorithm.objective.old_kl_coef"),
        ({"reference": {"refresh_every": 3}}, "no reference is kept with"),
        ({"objective": IN_REWARD}, "set normalize_by_std = false"),
        ({"objective": IN_REWARD, "advantage": "maxrl", "overlong_buffer": 0}, "of two values"),
        ({"objective": IN_REWARD, "advantage": "grpo-process"}, "taken off whole responses"),
        ({"advantage": "grpo-process", "gae_lambda": 0.9}, "algorithm.gae_lambda: read only"),
        ({"discount": 0.5}, "algorithm.discount: read only"),
        (
            RLOO_WITH_KL | {"overlong_filtering": True, "overlong_buffer": 0},
            "algorithm.overlong_filtering = true responses without a loss",
        ),
        (
            RLOO_WITH_KL | {"degenerate_filtering": True},
            "algorithm.degenerate_filtering = true responses without a loss",
        ),
        (
            RLOO_WITH_KL | {"importance": {"stale_logprobs": "none"}},
            "stale tokens is not computed",
        ),
    ],
)
def test_conflicting_sections_are_rejected(algorithm, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        AlgorithmConfig(**algorithm)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"overlong_filtering": True, "overlong_buffer": 0},
        {"overlong_filtering": False, "overlong_buffer": 1},
        {"overlong_filtering": True, "overlong_buffer": 1},
        RLOO_WITH_KL,
        {"objective": IN_REWARD, "normalize_by_std": False},
        {"objective": IN_REWARD, "advantage": "gae"},
        {
            "objective": IN_REWARD | {"old_kl_coef": 1.0},
            "advantage": "gae",
            "kl_control": {"target": 0.1, "rule": "doubling", "old_target": 0.01},
        },
        {"objective": {"ratio": "none", "gate": "none", "entropy_coef": 0.01}},
        {"objective": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}},
        {"objective": {"ratio": "sequence", "gate": "soft", "tau_neg": 1.0}},
        {"objective": {"gate": "bapo", "dual_clip": 3.0}},
        {"objective": {"gate": "weight", "weight_max": 5.0}},
        {"objective": {"kl_coef": 0.1, "kl_value": "k3", "kl_gradient": "k2"}},
        {"objective": IN_REWARD | {"ratio": "none", "gate": "none"}, "advantage": "rloo"},
        {"advantage": "gae", "discount": 0.99, "gae_lambda": 0.95},
        {"advantage": "grpo-process", "discount": 0.9},
    ],
)
def test_sections_that_fit_each_other(algorithm):
    AlgorithmConfig(**algorithm)
