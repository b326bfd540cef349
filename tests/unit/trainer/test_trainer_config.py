"""Configuration of the trainer: the paper's schedule, and layouts that cannot be."""

import json
import subprocess
import sys

import pytest

from megadapo.errors import ConfigError, WeightError
from megadapo.models.description import ROPE_KINDS, Rope, describe_model, read_rope
from megadapo.trainer.config import ModelConfig, OptimizerConfig, TrainerConfig
from megadapo.trainer.model.model_layout import validate_model_layout
from tests.support.models.large import QWEN_7B, QWEN_30B_A3B
from tests.support.models.tiny_models import FAMILY_NAMES, TEXT


def test_warm_up_is_linear_over_rollout_steps_and_never_zero():
    optimizer = OptimizerConfig(lr=1e-6, warmup_steps=20)
    assert optimizer.lr_at(1) == pytest.approx(1e-6 / 20)
    assert optimizer.lr_at(10) == pytest.approx(5e-7)
    assert optimizer.lr_at(20) == optimizer.lr_at(21) == optimizer.lr_at(10_000) == 1e-6
    assert OptimizerConfig(lr=3e-4, warmup_steps=0).lr_at(1) == 3e-4


def test_cosine_starts_after_warm_up_and_stays_at_its_end():
    optimizer = OptimizerConfig(lr=1.0, warmup_steps=10, decay_steps=110, min_lr=0.1)
    assert optimizer.lr_at(5) == 0.5
    assert optimizer.lr_at(10) == 1.0
    assert optimizer.lr_at(60) == pytest.approx(0.55)
    assert optimizer.lr_at(110) == optimizer.lr_at(500) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"lr": -1.0}, "trainer.optimizer.lr"),
        ({"lr": float("nan")}, "trainer.optimizer.lr"),
        ({"betas": (0.9, 1.0)}, "trainer.optimizer.betas"),
        ({"betas": (0.9,)}, "trainer.optimizer.betas"),
        ({"cpu_offload_fraction": 1.5}, "trainer.optimizer.cpu_offload_fraction"),
        ({"warmup_steps": -1}, "trainer.optimizer.warmup_steps"),
        ({"decay_steps": 20}, "trainer.optimizer.decay_steps"),
        ({"min_lr": 0.1}, "trainer.optimizer.min_lr"),
    ],
)
def test_impossible_optimizer_values_name_their_key(changes, key):
    with pytest.raises(ConfigError, match=key):
        OptimizerConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"tensor_parallel": 0}, "trainer.tensor_parallel"),
        ({"sequence_parallel": True}, "trainer.sequence_parallel"),
        ({"tokens_per_micro_batch": 0}, "trainer.tokens_per_micro_batch"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"virtual_pipeline": 0}, "trainer.virtual_pipeline"),
        ({"virtual_pipeline": 2}, "trainer.virtual_pipeline = 2 .*trainer.pipeline_parallel"),
        ({"first_stage_layers": 3}, "trainer.first_stage_layers = 3 .*trainer.pipeline_parallel"),
        ({"pipeline_parallel": 2, "last_stage_layers": -1}, "trainer.last_stage_layers"),
        ({"bucket_parameters": 100}, "trainer.bucket_parameters .*overlap_data_parallel"),
        ({"overlap_data_parallel": True, "bucket_parameters": -1}, "trainer.bucket_parameters"),
        ({"expert_parallel": 2}, "trainer.expert_parallel = 2 .*the 1 ranks of a stage"),
        ({"data_parallel": 6, "expert_parallel": 4}, "trainer.expert_parallel = 4 .*the 6 ranks"),
        ({"tensor_parallel": 2, "expert_tensor_parallel": 4}, "trainer.expert_tensor_parallel = 4"),
        ({"recompute": "mlp"}, "trainer.recompute"),
        ({"recompute": ("mpl",)}, "trainer.recompute"),
    ],
)
def test_impossible_trainer_values_name_their_key(changes, key):
    with pytest.raises(ConfigError, match=key):
        TrainerConfig(**changes)


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
NO_WINDOW = {"sliding_window": 131072, "use_sliding_window": False}
"""A window that is turned off, as published Qwen2.5 files have it."""


@pytest.mark.parametrize(
    ("model", "split"),
    [
        *(
            (QWEN_7B | NO_WINDOW, {"tensor_parallel": tensor, "pipeline_parallel": pipeline})
            for tensor, pipeline in [(1, 1), (2, 1), (4, 2), (4, 7), (1, 28)]
        ),
        (QWEN_30B_A3B, {"data_parallel": 8, "expert_parallel": 8}),
        (
            QWEN_30B_A3B,
            {
                "tensor_parallel": 4,
                "sequence_parallel": True,
                "data_parallel": 4,
                "expert_parallel": 16,
            },
        ),
        (
            QWEN_30B_A3B,
            {"data_parallel": 8, "expert_parallel": 2, "expert_tensor_parallel": 4},
        ),
    ],
)
def test_layouts_that_divide_the_model_pass(model, split):
    validate_model_layout(describe_model(model), TrainerConfig(**split))


def test_impossible_layout_names_every_key_and_sizes_that_fit():
    trainer = TrainerConfig(tensor_parallel=8, pipeline_parallel=3)
    with pytest.raises(ConfigError) as caught:
        validate_model_layout(describe_model(QWEN_7B), trainer)
    message = str(caught.value)
    assert (
        "trainer.tensor_parallel = 8 does not divide the model's num_attention_heads = 28"
        in message
    )
    assert "num_key_value_heads = 4" in message
    assert "sizes that fit this model: 1, 2, 4\n" in message
    assert "trainer.pipeline_parallel = 3" in message
    assert "1, 2, 4, 7, 14, 28" in message


def test_key_value_heads_default_to_query_heads():
    config = {key: value for key, value in QWEN_7B.items() if key != "num_key_value_heads"}
    validate_model_layout(describe_model(config), TrainerConfig(tensor_parallel=4))
    with pytest.raises(ConfigError, match="num_key_value_heads = 28"):
        validate_model_layout(describe_model(config), TrainerConfig(tensor_parallel=8))


def test_broken_model_sections_are_named():
    with pytest.raises(WeightError, match="num_hidden_layers"):
        describe_model(QWEN_7B | {"num_hidden_layers": "many"})
    with pytest.raises(ConfigError, match="model.path"):
        ModelConfig(path="")


def test_driver_side_modules_load_neither_torch_nor_megatron():
    """`--dry-run` must answer at once, on machines without either."""
    code = (
        "import sys, megadapo.trainer.model.model_layout, megadapo.trainer.types, "
        "megadapo.trainer.trainer;"
        "print([m for m in ('torch', 'megatron', 'ray') if m in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"architectures": ["LlamaForCausalLM"], "attention_bias": True}, "attention_bias"),
        ({"architectures": ["LlamaForCausalLM"], "mlp_bias": True}, "mlp_bias"),
        ({"architectures": ["MistralForCausalLM"]}, "sliding_window"),
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, "attention_bias"),
        ({"attention_bias": False}, "attention_bias False is not supported for Qwen2"),
        ({"model_type": "llama"}, "model_type 'llama' is not that of Qwen2"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"use_mrope": True}, "use_mrope True is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"layer_types": ["full_attention"]}, "layer_types must be"),
        ({"layer_types": ["sliding_attention"] * 28}, "layer_types must be"),
        ({"layer_types": ["full_attention"], "num_hidden_layers": 10**12}, "layer_types must be"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a positive number"),
        ({"final_logit_softcapping": 30.0, "auto_map": {}}, "final_logit_softcapping, auto_map:"),
        ({"num_experts": 4}, "num_experts: not supported for Qwen2"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "has the settings partial_rotary"),
        ({"rope_parameters": {"rope_type": "linear"}}, "expected are factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "factor must be .* '2'"),
        ({"rope_parameters": ["default"]}, "are not a table"),
        ({"original_max_position_embeddings": 64}, "original_max_position_embeddings: not supp"),
        (
            {
                "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            "rope_scaling means .* and rope_parameters .*: delete one",
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding_window"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic'"),
    ],
)
def test_unsupported_models_are_refused(changes, key):
    with pytest.raises(WeightError, match=key):
        describe_model(QWEN_7B | changes)


@pytest.mark.parametrize(
    "notes",
    [
        {"use_mrope": False, "max_window_layers": 24},
        {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"a": 1}},
        {"pretraining_tp": 1, "unsloth_fixed": True, "_name_or_path": "m", "_attn": "sdpa"},
        {f"{name}_token_id": 1 for name in ("bos", "pad", "unk", "sep", "cls", "mask")},
    ],
    ids=["Qwen2.5", "SmolLM2", "unsloth", "special tokens"],
)
def test_notes_of_published_models_change_nothing(notes):
    """A model that its publisher described further must not be refused."""
    assert describe_model(QWEN_7B | notes) == describe_model(QWEN_7B)


@pytest.mark.parametrize(
    ("model", "split", "message"),
    [
        (QWEN_7B, {"expert_parallel": 2}, "trainer.expert_parallel = 2 is for models with experts"),
        ({"num_experts": 36}, {"expert_parallel": 8}, "expert_parallel = 8 .*num_experts = 36"),
        (
            {"moe_intermediate_size": 100},
            {"expert_tensor_parallel": 8},
            "expert_tensor_parallel = 8 .*moe_intermediate_size = 100; .*1, 2, 4, 5, 10",
        ),
        ({}, {"tensor_parallel": 2}, "tensor_parallel = 2 .*trainer.sequence_parallel = true"),
        ({"num_experts_per_tok": 1}, {}, "config.json: norm_topk_prob"),
        ({"num_experts_per_tok": 200}, {}, "config.json: num_experts_per_tok = 200"),
    ],
)
def test_impossible_expert_split_names_its_key(model, split, message):
    config = model if model is QWEN_7B else QWEN_30B_A3B | model
    trainer = TrainerConfig(data_parallel=8, **split)
    with pytest.raises((ConfigError, WeightError), match=message):
        validate_model_layout(describe_model(config), trainer)


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2}},
        {"rope_scaling": {"factor": 2.0, "rope_type": "linear", "type": "linear"}},
        {"rope_scaling": LLAMA3_SCALING},
        {"rope_scaling": LLAMA3_SCALING, "rope_theta": 5e5, "max_position_embeddings": 4096},
        {"rope_parameters": LLAMA3_SCALING | {"original_max_position_embeddings": 64}},
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
        {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 1.0}},
    ],
    ids=str,
)
def test_rotary_embedding_is_that_of_transformers(rope):
    """Another frequency is a model that was never trained, and its loss is a little higher."""
    from transformers import LlamaConfig

    config = {"max_position_embeddings": 256, **rope}
    found = read_rope(config)
    expected = LlamaConfig(**json.loads(json.dumps(config))).rope_parameters
    assert (found.kind, found.theta) == (expected["rope_type"], expected["rope_theta"])
    for key, name in ROPE_KINDS[found.kind].items():
        assert getattr(found, name) == expected[key]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_keys_that_transformers_writes_are_known(family):
    """A model saved by it would be refused for a key without an effect."""
    import transformers

    sizes = TEXT | {"sliding_window": None, "num_labels": 1, "temperature": 0.6}
    config = getattr(transformers, f"{family}Config")(**sizes).to_dict()
    model = describe_model(config | {"architectures": [f"{family}ForCausalLM"]})
    assert model.shape.hidden_size == 64


def test_rotary_parameters_are_found_in_both_forms_of_config():
    old = read_rope({"rope_theta": 1e6})
    new = read_rope({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}})
    assert old == new == Rope(kind="default", theta=1e6)
    scaled = read_rope({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert scaled == Rope(kind="linear", theta=5e5, factor=2.0)
