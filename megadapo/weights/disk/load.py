"""Fill a trainer rank's parameters from full tensors, and copy shards into full tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from megadapo.errors import WeightError
from megadapo.weights.disk.sources import SafetensorsFolder, TensorSource, check_tensors
from megadapo.weights.layout.layout import ModelLayout
from megadapo.weights.layout.shards import Shard, ShardPosition


def import_weights(
    folder: Path | str,
    params: Mapping[str, torch.Tensor],
    layout: ModelLayout,
    position: ShardPosition,
) -> None:
    """Fill this rank's parameters in place from a Hugging Face folder.

    Reads only this rank's slices. Memory beyond `params` is about one slice.

    Args:
        folder: Hugging Face folder.
        params: Megatron-named parameters of this rank, with global layer numbers.
        layout: Layout of the model that `params` belong to.
        position: Position of this rank in the model.
    """
    source = SafetensorsFolder(folder)
    check_tensors(source, layout, folder)
    for shard, param in match_params(params, layout, position):
        fill_shard(param, shard, source)


def match_params(
    params: Mapping[str, torch.Tensor], layout: ModelLayout, position: ShardPosition
) -> list[tuple[Shard, torch.Tensor]]:
    """Pair every shard of a rank with its parameter.

    Raises WeightError naming parameters that are unknown, missing or of another shape.
    """
    pairs, unknown, problems = [], set(params), []
    for shard in layout.megatron_shards(position):
        name = shard.name if shard.name in params else shard.alias
        if name is None or name not in params:
            problems.append(f"{shard.name} is missing from the model")
            continue
        unknown.discard(name)
        if tuple(params[name].shape) != shard.shape:
            problems.append(
                f"{name} has shape {list(params[name].shape)}, its layout says {list(shard.shape)}"
            )
        pairs.append((shard, params[name]))
    problems += [f"{name} of the model is not in the layout" for name in sorted(unknown)]
    if problems:
        raise WeightError("; ".join(problems[:10]) + ".")
    return pairs


@torch.no_grad()
def fill_shard(param: torch.Tensor, shard: Shard, source: TensorSource) -> None:
    """Copy a shard's runs out of `source` into `param` and zero the padding."""
    filled = 0
    for offset, run in shard.placed_runs():
        piece = source.read(run.tensor, shard.axis, run.start, run.stop)
        param.narrow(shard.axis, offset, run.size).copy_(piece)
        filled = offset + run.size
    if filled < shard.length:
        param.narrow(shard.axis, filled, shard.length - filled).zero_()


@torch.no_grad()
def collect_runs(full: Mapping[str, torch.Tensor], shard: Shard, local: torch.Tensor) -> None:
    """Copy a shard's runs out of `local` into their full tensors."""
    for offset, run in shard.placed_runs():
        target = full[run.tensor].narrow(shard.axis, run.start, run.size)
        target.copy_(local.narrow(shard.axis, offset, run.size))
