"""Our own layers on a GPU without Transformer Engine and apex, through stand-ins on the CPU."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megadapo.models.description import describe_model
from megadapo.models.folder import read_hf_config
from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.ranks import layout, with_marks

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor, sequence, tied": ("deep-tied", layout("tp2-sp")),
    "data, overlap": ("qwen2-untied", layout("dp2-overlap")),
    "pipeline, recompute": ("deep-tied", layout("pp2-recompute")),
    "context": ("llama3", layout("cp2")),
    "alone, deterministic": ("qwen3", {"deterministic": True}),
    "experts": ("qwen3-moe", layout("tp2-sp-ep2")),
}
"""Model and layout; a rank has several micro-batches of each of two mini-batches."""


@contextmanager
def _cuda_is_there() -> Iterator[None]:
    """Let layers be chosen as on a GPU; their kernels stay the CPU's."""
    with mock.patch("torch.cuda.is_available", lambda: True):
        yield


@contextmanager
def _meta_as_gpu(rendezvous, settings) -> Iterator[tuple[Any, Any, Any]]:
    """Yield model, config and chunks of a rank that has the meta device in place of a GPU."""
    import torch

    from megadapo.trainer.model.model import build_chunks, transformer_config
    from megadapo.trainer.model.parallel import join_groups

    meta, type_of = torch.device("meta"), torch.Tensor.type

    def named(self, *to):
        return type_of(self, *to) if to else type_of(self).replace("meta.", "")

    join_groups(rendezvous, settings.trainer, None, seed=0)
    model = describe_model(read_hf_config(Path(settings.model.path)))
    with (
        _cuda_is_there(),
        mock.patch("torch.cuda.current_device", lambda: meta),
        mock.patch("torch.nn.Module.cuda", lambda self, device=None: self.to(meta)),
        # the distributed optimizer knows CUDA's types only
        mock.patch("torch.Tensor.type", named),
    ):
        config = transformer_config(model, settings.trainer, dtype=torch.bfloat16)
        yield model, config, build_chunks(config, model, settings.trainer)


def _packed(model, lengths: list[int]) -> Any:
    import torch

    from megadapo.trainer.batch.packing import pack_sequences
    from megadapo.trainer.model.model import inverse_frequencies

    return pack_sequences(lengths, inverse_frequencies(model)).to(torch.device("meta"))


def _places(rendezvous, settings) -> dict[str, Any]:
    from megadapo.trainer.model.experts import BalancedRouter
    from megadapo.trainer.update.optimizer import build_optimizer, wrap_for_gradients

    with _meta_as_gpu(rendezvous, settings) as (_, config, chunks):
        assert any(isinstance(module, BalancedRouter) for module in chunks[0].modules())
        (chunk,) = chunks = wrap_for_gradients(chunks, config, settings.trainer)
        optimizer = build_optimizer(chunks, settings.trainer.optimizer)
    inner = [part.optimizer for part in optimizer.chained_optimizers]
    states = [state for one in inner for state in one.state.values()]
    return {
        "tensors": {one.device for one in (*chunk.parameters(), *chunk.module.buffers())},
        "gradients": {(one.main_grad.dtype, one.main_grad.device) for one in chunk.parameters()},
        "fused": {group["fused"] for one in inner for group in one.param_groups},
        "state": {value.device for state in states for value in state.values()},
        "imported": [name for name in sys.modules if name.startswith("transformer_engine")],
    }


def test_model_and_optimizer_are_on_the_gpu(ranks):
    """Catches routers that megatron-core leaves on the CPU, sums in bf16, and slow updates."""
    import torch

    meta = torch.device("meta")
    (found,) = ranks.on("qwen3-moe", _places)
    assert found == {
        "tensors": {meta},
        "gradients": {(torch.float32, meta)},
        "fused": {True},
        "state": {meta},
        "imported": [],
    }


def _kept(rendezvous, settings, lengths: list[int]) -> tuple[int, float]:
    """Return the bytes that a layer on a GPU keeps for its backward pass, and the plan's."""
    import torch

    from megadapo.plan.training import kept_by_layer, layer_widths

    storages = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point():
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        return tensor

    with _meta_as_gpu(rendezvous, settings) as (model, config, (chunk,)):
        packed = _packed(model, lengths)
        # of all layers, not of one
        keep(packed.cos), keep(packed.sin)
        shared = set(storages)
        shape = (sum(lengths), 1, config.hidden_size)
        hidden = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
            chunk.decoder.layers[0](hidden, attention_mask=None, packed_seq_params=packed)
    widths = layer_widths(model, settings.trainer, itemsize=2, layers="own")
    found = sum(size for storage, size in storages.items() if storage not in shared)
    return found, kept_by_layer(widths).whole * sum(lengths)


@pytest.mark.parametrize("model", ["qwen2-tied", "qwen3"])
def test_layer_keeps_what_is_planned(ranks, model):
    """Catches a view that keeps a larger tensor, and padding that is not needed."""
    ((found, planned),) = ranks.on(model, _kept, [50, 7, 300, 1])
    assert found == pytest.approx(planned, rel=0.01)


def _devices_of_a_pass(rendezvous, settings, lengths: list[int]) -> set[str]:
    """Return the devices of the gradients after a forward and a backward pass."""
    import torch

    from megadapo.trainer.update.optimizer import wrap_for_gradients

    with _meta_as_gpu(rendezvous, settings) as (model, config, chunks):
        (chunk,) = wrap_for_gradients(chunks, config, settings.trainer)
        out = chunk(
            input_ids=torch.zeros(1, sum(lengths), dtype=torch.int64, device="meta"),
            position_ids=None,
            attention_mask=None,
            packed_seq_params=_packed(model, lengths),
            output_processor=lambda *, hidden_states, **others: hidden_states,
            output_processor_context=None,
        )
        out.sum().backward()
    return {one.main_grad.device.type for one in chunk.parameters()} | {out.device.type}


@pytest.mark.parametrize("model", ["qwen2-tied", "qwen3", "llama3"])
def test_pass_mixes_no_devices(ranks, model):
    """Catches a tensor that a layer makes on the CPU. Experts choose tokens, which meta has not."""
    assert ranks.on(model, _devices_of_a_pass, [50, 7, 300, 1]) == [{"meta"}]


def _trained(rendezvous, settings, batch, *, on_gpu: bool) -> tuple[list[bytes], list[str]]:
    """Return the bits of a rank and its metrics after two steps of two updates."""
    from megadapo.trainer import trained_model
    from tests.support.trainer.probes import build, state_bits, update

    def call(function, *args, **how):
        with _cuda_is_there() if on_gpu else nullcontext():
            return function(*args, **how)

    names = ("build_chunks", "transformer_config")
    functions = {name: partial(call, getattr(trained_model, name)) for name in names}
    with mock.patch.multiple(trained_model, **functions):
        rank = build(rendezvous, settings)
    config = rank.config
    assert config.gradient_accumulation_fusion == on_gpu == (not config.use_cpu_initialization)
    # two ranks of a pipeline on a CPU exchange single messages
    config.batch_p2p_comm = False
    metrics = [repr(update(rank, batch, step=step).metrics) for step in (1, 2)]
    return state_bits(rank), metrics


@pytest.mark.parametrize("name", with_marks([*LAYOUTS][:-1], slow=[*LAYOUTS][-1:]))
def test_own_layers_train_as_on_a_cpu(ranks, name):
    """Catches gradients that are added twice, never, or before they are summed over ranks.

    In fp32 both ways add the same products in the same order.
    """
    model, split = LAYOUTS[name]
    batch = random_batch(RAGGED, num_mini_batches=2)
    split = {"tokens_per_micro_batch": 96} | split
    on_cpu, on_gpu = (
        ranks.on(model, partial(_trained, on_gpu=on_gpu), batch, **split)
        for on_gpu in (False, True)
    )
    assert on_gpu == on_cpu
    assert all(len(bits) > 10 for bits, _ in on_cpu)
