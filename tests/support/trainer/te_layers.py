"""One model in layers of Transformer Engine and in our own; runs inside a process that has both."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from torch import Tensor

from megadapo.kernels.rmsnorm import rmsnorm_definition
from megadapo.kernels.rotary import rotary_definition
from megadapo.kernels.swiglu import swiglu_definition
from megadapo.models.description import describe_model
from megadapo.models.folder import read_hf_config
from megadapo.trainer.batch.packing import pack_sequences
from megadapo.trainer.checkpoint.checkpoint import load_checkpoint, take_snapshot, write_snapshot
from megadapo.trainer.checkpoint.pieces import owned_runs
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.model.model import build_chunks, rotary_of_own_layers, transformer_config
from megadapo.trainer.model.model_layout import rank_positions
from megadapo.trainer.model.parallel import (
    context_part,
    join_groups,
    leave_groups,
    parameters_by_global_name,
)
from megadapo.trainer.trainer import complete_save
from megadapo.trainer.types import RankReport
from megadapo.trainer.update.optimizer import build_optimizer, wrap_for_gradients
from megadapo.weights.disk.sources import match_params
from megadapo.weights.layout.layout import ModelLayout
from tests.support.trainer.batches import VOCAB_SIZE
from tests.support.trainer.fresh_ranks import Place
from tests.support.weights.ranks import import_weights

MARKS = {"sequence_parallel": False, "tensor_model_parallel": False, "allreduce": True}
"""Marks by which megatron-core sums gradients and norms, with their defaults."""


@dataclass
class Built:
    """One rank's part of a model, with its weights."""

    chunk: Any
    packed: Any
    parameters: dict[str, Tensor]
    """Gradients by the layout's names."""

    def run(self, tokens: Tensor) -> dict[str, Tensor]:
        """Last hidden states and the gradients of their weighted sum, by parameter."""
        hidden = self.chunk(
            input_ids=tokens[None],
            position_ids=None,
            attention_mask=None,
            packed_seq_params=self.packed,
            output_processor=lambda *, hidden_states, **others: hidden_states,
            output_processor_context=None,
        )
        direction = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
        (hidden * direction).sum().backward()
        # an output layer of its own is read by the head alone
        of_layers = {name: one for name, one in self.parameters.items() if "output" not in name}
        return {"hidden": hidden} | {name: one.grad for name, one in of_layers.items()}

    def marks(self) -> dict[str, list[bool]]:
        """Return the MARKS of each parameter."""
        return {
            name: [getattr(one, mark, none) for mark, none in MARKS.items()]
            for name, one in sorted(self.parameters.items())
        }


def build(
    folder: Path,
    trainer: TrainerConfig,
    lengths: list[int],
    *,
    as_on_gpu: bool,
    dtype: torch.dtype = torch.float64,
) -> Built:
    model = describe_model(read_hf_config(folder))
    with patch("torch.cuda.is_available", return_value=as_on_gpu):
        config = transformer_config(model, trainer, dtype=dtype)
        # there are no buffers of gradients
        config.gradient_accumulation_fusion = False
        if model.routing is not None and dtype == torch.float64:
            config.moe_router_dtype = "fp64"
        (chunk,) = build_chunks(config, model, trainer)
        frequencies = rotary_of_own_layers(model)
    layout = ModelLayout(model.family, model.shape)
    position = rank_positions(layout, trainer)[torch.distributed.get_rank()]
    parameters = parameters_by_global_name([chunk])
    import_weights(folder, parameters, layout, position)
    by_shard = {shard.name: one for shard, one in match_params(parameters, layout, position)}
    return Built(chunk, pack_sequences(lengths, frequencies, context_part()), by_shard)


@contextmanager
def trainers_as_on_gpus() -> Iterator[None]:
    """Let trainers that are built in the block have Transformer Engine's layers, on the CPU."""

    def as_on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with patch("torch.cuda.is_available", return_value=True):
                return function(*args, **kwargs)

        return call

    functions = {one.__name__: as_on_gpu(one) for one in (build_chunks, transformer_config)}
    with (
        patch.multiple("megadapo.trainer.trained_model", **functions),
        patch("megadapo.trainer.batch.mini_batch.rotary_of_own_layers", lambda model: None),
    ):
        yield


def survives_a_checkpoint(built: Built, trainer: TrainerConfig, folder: Path) -> bool:
    """Whether the weights come back from disk."""
    chunks = wrap_for_gradients([built.chunk], built.chunk.config, trainer)
    optimizer = build_optimizer(chunks, trainer.optimizer)
    runs = owned_runs(chunks, optimizer)
    snapshot = take_snapshot(runs, optimizer, number=0)
    rank, reports = torch.distributed.get_rank(), [RankReport()] * 2
    folder.mkdir(exist_ok=True)
    files, pieces = write_snapshot(snapshot, folder, rank=rank)
    torch.distributed.all_gather_object(reports, RankReport(files, {"": pieces}))
    if rank == 0:
        complete_save(folder, reports)
    torch.distributed.barrier()
    before = {name: one.detach().clone() for name, one in built.parameters.items()}
    with torch.no_grad():
        for one in built.parameters.values():
            one.zero_()
    load_checkpoint(runs, chunks, optimizer, folder)
    return all(one.equal(before[name]) for name, one in built.parameters.items())


def compare(
    folder: Path,
    place: Place,
    split: dict[str, int],
    lengths: list[int],
    checkpoint: Path | None,
) -> dict[str, Any]:
    """Return a rank's differences and marks, and whether a checkpoint in the folder kept TE's."""
    trainer = TrainerConfig(**split)
    join_groups(place[0], trainer, place[1], seed=0)
    local, of_te = (build(folder, trainer, lengths, as_on_gpu=gpu) for gpu in (False, True))
    tokens = torch.from_numpy(context_part().places(lengths)) * 7 % VOCAB_SIZE
    # the kernels themselves compute in fp32
    references = {
        "rmsnorm": rmsnorm_definition,
        "rotary": rotary_definition,
        "swiglu": swiglu_definition,
    }
    with patch.multiple("megadapo.trainer.model.model", **references):
        expected = local.run(tokens)
    found = of_te.run(tokens)
    kept = None
    if checkpoint is not None:
        again = build(folder, trainer, lengths, as_on_gpu=True, dtype=torch.float32)
        kept = survives_a_checkpoint(again, trainer, checkpoint)
    qkv = of_te.chunk.decoder.layers[0].self_attention.linear_qkv
    errors = {
        name: float((found[name] - one).abs().max() / one.abs().max())
        for name, one in expected.items()
    }
    names = {
        getattr(entry, "unique_key", entry.key)
        for entry in nested_values(of_te.chunk.sharded_state_dict(metadata={}))
    }
    leave_groups()
    return {
        "names": sorted(names),
        "layers": [kind.__module__ for kind in type(qkv).__mro__],
        "errors": errors,
        "marks": [local.marks(), of_te.marks()],
        "kept": kept,
    }
