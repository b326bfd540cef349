"""An append-only file of checksummed records, which detects torn and damaged records.

record: 8 bytes length of the payload | 4 bytes CRC-32 of the length | 16 bytes BLAKE2b of the
        payload | payload                                                (little-endian)
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
import struct
import uuid
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from megadapo.weights.disk.files import sync_path

logger = logging.getLogger(__name__)

JOURNAL_FOLDER = "journal"
"""Folder of a run's logs of groups and episodes."""
_LENGTH = struct.Struct("<Q")
_PREFIX = struct.Struct("<QI16s")


class RecordLog:
    """One open file of records that belong together, for use by one thread at a time.

    The first record is a JSON object that identifies what the others belong to. A disk error ends
    the writing, but not the run; written records stay readable.
    """

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, object],
        read: Callable[[int, bytes], None],
        *,
        loss: str,
        warn: Callable[[str], None] = logger.warning,
        aside: Path | None = None,
    ) -> None:
        """Read the file if there is one, and cut off what follows its last intact record.

        Records of another identity are discarded. The first new record creates the file.

        Args:
            identity: values by the names that a warning uses.
            read: receives offset and payload of each later record, in order.
            loss: end of each warning: what becomes of lost records.
            warn: receives each warning.
            aside: folder for a copy of discarded records.
        """
        self.path = path
        self.error: OSError | None = None
        """Error after which nothing is written."""
        self._identity, self._loss, self._warn_of, self._aside = identity, loss, warn, aside
        self._file: io.FileIO | None = None
        self._end = 0
        self._entry_is_synced = False
        """Whether the file's directory entry is on disk."""
        try:
            if path.exists():
                self._open(read)
        except OSError as error:
            self._give_up(error)

    def append(self, payload: bytes) -> int | None:
        """Add a record and return its offset; None after a disk error, which leaves no trace."""
        if self.error is not None:
            return None
        try:
            file = self._file or self._create()
            return self._write(file, payload)
        except OSError as error:
            self._give_up(error)
            return None

    def read(self, offset: int) -> bytes | None:
        """Return the payload of the record at an offset; None if it cannot be read."""
        assert self._file is not None, "an open file has the offset"
        try:
            payload, problem = _record(self._file, offset)
        except OSError as error:
            payload, problem = None, f"{error.strerror}"
        if payload is None:
            self._warn(f"cannot read the record at byte {offset} ({problem})")
        return payload

    def clear(self) -> None:
        """Remove all records, of which `aside` gets a copy."""
        try:
            if self.error is None and self._file is not None:
                self._clear(self._file)
        except OSError as error:
            self._give_up(error)

    def sync(self) -> None:
        """Force all records to disk."""
        if self.error is not None:
            return
        try:
            file = self._file or self._create()
            os.fsync(file.fileno())
            if not self._entry_is_synced:
                sync_path(self.path.parent)
                self._entry_is_synced = True
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._file is not None:
            # a file server may refuse now what it took before; the next scan cuts off what it lost
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _open(self, read: Callable[[int, bytes], None]) -> None:
        difference = ""

        def index(offset: int, payload: bytes) -> None:
            nonlocal difference
            if offset == 0:
                difference = _difference(payload, self._identity)
            elif not difference:
                read(offset, payload)

        self._file = io.FileIO(self.path, "r+")
        self._entry_is_synced = True
        self._end, damage = _scan(self._file, index)
        if damage:
            self._warn(damage)
        self._file.truncate(self._end)
        if difference:
            copied = "" if self._aside is None else f", and is copied to {self._aside}"
            self._warn(f"differs in {difference}{copied}")
        if difference or not self._end:
            self._clear(self._file)

    def _create(self) -> io.FileIO:
        self.path.parent.mkdir(exist_ok=True)
        self._file = io.FileIO(self.path, "x+")
        self._write(self._file, json.dumps(self._identity).encode())
        return self._file

    def _clear(self, file: io.FileIO) -> None:
        if self._end and self._aside is not None:
            self._aside.mkdir(exist_ok=True)
            shutil.copyfile(self.path, self._aside / f"{uuid.uuid4().hex[:8]}-{self.path.name}")
        file.truncate(0)
        self._end = 0
        self._write(file, json.dumps(self._identity).encode())

    def _write(self, file: io.FileIO, payload: bytes) -> int:
        offset, left = self._end, memoryview(_prefix(payload) + payload)
        try:
            while left:
                num_bytes = os.pwrite(file.fileno(), left, self._end)
                left, self._end = left[num_bytes:], self._end + num_bytes
        except OSError:
            self._end = offset
            with suppress(OSError):
                file.truncate(offset)
            raise
        return offset

    def _give_up(self, error: OSError) -> None:
        self.error = error
        self._warn(f"cannot be written: {error.strerror}")

    def _warn(self, problem: str) -> None:
        self._warn_of(f"{self.path}: {problem}; {self._loss}")


def _difference(payload: bytes, identity: Mapping[str, object]) -> str:
    """Return the name of a value in which a file's first record differs; empty if none does."""
    with suppress(AttributeError, ValueError):
        found = json.loads(payload)
        return next((name for name in identity if found.get(name) != identity[name]), "")
    return "format"


def read_records(path: Path, read: Callable[[int, bytes], None]) -> str:
    """Read a file that another process may write, up to its last intact record.

    Returns:
        What is wrong after that record; empty if nothing is.
    """
    with io.FileIO(path) as file:
        return _scan(file, read)[1]


def _scan(file: io.FileIO, read: Callable[[int, bytes], None]) -> tuple[int, str]:
    """Read all records; return the end of the last intact one, and what is wrong after it."""
    offset, size = 0, os.fstat(file.fileno()).st_size
    while offset < size:
        payload, problem = _record(file, offset)
        if payload is None:
            return offset, f"{problem} at byte {offset} of {size}"
        read(offset, payload)
        offset += _PREFIX.size + len(payload)
    return offset, ""


def _record(file: io.FileIO, offset: int) -> tuple[bytes | None, str]:
    """Return the payload at an offset, or None and the problem."""
    prefix = _read(file, offset, _PREFIX.size)
    if len(prefix) < _PREFIX.size:
        return None, "a torn record"
    length, check, _ = _PREFIX.unpack(prefix)
    if check != _check(length):
        return None, "a damaged record"
    if offset + _PREFIX.size + length > os.fstat(file.fileno()).st_size:
        return None, "a torn record"
    payload = _read(file, offset + _PREFIX.size, length)
    if prefix != _prefix(payload):
        return None, "a damaged record"
    return payload, ""


def _read(file: io.FileIO, offset: int, num_bytes: int) -> bytes:
    """Return `num_bytes` bytes from an offset on; fewer at the end of the file."""
    parts: list[bytes] = []
    while num_bytes > 0 and (part := os.pread(file.fileno(), num_bytes, offset)):
        parts.append(part)
        offset, num_bytes = offset + len(part), num_bytes - len(part)
    return b"".join(parts)


def _prefix(payload: bytes) -> bytes:
    digest = hashlib.blake2b(payload, digest_size=16).digest()
    return _PREFIX.pack(len(payload), _check(len(payload)), digest)


def _check(length: int) -> int:
    return zlib.crc32(_LENGTH.pack(length))
