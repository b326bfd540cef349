"""Headers of the weights in a Hugging Face folder: its files, and name, type and shape of tensors.

No weights are read and torch is not imported, so that checks before a run are fast.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megadapo.errors import WeightError
from megadapo.models.folder import read_json
from megadapo.models.shape import CONFIG_KEYS
from megadapo.weights.layout.layout import ModelLayout

WHOLE_NAME = "model.safetensors"
INDEX_NAME = f"{WHOLE_NAME}.index.json"
METADATA_FILE = ".metadata"
"""File of megatron-core's checkpoints that says where each tensor is."""
TYPES = ("F64", "F32", "F16", "BF16")
"""Types of weights that can be trained, as safetensors names them."""
_WEIGHT_FILES = ("*.safetensors", "*.index.json", "pytorch_model*.bin", "*.pth", "*.gguf")
_BUFFERS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
"""Ends of names that old Llama files have: values that follow from config.json."""
_QUANTISED = re.compile(r"[._](scales?|scale_inv|qweight|qzeros|zero_point|absmax|packed|g_idx)$")


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a file."""

    file: Path
    dtype: str
    """Type as safetensors names it, such as BF16."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Headers:
    """The tensors of a folder, each name in exactly one file."""

    folder: Path
    tensors: Mapping[str, TensorHeader]
    unread: tuple[str, ...]
    """Names of other files in the folder that can have weights."""

    @property
    def notes(self) -> list[str]:
        """Lines about weights that are not read."""
        files = ", ".join(self.unread)
        return [f"{self.folder}: not read as weights: {files}"] if files else []


def read_headers(folder: Path) -> Headers:
    """Read the headers of a folder's weights; raise WeightError if a file is missing or damaged.

    As in transformers, model.safetensors is taken before an index, and nothing beside them.
    """
    files = _weight_files(folder)
    tensors: dict[str, TensorHeader] = {}
    for path in files:
        for name, header in _tensors(path):
            if name in tensors:
                raise WeightError(f"{path}: {name} is also in {tensors[name].file.name}")
            tensors[name] = header
    found = {path.name for pattern in _WEIGHT_FILES for path in folder.glob(pattern)}
    used = {path.name for path in files}
    if WHOLE_NAME not in used:
        used.add(INDEX_NAME)
    return Headers(folder, tensors, tuple(sorted(found - used)))


def check_headers(headers: Headers, layout: ModelLayout) -> None:
    """Compare names, types and shapes of tensors with the layout.

    Raise WeightError that names quantised, missing, unknown and misshapen ones (the first ten).
    """
    found, expected = dict(headers.tensors), layout.hf_axes
    if layout.shape.tied:
        _drop_tied_head(headers, found, layout)
    for name, header in found.items():
        if header.dtype not in TYPES or (name not in expected and _QUANTISED.search(name)):
            raise WeightError(
                f"{header.file}: the weights are quantised ({name} has the type {header.dtype}), "
                "and only plain ones can be trained: write the model in bfloat16 first"
            )
    problems = list(_differences(found, layout))
    if problems:
        rest = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise WeightError(f"{headers.folder}: {'; '.join(problems[:10])}{rest}.")


def _weight_files(folder: Path) -> list[Path]:
    whole, index = folder / WHOLE_NAME, folder / INDEX_NAME
    if whole.exists() or whole.is_symlink():
        return [whole]
    if index.exists() or index.is_symlink():
        return _indexed_files(index)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        is_megatron = (folder / METADATA_FILE).is_file()
        hint = "; write its Hugging Face folder with `megadapo convert megatron-to-hf`"
        raise WeightError(f"{folder} has no .safetensors file{hint * is_megatron}.")
    names = ", ".join(path.name for path in files)
    raise WeightError(
        f"{folder} has neither {WHOLE_NAME} nor {INDEX_NAME} beside {names}: copy the index too, "
        f"or give the only file with weights the name {WHOLE_NAME}"
    )


def _indexed_files(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightError(f"{index} has no weight_map with the file of each tensor.")
    names = sorted(set(map(str, weight_map.values())))
    is_there = {name: (index.parent / name).is_file() for name in names}
    missing = [name for name in names if Path(name).name != name or not is_there[name]]
    if missing:
        raise WeightError(
            f"{index} names {', '.join(missing[:10])}, which is not a file beside it "
            f"({len(missing)} of {len(names)} files): copy the model again"
        )
    return [index.parent / name for name in names]


def _tensors(path: Path) -> Iterator[tuple[str, TensorHeader]]:
    """Yield the tensors of a file, without buffers."""
    if not path.is_file():
        raise WeightError(f"{path} is not a file: copy the model again")
    try:
        with safe_open(path, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                piece = opened.get_slice(name)
                if not name.endswith(_BUFFERS):
                    yield name, TensorHeader(path, piece.get_dtype(), tuple(piece.get_shape()))
    except (OSError, SafetensorError) as error:
        raise WeightError(
            f"{path} is not a readable safetensors file: {error}; copy it again"
        ) from error


def _differences(found: Mapping[str, TensorHeader], layout: ModelLayout) -> Iterator[str]:
    shapes = layout.hf_shapes
    # of a model of another kind all are unknown, and say more than what is missing
    unknown = [name for name in found if name not in shapes]
    for name in unknown[:5]:
        yield f"{name} of {found[name].file.name} is not in the layout"
    if len(unknown) > 5:
        yield f"{len(unknown) - 5} others are not in it either"
    yield from (f"{name} is missing" for name in shapes if name not in found)
    for name, axes in layout.hf_axes.items():
        if name in found and found[name].shape != shapes[name]:
            yield (
                f"{name} of {found[name].file.name} has shape {list(found[name].shape)}, "
                f"config.json says {list(shapes[name])} "
                f"({', '.join(CONFIG_KEYS[symbol] for symbol in axes)})"
            )


def _drop_tied_head(headers: Headers, found: dict[str, TensorHeader], layout: ModelLayout) -> None:
    """Accept a tied head that a writer stored as well, if it equals the embedding."""
    (head,), (embedding,) = layout.family.head.hf, layout.family.embedding.hf
    if head not in found or embedding not in found:
        return
    first, second = found.pop(head), found[embedding]
    # the only check that reads weights
    with (
        safe_open(first.file, framework="pt") as one,
        safe_open(second.file, framework="pt") as other,
    ):
        same = (first.shape, first.dtype) == (second.shape, second.dtype)
        if not same or not one.get_tensor(head).equal(other.get_tensor(embedding)):
            raise WeightError(
                f"{headers.folder}: tie_word_embeddings is true, but {head} != {embedding}."
            )
