"""Conversions between Hugging Face folders and folders of trainer shards, and FP8 export."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from megadapo.errors import WeightError
from megadapo.models.description import config_differences
from megadapo.weights.disk.export import (
    CARRIED,
    copy_config_and_tokenizer,
    export_weights,
    full_tensors,
    new_folder,
    progress_bar,
)
from megadapo.weights.disk.files import files_within
from megadapo.weights.disk.load import fill_shard
from megadapo.weights.disk.sources import (
    MANIFEST_NAME,
    TensorSource,
    check_tensors,
    manifest_of,
    open_layout,
    open_source,
    rank_file_name,
    read_json,
    read_positions,
)
from megadapo.weights.layout.layout import ModelLayout
from megadapo.weights.layout.placement import replica_positions

QUANTIZATIONS = {"fp8": "FP8_PER_CHANNEL_PER_TOKEN_CFG"}
"""modelopt's settings: one weight scale per output channel, and activation scales per token. They
need no calibration data, which could bias the policy."""


def hf_to_megatron(
    source: Path,
    destination: Path,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    vpp_size: int = 1,
    ep_size: int = 1,
) -> None:
    """Cut a model folder into one safetensors file of Megatron-named shards per trainer rank.

    It needs memory for the shards of one rank.
    """
    layout, tensors, dtype = _open_checked(source)
    positions = replica_positions(
        layout,
        tp_size=tp_size,
        pp_size=pp_size,
        vpp_size=vpp_size,
        ep_size=ep_size,
        num_dp=ep_size,
    )
    shards = [list(layout.megatron_shards(position)) for position in positions]
    with (
        new_folder(destination) as partial,
        progress_bar("hf-to-megatron", sum(map(len, shards))) as advance,
    ):
        copy_config_and_tokenizer(source, partial, dtype)
        (partial / MANIFEST_NAME).write_text(json.dumps(manifest_of(positions), indent=2) + "\n")
        for position, rank_shards in zip(positions, shards, strict=True):
            params = {}
            for shard in rank_shards:
                params[shard.name] = torch.empty(shard.shape, dtype=dtype)
                fill_shard(params[shard.name], shard, tensors)
                advance()
            save_file(params, partial / rank_file_name(position), metadata={"format": "pt"})


def megatron_to_hf(source: Path, destination: Path, *, quantize: str | None = None) -> None:
    """Write a folder of trainer shards as a Hugging Face folder, optionally in FP8."""
    layout, tensors, dtype = _open_checked(source)
    if quantize is not None:
        with new_folder(destination) as partial, TemporaryDirectory(dir=partial.parent) as beside:
            megatron_to_hf(source, Path(beside) / "plain")
            quantize_folder(Path(beside) / "plain", partial, quantize)
        return
    with progress_bar("megatron-to-hf", len(layout.hf_shapes)) as advance:
        export_weights(
            full_tensors(tensors, layout),
            destination,
            layout=layout,
            dtype=dtype,
            base_folder=source,
            on_tensor=lambda _: advance(),
        )


def quantize_folder(source: Path, destination: Path, how: str) -> None:
    """Quantise a Hugging Face folder into another that vLLM loads as it is.

    Needs nvidia-modelopt, and memory for the whole model. Embedding, head, router and norms keep
    their type.

    Raises:
        WeightError: `how` is unknown, the model has experts, or modelopt quantised nothing.
    """
    if how not in QUANTIZATIONS:
        raise WeightError(f"--quantize {how}: choose from {', '.join(QUANTIZATIONS)}.")
    if open_layout(source).shape.num_experts:
        raise WeightError(
            f"--quantize {how}: vLLM reads per-channel FP8 for dense layers only; export without "
            "it and start vLLM with quantization='fp8'."
        )
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", trust_remote_code=False)
    with torch.no_grad(), new_folder(destination) as partial:
        mtq.quantize(model, getattr(mtq, QUANTIZATIONS[how]))
        export_hf_checkpoint(model, export_dir=partial)
        if not (partial / "hf_quant_config.json").is_file():
            raise WeightError(f"nvidia-modelopt wrote no quantised weights for {source}.")
        for path in files_within(source, CARRIED):
            if not (partial / path.name).exists():
                shutil.copyfile(path, partial / path.name)


def inspect(path: Path) -> str:
    """Describe a model folder, after checking it against its config.json."""
    layout, _, dtype = _open_checked(path)
    shape = layout.shape
    num_parameters = sum(prod(one) for one in layout.hf_shapes.values())
    lines = [
        f"{path}",
        f"  family        {layout.family.architecture}",
        f"  parameters    {num_parameters:,} in {len(layout.hf_shapes)} tensors, {dtype}",
        f"  layers        {shape.num_layers} of hidden size {shape.hidden_size}",
        f"  heads         {shape.num_heads} of {shape.head_dim}, {shape.num_kv_heads} for keys",
        f"  vocabulary    {shape.vocab_size}, head {'tied' if shape.tied else 'of its own'}",
    ]
    if shape.num_experts:
        lines.append(f"  experts       {shape.num_experts} of {shape.expert_ffn_size}")
    if (path / MANIFEST_NAME).is_file():
        for name, at in read_positions(path).items():
            layers = f"layers {at.layer_indices[0]}..{at.layer_indices[-1]}"
            lines.append(f"  {name}  {len(at.layer_indices)} {layers}")
    return "\n".join(lines)


def verify(a: Path, b: Path) -> str:
    """Compare two model folders of either kind: configuration by key, weights bit by bit.

    Raises WeightError naming every key and the first tensors that differ.
    """
    configs = [read_json(folder / "config.json") for folder in (a, b)]
    differences = config_differences(*configs)
    if differences:
        raise WeightError(f"{a} and {b} describe different models: {'; '.join(differences)}.")
    layout, first, _ = _open_checked(a)
    _, second, _ = _open_checked(b)
    wrong = []
    with progress_bar("verify", len(layout.hf_shapes)) as advance:
        for name, shape in layout.hf_shapes.items():
            left, right = (one.read(name, 0, 0, shape[0]).contiguous() for one in (first, second))
            bits = (left.view(torch.uint8), right.view(torch.uint8))
            if left.dtype != right.dtype or not torch.equal(*bits):
                wrong.append(name)
            advance()
    if wrong:
        raise WeightError(f"{a} and {b}: {len(wrong)} tensors differ: {', '.join(wrong[:10])}.")
    return f"{len(layout.hf_shapes)} tensors are equal, bit by bit."


def _open_checked(folder: Path) -> tuple[ModelLayout, TensorSource, torch.dtype]:
    """Open a model folder and check its tensors against the layout."""
    layout, source = open_layout(folder), open_source(folder)
    check_tensors(source, layout, folder)
    dtypes = {source.dtypes[name] for name in layout.hf_shapes}
    if len(dtypes) != 1:
        raise WeightError(f"{folder}: tensors have different types: {sorted(map(str, dtypes))}.")
    return layout, source, dtypes.pop()
