"""An append-only file of checksummed records, which detects torn and damaged records.

record: 8 bytes length of the payload | 4 bytes CRC-32 of the length | 16 bytes BLAKE2b of the
        payload | payload                                                (little-endian)
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megadapo.weights.disk.files import sync_path

JOURNAL_FOLDER = "journal"
"""Folder of a run's logs of groups and episodes."""
_LENGTH = struct.Struct("<Q")
_PREFIX = struct.Struct("<QI16s")


class RecordLog:
    """One open file of records, for use by one thread at a time."""

    def __init__(self, path: Path, read: Callable[[int, bytes], None]) -> None:
        """Open or create the file, and cut off what follows its last intact record.

        Args:
            read: receives offset and payload of each record, in order.

        Raises:
            OSError: the file cannot be read or written.
        """
        self.path = path
        self._entry_is_synced = path.exists()
        """Whether the file's directory entry is on disk."""
        self._file = io.FileIO(path, "r+" if self._entry_is_synced else "x+")
        try:
            self._end, self.cut = _scan(self._file, read)
            """`cut`: reason why the end of the file was cut off; empty if it was not."""
            self._file.truncate(self._end)
        except BaseException:
            self._file.close()
            raise

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._end

    def append(self, payload: bytes) -> int:
        """Add a record and return its offset; a failed write leaves no trace.

        Raises:
            OSError: the disk is full or fails.
        """
        offset = self._end
        record = _prefix(payload) + payload
        try:
            self._write(record, offset)
        except OSError:
            with suppress(OSError):
                self._file.truncate(offset)
            raise
        self._end += len(record)
        return offset

    def read(self, offset: int) -> bytes | None:
        """Return the payload of the record at an offset; None if it is damaged."""
        return _record(self._file, offset)[0]

    def clear(self) -> None:
        """Remove all records."""
        self._file.truncate(0)
        self._end = 0

    def sync(self) -> None:
        """Force all records to disk."""
        os.fsync(self._file.fileno())
        if not self._entry_is_synced:
            sync_path(self.path.parent)
            self._entry_is_synced = True

    def close(self) -> None:
        # a file server may refuse now what it took before; the next scan cuts off what it lost
        with suppress(OSError):
            self._file.close()

    def _write(self, data: bytes, offset: int) -> None:
        left = memoryview(data)
        while left:
            num_bytes = os.pwrite(self._file.fileno(), left, offset)
            left, offset = left[num_bytes:], offset + num_bytes


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
