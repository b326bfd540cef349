"""Qwen3-MoE in megatron-core's own model: names, experts, router, and the logits they give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megadapo.weights.disk.load import import_weights
from megadapo.weights.disk.megatron_folder import open_layout
from megadapo.weights.layout.layout import padded_vocab_size
from megadapo.weights.layout.placement import replica_positions
from tests.support.forked import run_processes
from tests.support.tiny_models import make_model

TOKENS = [[5, 17, 300, 2, 2, 96, 41, 7, 250, 33, 1, 0, 12]]


def megatron_logits(rank: int, num_ranks: int, folder: Path, meeting: Path) -> None:
    """Logits of megatron-core's GPTModel with SequentialMLP experts, experts spread over ranks."""
    from megadapo.trainer.cpu_platform import install_cpu_platform

    install_cpu_platform()
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not hasattr(moe_utils, "te_general_gemm"):
        # megatron-core 0.16.1 reads this name without defining it where there is no TE
        moe_utils.te_general_gemm = None
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=num_ranks)
    mpu.initialize_model_parallel(expert_model_parallel_size=num_ranks)
    model_parallel_cuda_manual_seed(0)
    layout = open_layout(folder)
    shape = layout.shape
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        moe_ffn_hidden_size=shape.expert_ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        num_moe_experts=shape.num_experts,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_router_pre_softmax=True,
        moe_token_dispatcher_type="allgather",
        expert_model_parallel_size=num_ranks,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=shape.num_experts, qk_layernorm=True, normalization="RMSNorm"
        ),
        vocab_size=padded_vocab_size(shape.vocab_size, 1),
        max_sequence_length=64,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    (position, *_) = replica_positions(layout, ep_size=num_ranks, num_dp=num_ranks)[rank:]
    import_weights(folder, dict(model.named_parameters()), layout, position)
    tokens = torch.tensor(TOKENS)
    length = tokens.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        logits = model(tokens, torch.arange(length)[None], mask)
    if rank == 0:
        torch.save(logits[..., : shape.vocab_size], meeting.with_name("logits.pt"))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_logits_equal_transformers(tmp_path, num_ranks):
    """Catches an expert under another's number, a gate taken for an up, and a cut router."""
    import transformers

    folder = make_model(tmp_path / "model", "Qwen3Moe", std=0.3, num_hidden_layers=2)
    meeting = tmp_path / "meeting"
    run_processes(megatron_logits, (num_ranks, folder, meeting), num_ranks)
    found = torch.load(tmp_path / "logits.pt", weights_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = model(torch.tensor(TOKENS)).logits
    assert (expected.max() - expected.min()) > 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
