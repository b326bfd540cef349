"""Names for the parts of layers in a profile, forward and backward; free without a profiler.

A profiler shows operators. A range around them shows the part that they belong to: torch's profiler
writes it into its trace and, under `emit_nvtx`, sends it to Nsight Systems.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.profiler import record_function

FORWARD, BACKWARD = "megadapo::", "megadapo::backward "


@contextmanager
def layer_ranges(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Record a range for each part of each layer in this block, named by its kind.

    Kinds are embedding, norm, attention, mlp and experts. A norm that Transformer Engine fuses into
    the next product counts as attention or mlp. Backward ranges reach from the gradient of a part's
    result to the gradient of its input.
    """
    range_ = _OneRange()
    with ExitStack() as stack:
        for chunk in chunks:
            for kind, part in _parts(chunk):
                for handle in _hook(part, kind, range_):
                    stack.callback(handle.remove)
        stack.callback(range_.close)
        yield


class _OneRange:
    """The open range; parts do not nest, so opening one closes the previous one.

    So ranges are correct for any order of a tensor's hooks.
    """

    def __init__(self) -> None:
        self._name: str | None = None
        self._range: record_function | None = None

    def open(self, name: str) -> None:
        self.close()
        self._name, self._range = name, record_function(name)
        self._range.__enter__()

    def close(self, name: str | None = None) -> None:
        """Close the open range, if it has this name."""
        if self._range is not None and name in (None, self._name):
            self._range.__exit__(None, None, None)
            self._name = self._range = None


def _parts(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield kind and module of each part that computes."""
    for name, module in chunk.named_modules():
        if isinstance(module, TransformerLayer):
            mlp = "experts" if isinstance(module.mlp, MoELayer) else "mlp"
            parts = {
                "input_layernorm": "norm",
                "self_attention": "attention",
                "pre_mlp_layernorm": "norm",
                "mlp": mlp,
            }
            for attribute, kind in parts.items():
                part = getattr(module, attribute)
                if not isinstance(part, IdentityOp):
                    yield kind, part
        elif name.endswith("final_layernorm"):
            yield "norm", module
        elif name.endswith("embedding.word_embeddings"):
            yield "embedding", module


def _hook(part: torch.nn.Module, kind: str, range_: _OneRange) -> Iterator[Any]:
    forward, backward = FORWARD + kind, BACKWARD + kind

    def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        range_.open(forward)

    def after(
        _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        range_.close(forward)
        given = _first_tensor((*args, *kwargs.values()))
        made = _first_tensor(output if isinstance(output, tuple) else (output,))
        # with a gradient on only one side, the range would stay open
        if given is not None and made is not None and given.requires_grad and made.requires_grad:
            made.register_hook(lambda _: range_.open(backward))
            given.register_hook(lambda _: range_.close(backward))

    yield part.register_forward_pre_hook(before, with_kwargs=True)
    yield part.register_forward_hook(after, with_kwargs=True)


def _first_tensor(values: Sequence[Any]) -> Tensor | None:
    return next((value for value in values if isinstance(value, Tensor)), None)
