"""Buckets in memory that processes of one machine share.

A bucket is a mapped file on a memory file system. The file's name is removed as soon as everyone
has opened it, so nothing is left behind however the processes end.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from megadapo.errors import InfraError
from megadapo.weights.sync.transports.in_place import InPlaceInbox
from megadapo.weights.sync.transports.parcels import NUM_BUCKETS, Offer, Parcel

MEMORY_FOLDER = Path("/dev/shm")


class SharedMemoryOutbox:
    """Two buckets in one mapped file."""

    def __init__(self, num_bytes: int) -> None:
        folder = MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else Path(tempfile.gettempdir())
        handle, name = tempfile.mkstemp(prefix="megadapo-weights-", dir=folder)
        self._path = Path(name)
        self._size = num_bytes
        try:
            # Reserve now: touching a page that the file system cannot give kills the process.
            os.posix_fallocate(handle, 0, NUM_BUCKETS * num_bytes)
        except OSError as error:
            self._path.unlink()
            raise InfraError(
                f"{folder} has no room for two weight buckets of {num_bytes} bytes ({error}); "
                "lower weights.bucket_mib or enlarge the shared memory (docker: --shm-size)."
            ) from error
        finally:
            os.close(handle)
        self._memory = _map(self._path, num_bytes)

    def offer(self) -> Offer:
        """Path and size of the mapped file."""
        return {"path": str(self._path), "num_bytes": self._size}

    def connect(self, offers: Sequence[Offer | None]) -> None:
        """Receivers need nothing but the offer."""

    def opened(self) -> None:
        """Remove the name; the memory lives as long as somebody maps it."""
        self._path.unlink(missing_ok=True)

    def bucket(self, round_number: int) -> torch.Tensor:
        """The bytes to fill for a round."""
        return self._memory[round_number % NUM_BUCKETS]

    def post(self, round_number: int, parcels: Sequence[Parcel]) -> None:
        """Receivers see the bytes as they are written."""

    def close(self) -> None:
        """Remove the name if it is still there, and unmap."""
        self.opened()
        self._memory = torch.empty(0, dtype=torch.uint8)


class SharedMemoryInbox(InPlaceInbox):
    """The buckets of the trainer ranks on this machine."""

    def __init__(self, offers: Sequence[Offer | None]) -> None:
        super().__init__(offers, lambda offer: _map(Path(offer["path"]), offer["num_bytes"]))


def _map(path: Path, num_bytes: int) -> torch.Tensor:
    """[2, num_bytes] bytes of a file that must exist with exactly that size."""
    if not path.is_file() or path.stat().st_size != NUM_BUCKETS * num_bytes:
        raise InfraError(
            f"Shared memory {path} is not there with {NUM_BUCKETS} x {num_bytes} bytes."
        )
    flat = torch.from_file(str(path), shared=True, size=NUM_BUCKETS * num_bytes, dtype=torch.uint8)
    return flat.view(NUM_BUCKETS, num_bytes)
