"""Names the parts of layers in a profile, forward and backward; costs nothing where none is made.

A profiler shows operators. What they belong to is shown by a range around them, which torch's
profiler writes into its trace and, under `emit_nvtx`, hands to Nsight Systems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """Within, each part of each layer of the rank's model is a range named by its kind.

    Kinds are embedding, norm, attention, mlp and experts; where Transformer Engine fuses a norm
    into the product after it, it is part of attention or mlp. The backward pass has them under
    "backward", from the gradient of a part's result to that of its input.
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
    """The range that is open: parts of layers lie beside each other, so one ends the one before.

    That makes them nest whatever the order in which the hooks of one tensor are called.
    """

    def __init__(self) -> None:
        self._name: str | None = None
        self._range: record_function | None = None

    def open(self, name: str) -> None:
        self.close()
        self._name, self._range = name, record_function(name)
        self._range.__enter__()

    def close(self, name: str | None = None) -> None:
        """Close the range that is open, if it has this name."""
        if self._range is not None and name in (None, self._name):
            self._range.__exit__(None, None, None)
            self._name = self._range = None


def _parts(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Kind and module of each part that computes."""
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
        # where only one of the two has a gradient, the range would stay open
        if given is not None and made is not None and given.requires_grad and made.requires_grad:
            made.register_hook(_then(range_.open, backward))
            given.register_hook(_then(range_.close, backward))

    yield part.register_forward_pre_hook(before, with_kwargs=True)
    yield part.register_forward_hook(after, with_kwargs=True)


def _then(call: Callable[[str], None], name: str) -> Callable[[Tensor], None]:
    """A hook that leaves the gradient as it is."""
    return lambda _: call(name)


def _first_tensor(values: Sequence[Any]) -> Tensor | None:
    return next((value for value in values if isinstance(value, Tensor)), None)
