"""A file of checksummed records that only grows: what a kill or a bad disk does to it is seen.

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

_LENGTH = struct.Struct("<Q")
_PREFIX = struct.Struct("<QI16s")


class RecordLog:
    """One open file of records; for one thread at a time."""

    def __init__(self, path: Path, see: Callable[[int, bytes], None]) -> None:
        """Open the file, or begin it, and cut off whatever lies behind its last sound record.

        Args:
            see: is told of each record, its place and its payload, in order.

        Raises:
            OSError: the file cannot be read or written.
        """
        self.path = path
        self.cut = ""
        """Why the end of the file was cut off; empty where it was not."""
        self._is_named = path.exists()
        """Whether the name of the file is on the disk."""
        self._file = io.FileIO(path, "r+" if self._is_named else "x+")
        try:
            self._end = self._scan(see)
            self._file.truncate(self._end)
        except BaseException:
            self._file.close()
            raise

    def append(self, payload: bytes) -> int:
        """Add a record and return its place; a record that cannot be written leaves no trace.

        Raises:
            OSError: the disk is full or refuses.
        """
        place = self._end
        record = _prefix(payload) + payload
        try:
            self._write(record, place)
        except OSError:
            with suppress(OSError):
                self._file.truncate(place)
            raise
        self._end += len(record)
        return place

    def read(self, place: int) -> bytes | None:
        """The payload of the record at a place; None where it is not sound any more.

        Raises:
            OSError: the file cannot be read.
        """
        return self._record(place)[0]

    def clear(self) -> None:
        """Remove all records.

        Raises:
            OSError: the file cannot be written.
        """
        self._file.truncate(0)
        self._end = 0

    def sync(self) -> None:
        """Return when all records are on the disk.

        Raises:
            OSError: they are not.
        """
        os.fsync(self._file.fileno())
        if not self._is_named:
            sync_path(self.path.parent)
            self._is_named = True

    def close(self) -> None:
        self._file.close()

    def _scan(self, see: Callable[[int, bytes], None]) -> int:
        """Where the last sound record ends."""
        place, size = 0, os.fstat(self._file.fileno()).st_size
        while place < size:
            payload, problem = self._record(place)
            if payload is None:
                self.cut = f"{problem} at byte {place} of {size}"
                break
            see(place, payload)
            place += _PREFIX.size + len(payload)
        return place

    def _record(self, place: int) -> tuple[bytes | None, str]:
        """The payload at a place, or None and what is wrong with it."""
        prefix = self._read(place, _PREFIX.size)
        if len(prefix) < _PREFIX.size:
            return None, "a torn record"
        length, check, _ = _PREFIX.unpack(prefix)
        if check != _check(length):
            return None, "a damaged record"
        if place + _PREFIX.size + length > os.fstat(self._file.fileno()).st_size:
            return None, "a torn record"
        payload = self._read(place + _PREFIX.size, length)
        if prefix != _prefix(payload):
            return None, "a damaged record"
        return payload, ""

    def _read(self, place: int, num_bytes: int) -> bytes:
        """So many bytes from a place on; fewer at the end of the file."""
        parts: list[bytes] = []
        while num_bytes > 0 and (part := os.pread(self._file.fileno(), num_bytes, place)):
            parts.append(part)
            place, num_bytes = place + len(part), num_bytes - len(part)
        return b"".join(parts)

    def _write(self, data: bytes, place: int) -> None:
        left = memoryview(data)
        while left:
            num_bytes = os.pwrite(self._file.fileno(), left, place)
            left, place = left[num_bytes:], place + num_bytes


def _prefix(payload: bytes) -> bytes:
    digest = hashlib.blake2b(payload, digest_size=16).digest()
    return _PREFIX.pack(len(payload), _check(len(payload)), digest)


def _check(length: int) -> int:
    return zlib.crc32(_LENGTH.pack(length))
