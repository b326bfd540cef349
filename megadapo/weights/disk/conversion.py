"""Conversions between folders of Hugging Face, megatron-core and GGUF, and FP8 export."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator
from functools import reduce
from importlib.util import find_spec
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from megadapo.errors import ConfigError, DataError, WeightError
from megadapo.models.description import config_differences
from megadapo.models.folder import read_json
from megadapo.weights.disk.checkpoint_source import TrainerCheckpoint, write_weights
from megadapo.weights.disk.export import (
    check_new,
    copy_config_and_tokenizer,
    export_weights,
    full_tensors,
    new_folder,
    progress_bar,
)
from megadapo.weights.disk.files import CARRIED, files_within
from megadapo.weights.disk.headers import METADATA_FILE, read_headers
from megadapo.weights.disk.model_folder import TOKENIZER_FILES, check_model_folder
from megadapo.weights.disk.sources import TensorSource, open_layout, open_weights
from megadapo.weights.layout.layout import ModelLayout

QUANTIZATIONS = {"fp8": "FP8_PER_CHANNEL_PER_TOKEN_CFG"}
"""modelopt's settings: one weight scale per output channel, and activation scales per token. They
need no calibration data, which could bias the policy."""
GGUF_EXTRA = ("accelerate", "gguf")
"""Packages that transformers needs to read a GGUF file, in megadapo's extra `gguf`."""
UNREADABLE = (OSError, ValueError, LookupError, NotImplementedError, RuntimeError, struct.error)
"""Errors of transformers on files that are damaged, or of an unknown architecture."""
_ROPE_KEY = ".rope.scaling.type"
SPLIT_KEY = "tokenizer.ggml.pre"
"""Name of the rule by which a byte-level tokenizer splits text before it merges."""
COMMON_SPLITS = ("default", "gpt-2")
"""Names of GPT-2's own rule."""


def hf_to_megatron(source: Path, destination: Path) -> str:
    """Write a Hugging Face folder in megatron-core's checkpoint format torch_dist; describe it.

    It needs memory for one weight. Configuration and tokenizer are copied beside the weights.
    """
    layout, tensors, dtype = _open_hf(source)
    with new_folder(destination) as partial:
        copy_config_and_tokenizer(source, partial, dtype)
        write_weights(tensors, layout, partial, dtype)
        return _inspected(partial, destination)


def write_hf(
    weights: TrainerCheckpoint, destination: Path, model: Path, *, quantize: str | None = None
) -> None:
    """Write weights in megatron-core's format as a Hugging Face folder, optionally in FP8.

    It needs memory for one output file and one weight; with `quantize` for the whole model.
    `model`: folder of the model's configuration and tokenizer.
    """
    if quantize is not None:
        with new_folder(destination) as partial, TemporaryDirectory(dir=partial.parent) as beside:
            write_hf(weights, Path(beside) / "plain", model)
            _quantize_folder(Path(beside) / "plain", partial, quantize)
        return
    with progress_bar("write", len(weights.layout.hf_shapes)) as advance:
        export_weights(
            weights.tensors(),
            destination,
            dtype=weights.dtype,
            base_folder=model,
            on_tensor=advance,
        )


def _quantize_folder(source: Path, destination: Path, how: str) -> None:
    """Quantise a Hugging Face folder into another that vLLM loads as it is.

    Needs nvidia-modelopt, and memory for the whole model. Embedding, head, router and norms keep
    their type.
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
            copy = partial / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            if not copy.exists():
                shutil.copyfile(path, copy)


def inspect(path: Path, model: Path | None = None) -> str:
    """Describe a model folder of either kind, after the checks that a run makes of it.

    `model`: folder of the config.json; None: `path`.
    """
    notes: list[str] = []
    if _is_megatron(path):
        checkpoint = TrainerCheckpoint(path, open_layout(model or path))
        layout, types = checkpoint.layout, {str(checkpoint.dtype)}
    else:
        with_tokenizer = any((path / name).is_file() for name in TOKENIZER_FILES)
        found, notes = check_model_folder(path, where=str(path), with_tokenizer=with_tokenizer)
        layout = ModelLayout(found.family, found.shape)
        types = {header.dtype for header in read_headers(path).tensors.values()}
    shape, listed = layout.shape, " and ".join(sorted(types))
    num_parameters = sum(prod(one) for one in layout.hf_shapes.values())
    lines = [
        f"{path}",
        f"  format        {'torch_dist' if _is_megatron(path) else 'Hugging Face'}",
        f"  family        {layout.family.architecture}",
        f"  parameters    {num_parameters:,} in {len(layout.hf_shapes)} tensors, {listed}",
        f"  layers        {shape.num_layers} of hidden size {shape.hidden_size}",
        f"  heads         {shape.num_heads} of {shape.head_dim}, {shape.num_kv_heads} for keys",
        f"  vocabulary    {shape.vocab_size}, head {'tied' if shape.tied else 'of its own'}",
    ]
    if shape.num_experts:
        lines.append(f"  experts       {shape.num_experts} of {shape.expert_ffn_size}")
    return "\n".join([*lines, *(f"  note          {note}" for note in notes)])


def _inspected(partial: Path, destination: Path) -> str:
    """Describe a folder under its final name; a folder with a problem must not get that name."""
    return inspect(partial).replace(str(partial), str(destination), 1)


def verify(folders: tuple[Path, Path], models: tuple[Path, Path]) -> str:
    """Compare two model folders of either kind: configuration by key, weights bit by bit.

    `models` are the folders of their config.json.

    Raises WeightError naming every key and the first tensors that differ.
    """
    a, b = folders
    differences = config_differences(*[read_json(model / "config.json") for model in models])
    if differences:
        raise WeightError(f"{a} and {b} describe different models: {'; '.join(differences)}.")
    layout, first = _open(a, models[0])
    _, second = _open(b, models[1])
    wrong = []
    with progress_bar("verify", len(layout.hf_shapes)) as advance:
        for (name, left), (_, right) in zip(first, second, strict=True):
            bits = [one.contiguous().view(torch.uint8) for one in (left, right)]
            if left.dtype != right.dtype or not torch.equal(*bits):
                wrong.append(name)
            advance()
    if wrong:
        raise WeightError(f"{a} and {b}: {len(wrong)} tensors differ: {', '.join(wrong[:10])}.")
    return f"{len(layout.hf_shapes)} tensors are equal, bit by bit."


def _open(folder: Path, model: Path) -> tuple[ModelLayout, Iterator[tuple[str, torch.Tensor]]]:
    """Return the layout of a checked model folder of either kind, and its full tensors."""
    if _is_megatron(folder):
        checkpoint = TrainerCheckpoint(folder, open_layout(model))
        return checkpoint.layout, checkpoint.tensors()
    layout, source, _ = _open_hf(folder)
    return layout, full_tensors(source, layout)


def _is_megatron(folder: Path) -> bool:
    return (folder / METADATA_FILE).is_file()


def _open_hf(folder: Path) -> tuple[ModelLayout, TensorSource, torch.dtype]:
    """Open a Hugging Face folder, with the narrowest type that holds all its weights."""
    layout = open_layout(folder)
    source = open_weights(folder, layout)
    dtypes = [source.dtypes[name] for name in layout.hf_shapes]
    return layout, source, reduce(torch.promote_types, dtypes)


def gguf_to_hf(source: Path, destination: Path) -> str:
    """Write the model and tokenizer of a GGUF file as a Hugging Face folder in fp32; describe it.

    Quantised weights get the values that they stand for. The folder gets its name when it is
    complete. Raise DataError if transformers cannot read the file, or not its tokenizer's rule.
    """
    if missing := [name for name in GGUF_EXTRA if find_spec(name) is None]:
        raise ConfigError(
            f"{source}: GGUF files need {' and '.join(missing)}: pip install 'megadapo[gguf]', "
            "or in this repository pip install --no-deps -r requirements/real.lock"
        )
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    check_new(destination)
    folder, file = source.absolute().parent, source.name
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=file,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    except UNREADABLE as error:
        raise DataError(f"{source}: transformers cannot read this GGUF file: {error}") from error
    reader = GGUFReader(source)
    _check_rope(reader, source)
    rule = reader.get_field(SPLIT_KEY)
    set_split(tokenizer, None if rule is None else str(rule.contents()), source)
    tokenizer.model_max_length = model.config.max_position_embeddings
    # the name of the training run, which transformers would write as the model's path
    model.config.__dict__.pop("_model_name_or_path", None)
    with new_folder(destination) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for path in partial.glob("*.safetensors"):
            # safetensors makes files private to the user, but another user may serve the model
            path.chmod((partial / "config.json").stat().st_mode)
        return _inspected(partial, destination)


def _check_rope(reader: Any, source: Path) -> None:
    """Raise DataError if a file has a rotary scaling, which transformers leaves out."""
    field = next((one for key, one in reader.fields.items() if key.endswith(_ROPE_KEY)), None)
    kind = "none" if field is None else field.contents()
    tensors = [one for one in reader.tensors if one.name.startswith("rope_f")]
    if kind != "none" or any((one.data != 1.0).any() for one in tensors):
        found = ", ".join([kind, *(one.name for one in tensors)])
        raise DataError(
            f"{source}: its rotary scaling ({found}) would be lost: convert from the model's "
            "safetensors, whose config.json has it"
        )


def set_split(tokenizer: Any, rule: str | None, source: Path) -> None:
    """Give a tokenizer the split rule that the file names, where transformers did not.

    A wrong rule is silent: texts come back whole, but as other ids than the model was trained on.
    """
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    split = backend.pre_tokenizer
    if not isinstance(split, pre_tokenizers.ByteLevel) or rule in (None, *COMMON_SPLITS):
        return
    if rule != "smollm":
        raise DataError(
            f"{source}: its tokenizer splits text by the rule {rule!r}, which this version of "
            "transformers does not know; convert from the model's safetensors and tokenizer.json"
        )
    # each digit is alone, so that blanks and line ends before a number are merged
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
