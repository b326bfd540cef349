"""Defaults and checks of the rollout, sampling and evaluation sections."""

import re

import pytest

from megadapo.environments.config import EnvironmentConfig
from megadapo.errors import ConfigError
from megadapo.rollout.config import BranchingConfig, EvaluationConfig, RolloutConfig, SamplingConfig

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
