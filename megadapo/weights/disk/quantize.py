"""FP8 export for vLLM, by nvidia-modelopt."""

from __future__ import annotations

import shutil
from pathlib import Path

from megadapo.errors import WeightError
from megadapo.weights.disk.export import CARRIED, new_folder
from megadapo.weights.disk.files import files_within
from megadapo.weights.disk.megatron_folder import open_layout

CONFIGS = {"fp8": "FP8_PER_CHANNEL_PER_TOKEN_CFG"}
"""Weights with a scale per output channel; activations are scaled per token as they come, so that
no calibration data can bias the policy."""


def quantize_folder(source: Path, destination: Path, how: str) -> None:
    """Quantise a Hugging Face folder into another that vLLM loads as it is.

    The whole model is in memory once. Embedding, head, router and norms stay as they are.

    Raises:
        WeightError: `how` is unknown, the model has experts, or modelopt quantised nothing.
    """
    if how not in CONFIGS:
        raise WeightError(f"--quantize {how}: choose from {', '.join(CONFIGS)}.")
    if open_layout(source).shape.num_experts:
        raise WeightError(
            f"--quantize {how}: vLLM reads per-channel FP8 for dense layers only; export without "
            "it and start vLLM with quantization='fp8'."
        )
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", trust_remote_code=False)
    with torch.no_grad():
        mtq.quantize(model, getattr(mtq, CONFIGS[how]))
        partial = new_folder(destination)
        export_hf_checkpoint(model, export_dir=partial)
    if not (partial / "hf_quant_config.json").is_file():
        raise WeightError(f"nvidia-modelopt wrote no quantised weights for {source}.")
    for path in files_within(source, CARRIED):
        if not (partial / path.name).exists():
            shutil.copyfile(path, partial / path.name)
    partial.rename(destination)
