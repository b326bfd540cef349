"""Fingerprints of the models that a run starts from, by which a resumed run notices other files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from megadapo.config import RunConfig
from megadapo.models.folder import cached_hub_folder, is_hub_name
from megadapo.weights.disk.files import MEANING, unreadable

BLOCK_BYTES = 1 << 16
SAMPLED_BYTES = 1 << 29
"""Bytes of a folder's weights that are hashed, in blocks at equal distances: all of a small model.

Every optimizer update changes weights in every block, so other weights are noticed without reading
all of a large model once more."""
ModelFiles = Mapping[str, str]
"""Digest of each file of a model that decides what a run learns; the commit of one on the Hub."""


def model_files(config: RunConfig) -> dict[str, ModelFiles]:
    """Return the files of each model that is on this machine, by the key of its path.

    Raises:
        InfraError: a file cannot be read.
    """
    found: dict[str, ModelFiles] = {}
    for key, path in config.model_paths.items():
        if Path(path).is_dir():
            found[key] = _digests(Path(path))
        elif is_hub_name(path) and (folder := cached_hub_folder(path)) is not None:
            found[key] = {"commit": folder.name}
    return found


def _digests(folder: Path) -> ModelFiles:
    """Return a digest of each file of configuration, tokenizer, chat template and weights."""
    texts = {path for pattern in MEANING for path in folder.glob(pattern)}
    weights = set(folder.glob("*.safetensors*"))
    try:
        num_bytes = sum(path.stat().st_size for path in weights)
        every = BLOCK_BYTES * max(1, -(-num_bytes // SAMPLED_BYTES))
        return {
            str(path.relative_to(folder)): _digest(path, every if path in weights else BLOCK_BYTES)
            for path in sorted(texts | weights)
            if path.is_file()
        }
    except OSError as error:
        raise unreadable(Path(error.filename or folder), error) from error


def _digest(path: Path, every: int) -> str:
    """Hash a file's size and the block of bytes at each multiple of `every`."""
    num_bytes = path.stat().st_size
    digest = hashlib.sha256(str(num_bytes).encode())
    with path.open("rb", buffering=0) as file:
        for start in range(0, num_bytes, every):
            file.seek(start)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]
