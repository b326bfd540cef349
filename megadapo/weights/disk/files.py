"""Files of a checkpoint that are hashed while they are written, and checked before they are read.

A rank reports what it has written: so nobody has to read a file again to know what should be in it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megadapo.errors import CorruptCheckpointError


@dataclass(frozen=True)
class FileEntry:
    """What a file must be."""

    bytes: int
    sha256: str


Files = dict[str, FileEntry]
"""By path, relative to the folder that they are listed for."""


class HashedFile:
    """The part of a file object that torch.save needs; every byte is hashed on its way."""

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
    """Write a new file, which is on the disk when this returns; its folder is made if need be."""
    path.parent.mkdir(exist_ok=True)
    with path.open("xb") as file:
        yield HashedFile(file)
        file.flush()
        os.fsync(file.fileno())
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def entry_of(path: Path) -> FileEntry:
    """What a file is, read from the disk."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(path.stat().st_size, digest)


def check_files(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Read files and compare them with what they must be.

    Raises:
        CorruptCheckpointError: one is missing or differs.
    """
    for name, expected in sorted(files.items()):
        try:
            found = entry_of(folder / name)
        except OSError as error:
            raise CorruptCheckpointError(
                f"{folder / name} cannot be read: {error.strerror}"
            ) from error
        if found != expected:
            raise CorruptCheckpointError(
                f"{folder / name} is damaged: it does not match its SHA-256"
            )
