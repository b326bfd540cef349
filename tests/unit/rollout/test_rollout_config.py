"""Sections of the rollout, and the data that driver and engines exchange."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from megadapo.environments.config import EnvironmentConfig
from megadapo.errors import ConfigError
from megadapo.rollout.config import BranchingConfig, EvaluationConfig, RolloutConfig, SamplingConfig
from megadapo.rollout.types import continued_seed, response_seeds, sampled_logprobs

CALCULATOR = {"environment": "calculator"}
BRANCHES = {"initial_rollouts": 2}
PARTIAL = {"mode": "partial", "max_staleness": 1}


def test_defaults_are_those_of_the_paper():
    rollout, sampling, evaluation = RolloutConfig(), SamplingConfig(), EvaluationConfig()
    assert (rollout.temperature, rollout.max_response_tokens) == (1.0, 20480)
    assert (sampling.prompts_per_step, sampling.responses_per_prompt) == (512, 16)
    assert evaluation.samples_per_problem == 32
    assert (evaluation.temperature, evaluation.top_p) == (1.0, 0.7)


@pytest.mark.parametrize(
    ("section", "values", "key"),
    [
        (RolloutConfig, {"num_engines": 0}, "rollout.num_engines"),
        (RolloutConfig, {"tensor_parallel": 0}, "rollout.tensor_parallel"),
        (RolloutConfig, {"pipeline_parallel": 0}, "rollout.pipeline_parallel"),
        (RolloutConfig, {"expert_parallel": True}, "rollout.expert_parallel"),
        (RolloutConfig, {"vllm": {"enforce_egaer": True}}, "did you mean enforce_eager?"),
        (RolloutConfig, {"vllm": {"seed": 1}}, "rollout.vllm.seed cannot be set: each response"),
        (RolloutConfig, {"vllm": {"max_num_batched_tokens": "8k"}}, "= '8k' must be of type int"),
        (RolloutConfig, {"temperature": 0.0}, "rollout.temperature"),
        (EvaluationConfig, {"top_p": 0.0}, "evaluation.top_p"),
        (EvaluationConfig, {"top_p": 1.1}, "evaluation.top_p"),
        (RolloutConfig, {"kv_cache_gib": 0}, "rollout.kv_cache_gib"),
        (RolloutConfig, {"gpu_memory_utilization": 1.0}, "rollout.gpu_memory_utilization"),
        (RolloutConfig, {"engine_progress_timeout_s": 0.0}, "rollout.engine_progress_timeout_s"),
        (SamplingConfig, {"responses_per_prompt": 1}, "sampling.responses_per_prompt"),
        (SamplingConfig, {"accuracy_range": (0.5, 0.5)}, "sampling.accuracy_range"),
        (SamplingConfig, {"prompts_per_round": 600}, "sampling.prompts_per_round"),
        (SamplingConfig, {"mode": "rounds", "prompts_per_round": 6000}, "prompts_per_round"),
        (SamplingConfig, {"mode": "rounds", "max_staleness": 1}, "sampling.max_staleness"),
        (SamplingConfig, {"mode": "partial"}, "sampling.max_staleness"),
        (SamplingConfig, {"mode": "one_step_off"}, "sampling.max_staleness"),
        (SamplingConfig, {"mode": "one_step_off", "max_staleness": 2}, "set it to 1"),
        (SamplingConfig, {"mode": "async", "max_staleness": 1}, "at least 2"),
        (SamplingConfig, {"max_staleness": 1}, 'sampling.mode = "partial"'),
        (SamplingConfig, {"max_asked_per_prompt": 0.5}, "sampling.max_asked_per_prompt"),
        (SamplingConfig, {"on_shortfall": "crash"}, "sampling.on_shortfall"),
        (EvaluationConfig, {"every": -1}, "evaluation.every"),
        (EvaluationConfig, {"temperature": -0.1}, "evaluation.temperature"),
        (EvaluationConfig, {"samples_per_problem": 0}, "evaluation.samples_per_problem"),
        (BranchingConfig, {"beam_size": 3}, "sampling.branching.beam_size: used only"),
        (SamplingConfig, {"responses_per_prompt": 2, "branching": BRANCHES}, "rollouts = 2"),
        (SamplingConfig, PARTIAL | {"branching": BRANCHES}, 'sampling.mode = "partial"'),
        (RolloutConfig, {"environments": [CALCULATOR, CALCULATOR]}, 'the name "calculator"'),
        (
            RolloutConfig,
            {"environments": [CALCULATOR | {"tool_parser": "hermess"}]},
            "did you mean hermes?",
        ),
        (EnvironmentConfig, {"environment": "calculater"}, "did you mean calculator?"),
        (EnvironmentConfig, {"environment": "my_games"}, '"MODULE:CLASS"'),
        (EnvironmentConfig, {"environment": "a:B", "recovery": "always"}, "recovery"),
        (EnvironmentConfig, {"environment": "a:B", "name": "a b"}, "environments.name"),
    ],
)
def test_invalid_value_is_refused_with_its_key(section, values, key):
    with pytest.raises(ConfigError, match=re.escape(key)):
        section(**values)


def test_evaluation_may_be_greedy():
    assert EvaluationConfig(temperature=0.0).temperature == 0.0


def test_seeds_are_portable():
    """Python's hash() changes with every process."""
    assert response_seeds(2, 7, "train", 12, "id-3") == (
        533624804054033046,
        272604831935903300,
    )


def test_every_part_changes_the_seed():
    names = [
        (run_seed, purpose, index, prompt)
        for run_seed in (0, 1)
        for purpose in ("train", "evaluation")
        for index in range(20)
        for prompt in ("a", "b")
    ]
    seeds = [seed for name in names for seed in response_seeds(16, *name)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def table(entries):
    """Return a table of (token, log-prob) pairs per position."""
    ends = np.cumsum([len(position) for position in entries]).tolist()
    flat = [pair for position in entries for pair in position]
    return SimpleNamespace(
        start_indices=[0, *ends[:-1]],
        end_indices=ends,
        token_ids=[token for token, _ in flat],
        logprobs=[value for _, value in flat],
    )


def test_sampled_token_is_found_among_others():
    """The first entry of a position is the most probable token."""
    values = sampled_logprobs([5, 9], table([[(5, -0.5)], [(7, -0.1), (9, -3.0)]]))
    assert values.dtype == np.float32
    assert values.tolist() == [-0.5, -3.0]


def test_missing_log_prob_is_nan():
    """A value of 0.0 would mean that the token was certain."""
    values = sampled_logprobs([5, 6, 7, 8], table([[(5, -0.5)], [], [(1, -0.1)], [(8, None)]]))
    assert values[0] == np.float32(-0.5)
    assert all(math.isnan(value) for value in values[1:])
    assert np.isnan(sampled_logprobs([1, 2], None)).all()
    assert np.isnan(sampled_logprobs([5, 6], table([[(5, -0.5)]]))).tolist() == [False, True]


def test_one_entry_per_position():
    """This case has a fast path."""
    values = sampled_logprobs([5, 6, 7], table([[(5, -0.5)], [(6, None)], [(7, -2.0)]]))
    assert values.dtype == np.float32
    assert values[[0, 2]].tolist() == [-0.5, -2.0] and math.isnan(values[1])
    # as many entries as positions, but not one per position
    shifted = sampled_logprobs([5, 6], table([[(5, -0.5), (6, -0.1)], []]))
    assert shifted[0] == -0.5 and math.isnan(shifted[1])


def test_continued_response_has_new_noise():
    """The old seed would repeat the same noise for other tokens."""
    begun = np.array([3, 4, 5], dtype=np.int32)
    seeds = {continued_seed(seed, begun[:n]) for seed in (1, 2) for n in range(4)}
    assert len(seeds) == 8 and all(0 <= seed < 2**63 for seed in seeds)
    assert continued_seed(1, begun[:0]) == 1
    assert continued_seed(1, begun) == continued_seed(1, begun.copy())
    assert continued_seed(1, begun) != continued_seed(1, begun[::-1].copy())
