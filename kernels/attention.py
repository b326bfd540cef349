"""Causal attention within packed sequences, without padding: by torch on a GPU, ours on a CPU.

A GPU has torch's variable-length FlashAttention for low-precision tensors. On a CPU torch's kernel
needs sequences of one length, and takes tens of microseconds for each sequence and head. Ours, in
fp32, pads nothing, and a sequence has the same bits in every batch. As in Dao et al.,
"FlashAttention" (arXiv 2205.14135), the backward pass needs only each row's log-sum-exp.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from megadapo.kernels.cpu.native import address, load_native
from megadapo.kernels.launch import count_bytes, uses_triton
from megadapo.kernels.torch_internals import profiled_range

SOURCE = Path(__file__).parent / "cpu" / "attention.c"

ATTENTION, ATTENTION_GRADS = "megadapo::packed_attention", "megadapo::packed_attention_grads"
"""Names of the C passes in a profile."""

LONGEST = 512
"""Longest sequence whose keys and values stay in a core's cache, in tokens. torch's kernel reads
longer ones in blocks of keys and is faster there."""
LARGEST_GPU_HEAD = 192
"""Largest head of torch's kernel whose backward pass fits every GPU from compute capability 8.0."""

_on_gpu: Callable[..., Any] = varlen_attn
# torch 2.11 has no such argument, and accepts groups without it
_GROUPS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def packed_attention_definition(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float | None = None
) -> Tensor:
    """Define packed attention: differentiable, in the inputs' dtype."""
    repeats = query.shape[1] // key.shape[1]
    outputs = [query[:0]]
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (query, key, value))
        k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        output = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


def should_use_packed_attention(query: Tensor, key: Tensor, value: Tensor, longest: int) -> bool:
    """Return whether `packed_attention` supports these tensors and is faster than padding."""
    is_fp32 = all(x.dtype == torch.float32 for x in (query, key, value))
    if query.device.type != "cpu":
        size = query.shape[-1]
        return not is_fp32 and size % 8 == 0 and size <= LARGEST_GPU_HEAD
    fits = is_fp32 and not uses_triton(query) and longest <= LONGEST
    return fits and load_native(SOURCE) is not None


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("first", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )


class _AttentionProblem(ctypes.Structure):
    """Layout of `struct problem` in attention.c."""

    _fields_ = (
        *((name, _Tensor) for name in ("query", "key", "value")),
        ("starts", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_sequences", "longest", "num_heads")),
        *((name, ctypes.c_int64) for name in ("num_groups", "size")),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int),
    )


def _problem(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scale: float
) -> _AttentionProblem:
    """Return the C call's arguments; the tensors must outlive them."""
    tensors = [_Tensor(x.data_ptr(), x.stride(0), x.stride(1)) for x in (query, key, value)]
    sizes = (len(cu_seqlens) - 1, longest, query.shape[1], key.shape[1], query.shape[2])
    starts = cu_seqlens.data_ptr()
    return _AttentionProblem(*tensors, starts, *sizes, scale, torch.get_num_threads())


def _call(name: str, function: str, problem: _AttentionProblem, *tensors: Tensor) -> None:
    library = load_native(SOURCE)
    assert library is not None, "call should_use_packed_attention() first"
    count_bytes(name, *tensors)
    with profiled_range(name):
        failed = getattr(library, function)(ctypes.byref(problem), *map(address, tensors))
    if failed:
        raise MemoryError("out of memory for the keys and values of a sequence")


class _PackedAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        longest: int,
        scale: float,
    ) -> Tensor:
        query, key, value = (
            x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)
        )
        out = torch.empty(query.shape, dtype=query.dtype)
        log_sums = torch.empty(query.shape[:2], dtype=query.dtype)
        problem = _problem(query, key, value, cu_seqlens, longest, scale)
        _call(ATTENTION, "megadapo_attention", problem, out, log_sums)
        ctx.save_for_backward(query, key, value, cu_seqlens, out, log_sums)
        ctx.longest, ctx.scale = longest, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, cu_seqlens, out, log_sums = ctx.saved_tensors
        problem = _problem(query, key, value, cu_seqlens, ctx.longest, ctx.scale)
        gradients = [torch.empty(x.shape, dtype=x.dtype) for x in (query, key, value)]
        tensors = (out, log_sums, d_out.contiguous(), *gradients)
        _call(ATTENTION_GRADS, "megadapo_attention_grads", problem, *tensors)
        return *gradients, None, None, None


_packed_attention: Callable[..., Tensor] = _PackedAttentionFunction.apply


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    longest: int,
    scale: float | None = None,
) -> Tensor:
    """Return attention [T, heads, D] for query [T, heads, D] and key and value [T, groups, D].

    Args:
        cu_seqlens: [S + 1] int32, start of each sequence, and T.
        longest: upper bound of the sequences' lengths, in tokens.
        scale: positive factor of the scores; None: 1 / sqrt(D).

    Raises:
        ValueError: shapes do not fit, or cu_seqlens, which is checked on a CPU only, does not cut T
            tokens into such sequences.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    num_tokens, num_heads, size = query.shape
    if key.shape != value.shape or key.shape[::2] != (num_tokens, size) or num_heads % key.shape[1]:
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise ValueError(f"query, key and value do not fit each other: {shapes}")
    if cu_seqlens.dtype != torch.int32 or not cu_seqlens.is_contiguous():
        raise ValueError(f"cu_seqlens must be contiguous int32, got {cu_seqlens.dtype}")
    if query.device.type != "cpu":
        bounds = (cu_seqlens, cu_seqlens, longest, longest)
        # all earlier tokens and no later one
        options: dict[str, Any] = {"window_size": (-1, 0), "scale": scale, **_GROUPS}
        # values are copied: a view would keep the whole product of q, k and v for the backward pass
        out: Tensor = _on_gpu(query, key, value.contiguous(), *bounds, **options)
        return out
    lengths = cu_seqlens.diff()
    begins, ends = cu_seqlens[:1].tolist(), cu_seqlens[-1:].tolist()
    if begins != [0] or ends != [num_tokens] or bool(((lengths < 0) | (lengths > longest)).any()):
        raise ValueError(
            f"cu_seqlens must cut {num_tokens} tokens into sequences of at most {longest}, got "
            f"{cu_seqlens.tolist()}"
        )
    if not scale > 0.0:
        raise ValueError(f"scale must be positive, got {scale}")
    return _packed_attention(query, key, value, cu_seqlens, longest, scale)
