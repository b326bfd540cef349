"""Lets megatron-core run on the CPU over Gloo, by answering where it asks for CUDA by name.

Everything that differs between the platforms is here; with CUDA present nothing is changed.
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
    """Stands for the one order in which a CPU executes, and for an event in it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """A device and a priority, of which there is one each."""

    def wait_stream(self, stream: _Stream) -> None:
        """Work on a CPU is finished when the call returns: nothing to wait for."""

    def record_event(self) -> _Stream:
        """An event that has happened."""
        return self

    def synchronize(self) -> None:
        """Work on a CPU is finished when the call returns: nothing to wait for."""


def install_cpu_platform() -> None:
    """Answer megatron-core's CUDA questions for the CPU in this process; call before importing it.

    Meant for trainer processes only: torch's own functions are replaced.
    """
    assert not torch.cuda.is_available(), "the CPU platform is for processes without CUDA"
    if getattr(torch.cuda, "megadapo_cpu_platform", False):
        return
    _answer_for_devices()
    _answer_for_tensors()
    _import_megatron_uncompiled()
    _answer_for_random_states()
    _answer_for_experts()
    _answer_for_gathers()
    _replace(torch.cuda, megadapo_cpu_platform=True)


def _answer_for_devices() -> None:
    stream = _Stream()
    _replace(
        torch.cuda,
        # handed on as `device=torch.cuda.current_device()`, so it may be a device
        current_device=lambda: CPU,
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        current_stream=lambda device=None: stream,
        default_stream=lambda device=None: stream,
        Stream=_Stream,
        stream=nullcontext,
    )
    # torch notes its factories when a device's context first asks for them: not those put here
    with torch.device("meta"):
        torch.empty(0)
    _replace(torch, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})


def _replace(library: object, **answers: object) -> None:
    """Put other attributes in the place of a library's own, whose types they need not have."""
    for name, answer in answers.items():
        setattr(library, name, answer)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None and _is_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


def _is_cuda(device: object) -> bool:
    return isinstance(device, int) or str(device).startswith("cuda")


def _answer_for_tensors() -> None:
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
    """megatron-core marks its fused GPU functions for torch.compile as it is imported.

    None of them runs here, and loading the compiler would double the start of every rank.
    """
    compiler = torch.compile
    _replace(torch, compile=lambda function: function)
    try:
        importlib.import_module("megatron.core")
        importlib.import_module("megatron.core.models.gpt")
    finally:
        _replace(torch, compile=compiler)


def _answer_for_random_states() -> None:
    """The CPU's generator takes the place of the CUDA generator."""
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


def _answer_for_experts() -> None:
    """How many tokens go where is numbers in numpy once it has left the GPU."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    _replace(token_dispatcher, maybe_move_tensor_to_cpu=moved)
    if not hasattr(moe_utils, "te_general_gemm"):
        # 0.16 asks for Transformer Engine's product by a name that it lacks where there is none
        _replace(moe_utils, te_general_gemm=None)


def _answer_for_gathers() -> None:
    """Gloo's coalesced gather (torch 2.13) corrupts memory once in some thousand times, which ends
    the process at any later time; its plain gather does not."""
    from megatron.core.distributed import param_and_grad_buffer
    from torch.distributed.distributed_c10d import _coalescing_manager, _world

    @contextmanager
    def one_gather_at_a_time(
        group: torch.distributed.ProcessGroup, async_ops: bool = False
    ) -> Iterator[Any]:
        with _coalescing_manager(group, async_ops=async_ops) as works:
            yield works
            noted = _world.pg_coalesce_state[group]
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
