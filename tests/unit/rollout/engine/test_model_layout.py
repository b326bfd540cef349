"""Splits of an engine that its model does not allow, found before anything starts."""

import pytest

from megadapo.errors import ConfigError
from megadapo.models.shape import model_shape
from megadapo.rollout.config import RolloutConfig
from megadapo.rollout.engine.model_layout import validate_engine_layout

DENSE = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 96,
    "vocab_size": 64,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
}
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "moe_intermediate_size": 10,
}


@pytest.mark.parametrize(
    ("model", "split"),
    [
        (DENSE, {"tensor_parallel": 4}),
        (DENSE, {"tensor_parallel": 2, "pipeline_parallel": 3}),
        (EXPERTS, {"tensor_parallel": 2}),
        (EXPERTS, {"tensor_parallel": 6, "expert_parallel": True}),
    ],
)
def test_splits_that_fit_are_accepted(model, split):
    """Heads are repeated where there are fewer of them than ranks; whole experts are not cut."""
    validate_engine_layout(model_shape(model), RolloutConfig(**split))


@pytest.mark.parametrize(
    ("model", "split", "problem"),
    [
        (DENSE, {"tensor_parallel": 8}, "tensor_parallel = 8 .*num_attention_heads = 12"),
        (DENSE, {"tensor_parallel": 3}, "tensor_parallel = 3 .*num_key_value_heads = 2"),
        (DENSE, {"pipeline_parallel": 4}, "pipeline_parallel = 4 .*num_hidden_layers = 3"),
        (DENSE, {"tensor_parallel": 2, "expert_parallel": True}, "this one has none"),
        (EXPERTS, {"tensor_parallel": 4}, "tensor_parallel = 4 .*moe_intermediate_size = 10"),
        (
            EXPERTS,
            {"tensor_parallel": 4, "expert_parallel": True},
            "tensor_parallel = 4 .*num_experts = 6",
        ),
    ],
)
def test_a_split_the_model_does_not_allow_is_named(model, split, problem):
    with pytest.raises(ConfigError, match=problem):
        validate_engine_layout(model_shape(model), RolloutConfig(**split))


def test_all_problems_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        validate_engine_layout(
            model_shape(DENSE), RolloutConfig(tensor_parallel=8, pipeline_parallel=4)
        )
    assert len(str(caught.value).splitlines()) == 2
