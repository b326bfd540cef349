"""Runs megatron-core on the CPU over Gloo, by replacing the CUDA functions that it calls.

All differences between the platforms are here. With CUDA present, nothing is changed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

CPU = torch.device("cpu")

_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "full",
    "ones",
    "rand",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)


class _Stream:
    """A stand-in for a CUDA stream and for an event: a CPU executes in order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Ignore device and priority."""

    def wait_stream(self, stream: _Stream) -> None:
        """Return at once: work on a CPU is finished when its call returns."""

    def record_event(self) -> _Stream:
        """Return an event that has happened."""
        return self

    def synchronize(self) -> None:
        """Return at once: work on a CPU is finished when its call returns."""


def install_cpu_platform() -> None:
    """Replace the CUDA functions of this process for megatron-core; call before importing it.

    Call it in trainer processes only, as torch's own functions are replaced.
    """
    assert not torch.cuda.is_available(), "the CPU platform is for processes without CUDA"
    if getattr(torch.cuda, "megadapo_cpu_platform", False):
        return
    _replace_devices()
    _replace_tensor_methods()
    _import_megatron_uncompiled()
    _replace_random_states()
    _replace_expert_functions()
    _replace_coalesced_gathers()
    _replace(torch.cuda, megadapo_cpu_platform=True)


def _replace_devices() -> None:
    stream = _Stream()
    _replace(
        torch.cuda,
        # used as `device=torch.cuda.current_device()`, so a device is fine
        current_device=lambda: CPU,
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        current_stream=lambda device=None: stream,
        default_stream=lambda device=None: stream,
        Stream=_Stream,
        stream=nullcontext,
    )
    # a device context caches torch's factories on first use: let it cache the original ones
    with torch.device("meta"):
        torch.empty(0)
    _replace(torch, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})


def _replace(library: object, **replacements: object) -> None:
    """Replace attributes of a library; their types may differ."""
    for name, replacement in replacements.items():
        setattr(library, name, replacement)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if isinstance(device, int) or str(device).startswith("cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


def _replace_tensor_methods() -> None:
    cpu_type = torch.Tensor.type

    def type_as_cuda(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        # the distributed optimizer sorts parameters by the name of their CUDA type
        if dtype is None:
            return cpu_type(self).replace("torch.", "torch.cuda.", 1)
        return cpu_type(self, dtype, **kwargs)

    _replace(torch.Tensor, type=type_as_cuda, cuda=lambda self, *args, **kwargs: self)
    _replace(torch.nn.Module, cuda=lambda self, device=None: self)
    names = ("FloatTensor", "HalfTensor", "BFloat16Tensor", "IntTensor")
    _replace(torch.cuda, **{name: getattr(torch, name) for name in names})


def _import_megatron_uncompiled() -> None:
    """Import megatron-core without torch.compile, which it applies to fused GPU functions.

    They do not run here, and loading the compiler would double the start time of every rank.
    """
    compiler = torch.compile
    _replace(torch, compile=lambda function: function)
    try:
        importlib.import_module("megatron.core")
        importlib.import_module("megatron.core.models.gpt")
    finally:
        _replace(torch, compile=compiler)


def _replace_random_states() -> None:
    """Use the CPU's generator in place of the CUDA generator."""
    _replace(
        torch.cuda,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        manual_seed=lambda seed: torch.default_generator.manual_seed(seed),
    )
    from megatron.core.tensor_parallel import random

    _replace(
        random,
        _get_cuda_rng_state=lambda device=None, clone=False, graph_safe=False: (
            torch.get_rng_state()
        ),
        _set_cuda_rng_state=lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
    )


def _replace_expert_functions() -> None:
    """Return token counts as numpy numbers, as megatron-core does for counts from a GPU."""
    from megatron.core.transformer.moe import token_dispatcher

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    _replace(token_dispatcher, maybe_move_tensor_to_cpu=moved)


def _replace_coalesced_gathers() -> None:
    """Use plain gathers: Gloo's coalesced gather (torch 2.13) corrupts memory once in some thousand
    calls, which ends the process at any later time. One rank alone needs no communication."""
    from megatron.core.distributed import param_and_grad_buffer
    from torch.distributed.distributed_c10d import _coalescing_manager, _world

    @contextmanager
    def one_gather_at_a_time(
        group: torch.distributed.ProcessGroup, async_ops: bool = False
    ) -> Iterator[Any]:
        with _coalescing_manager(group, async_ops=async_ops) as works:
            yield works
            noted = _world.pg_coalesce_state[group]
            if group.size() == 1:
                # Gloo would copy all gradients and weights onto themselves, through buffers
                noted.clear()
            gathers = [op for op in noted if op.dst_tensor is not None and op.redop is None]
            if gathers:
                noted.clear()
        for op in gathers:
            work = torch.distributed.all_gather_into_tensor(
                op.dst_tensor, op.tensor, group=group, async_op=async_ops
            )
            if work is not None:
                works.append(work)

    _replace(param_and_grad_buffer, _coalescing_manager=one_gather_at_a_time)
