"""Pieces of the local layer spec against their definitions, inside a trainer process."""

import random

import numpy as np
import pytest

from megadapo.trainer.batch.packing import ContextPart

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def _frequencies(rendezvous, hf_config: dict) -> np.ndarray:
    from megadapo.models.description import describe_model
    from megadapo.trainer.model.model import inverse_frequencies

    return inverse_frequencies(describe_model(hf_config)).numpy()


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_frequencies_equal_transformers(ranks, kind):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        rope_parameters=ROPES[kind],
        max_position_embeddings=131072,
    )
    expected = LlamaRotaryEmbedding(config).inv_freq.numpy()
    hf_config = config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (found,) = ranks.run(1, _frequencies, hf_config)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def _padding(rendezvous, lengths: list[int]) -> tuple[list[int], int, list[tuple[int, int]]]:
    import torch

    from megadapo.trainer.batch.packing import pack_sequences

    packed = pack_sequences(lengths, torch.ones(2))
    buckets = [(b.num_sequences, b.length) for b in packed.buckets]
    assert (packed.token_of_row[packed.padded_rows] == torch.arange(sum(lengths))).all()
    return packed.padded_rows.tolist(), len(packed.token_of_row), buckets


@pytest.mark.parametrize("seed", range(6))
def test_every_token_has_its_own_row_and_padding_stays_small(ranks, seed):
    """Work that followed the longest sequence would waste most of a long-tailed micro-batch."""
    rng = random.Random(seed)
    lengths = [min(16384, int(rng.lognormvariate(6, 1.3)) + 1) for _ in range(40)]
    ((rows, num_rows, buckets),) = ranks.run(1, _padding, lengths)
    assert len(set(rows)) == sum(lengths)
    assert max(rows) < num_rows == sum(n * length for n, length in buckets)
    long_tokens = sum(n for n in lengths if n > 32)
    assert num_rows <= long_tokens / 0.75 + 32 * len(lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for start, length in zip(starts, lengths, strict=False):
        own = rows[start : start + length]
        assert own == list(range(own[0], own[0] + length)), "a sequence must stay in one piece"


def _attention(rendezvous, lengths: list[int], heads: int, kv_heads: int, seed: int):
    """Largest error of output and of each gradient against dense fp64 attention per sequence."""
    import torch
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megadapo.trainer.batch.packing import pack_sequences
    from megadapo.trainer.model.model import PackedAttention

    torch.manual_seed(seed)
    size = 8
    config = TransformerConfig(
        num_layers=1, hidden_size=heads * size, num_attention_heads=heads, attention_dropout=0.0
    )
    attention = PackedAttention(config, 1, AttnMaskType.causal, "self")
    frequencies = torch.rand(size // 2)
    packed = pack_sequences(lengths, frequencies)
    shapes = [(sum(lengths), n, size) for n in (heads, kv_heads, kv_heads)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    output = attention(*inputs, None, packed_seq_params=packed)
    direction = torch.randn_like(output)
    gradients = torch.autograd.grad(output, inputs, direction)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = _dense_attention(wide, lengths, frequencies.double())
    expected_gradients = torch.autograd.grad(expected, wide, direction.double())
    pairs = [(output, expected), *zip(gradients, expected_gradients, strict=True)]
    return [float((found - truth).abs().max()) for found, truth in pairs]


def _dense_attention(inputs, lengths: list[int], frequencies):
    import torch

    def rotated(x):
        angles = torch.outer(torch.arange(x.shape[0], dtype=torch.float64), frequencies)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        first, second = x.chunk(2, -1)
        pairs = torch.complex(first, second) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    outputs = []
    for query, key, value in zip(*(x.split(lengths) for x in inputs), strict=True):
        repeat = query.shape[1] // key.shape[1]
        query, key = rotated(query), rotated(key).repeat_interleave(repeat, 1)
        value = value.repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value).flatten(1))
    return torch.cat(outputs)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[1], [1, 1, 2], [70, 3, 33, 32, 31, 200, 1, 48]])
def test_packed_attention_equals_attention_of_each_sequence(ranks, lengths, kv_heads):
    """Sequences must not see each other, and their positions must start at 0."""
    (errors,) = ranks.run(1, _attention, lengths, 4, kv_heads, 0)
    assert max(errors) < 1e-5


def _rotary_places(rendezvous, length: int, size: int) -> list[list[int]]:
    """Return the positions that megatron-core's packed rotary embedding gives to each rank."""
    import torch
    from megatron.core.models.common.embeddings import rope_utils

    positions, own = torch.arange(length), torch.empty(length // size)
    places = rope_utils._get_thd_freqs_on_this_cp_rank
    return [places(rank, size, own, positions).tolist() for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3])
def test_context_part_matches_megatrons_rotary(ranks, size):
    """On GPUs only it knows positions; the CPU's layers get them as input."""
    (found,) = ranks.run(1, _rotary_places, 12 * size, size)
    assert found == [ContextPart(rank, size).places([12 * size]).tolist() for rank in range(size)]
