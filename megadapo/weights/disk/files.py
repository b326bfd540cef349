"""Files of models and checkpoints: hashed while written, and never followed out of a folder.

Each rank reports the hashes of its files, so no process reads them again to list them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megadapo.errors import CorruptCheckpointError, InfraError, WeightError

_LOGGER = logging.getLogger("megadapo.weights")
MEANING = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "tekken.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)
"""Files beside the weights that decide what a model reads and writes."""
CARRIED = (*MEANING, "LICENSE*")
"""Files that are copied along with the weights from one model folder to another."""
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"
"""Folders of the Hub's cache: files of a snapshot are links to blobs of the same model."""


@dataclass(frozen=True)
class FileEntry:
    """The expected size and hash of a file."""

    bytes: int
    sha256: str


Files = dict[str, FileEntry]
"""Entries by path, relative to the folder that lists them."""


class HashedFile:
    """The part of a file object that torch.save needs; hashes every byte it writes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._num_bytes = 0

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self._num_bytes += len(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self._num_bytes

    def flush(self) -> None:
        self._file.flush()

    @property
    def entry(self) -> FileEntry:
        return FileEntry(self._num_bytes, self._hash.hexdigest())


@contextmanager
def hashed_file(path: Path) -> Iterator[HashedFile]:
    """Write a new file and flush it to the disk on exit; creates its folder if necessary."""
    path.parent.mkdir(exist_ok=True)
    with path.open("xb") as file:
        yield HashedFile(file)
        file.flush()
        os.fsync(file.fileno())
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def entry_of(path: Path) -> FileEntry:
    """Hash a file that is on the disk."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(path.stat().st_size, digest)


def check_files(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Compare the files of a folder with their entries.

    Raise CorruptCheckpointError if a file differs in two complete reads, of which the second is
    from the disk, and InfraError if it cannot be read here, which says nothing about what is in it.
    """
    for name, expected in sorted(files.items()):
        path = folder / name
        try:
            if entry_of(path) == expected:
                continue
            with path.open("rb") as file:
                # the kernel drops the pages, so that the next read comes from the disk
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            found = entry_of(path)
        except OSError as error:
            raise unreadable(path, error) from error
        if found != expected:
            raise CorruptCheckpointError(f"{path} is damaged: it does not match its SHA-256")
        _LOGGER.warning(
            "%s was read wrongly once and rightly then: memory or network of %s may be faulty",
            *(path, socket.gethostname()),
        )


def unreadable(path: Path, error: OSError) -> InfraError:
    """Return the error of a file or folder that this node cannot read."""
    return InfraError(
        f"{path} cannot be read on node {socket.gethostname()}: {error.strerror or error}; "
        "is its file system mounted there? Nothing was changed"
    )


def remove_folder(path: Path) -> None:
    """Delete a folder, or only the link if `path` is one."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def files_within(folder: Path, patterns: Iterable[str]) -> Iterator[Path]:
    """Yield the files of a model folder that match, in the order of the patterns.

    Raise WeightError if one is a link out of the folder; its target may be a private file.
    """
    root = folder.resolve()
    roots = {root}
    if root.parent.name == _SNAPSHOTS:
        roots.add(root.parent.parent / _BLOBS)
    matches = (path for pattern in patterns for path in sorted(folder.glob(pattern)))
    # tokenizer.model has two patterns
    for path in dict.fromkeys(matches):
        target = path.resolve()
        if not roots.intersection(target.parents):
            raise WeightError(
                f"{path} is a link to {target}, outside of the model's folder: it is not "
                "copied; put the file itself there"
            )
        if path.is_file():
            yield path
