"""Buckets that engine ranks read in the trainer's memory: shared memory, or CUDA IPC between GPUs.

A shared-memory bucket is a mapped file on a memory file system. Its name is removed as soon as
every receiver has opened it, so no file is left even if the processes are killed.

CUDA IPC handles travel once, as plain integers and bytes. A round then costs one copy out of the
trainer's parameters and one into the engine's.

A rank tells each reader that a bucket is full, and the reader tells it that it has read the bucket:
one byte over a Unix socket. So no round needs the driver. A process that ends closes its sockets,
so the others do not wait for it.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megadapo.errors import InfraError
from megadapo.weights.sync.transports.interface import NUM_BUCKETS, Message, Offer, Outbox

MEMORY_FOLDER = Path("/dev/shm")

_HANDLE_FIELDS = (
    "device",
    "handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)
"""Result of torch's `UntypedStorage._share_cuda_`, in its order."""
TURN = b"\1"


class InPlaceInbox:
    """The buckets of the trainer ranks whose memory this process can open.

    Args:
        offers: Offer of every trainer rank; None for ranks that this engine rank does not read.
        open_offer: Returns both buckets of an offer, [2, n] bytes.
    """

    def __init__(
        self, offers: Sequence[Offer | None], open_offer: Callable[[Offer], torch.Tensor]
    ) -> None:
        self._memory = [None if offer is None else open_offer(offer) for offer in offers]

    def receive(self, round_number: int, messages: Sequence[Message]) -> list[torch.Tensor]:
        views = []
        for message in messages:
            memory = self._memory[message.sender]
            assert memory is not None, "the plan sends from a rank that made no offer"
            bucket = memory[round_number % NUM_BUCKETS]
            views.append(bucket.narrow(0, message.offset, message.num_bytes))
        return views

    def close(self) -> None:
        self._memory = []


class SharedMemoryOutbox(Outbox):
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
        super().__init__(_map(self._path, num_bytes))

    def offer(self) -> Offer:
        return {"path": str(self._path), "num_bytes": self._size}

    def opened(self) -> None:
        """Remove the name; the memory exists until no process maps it."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        self.opened()
        super().close()


class SharedMemoryInbox(InPlaceInbox):
    """The shared-memory buckets of the trainer ranks on this machine."""

    def __init__(self, offers: Sequence[Offer | None]) -> None:
        super().__init__(offers, lambda offer: _map(Path(offer["path"]), offer["num_bytes"]))


def _map(path: Path, num_bytes: int) -> torch.Tensor:
    """Map a file that must have exactly two buckets; returns [2, num_bytes] bytes."""
    if not path.is_file() or path.stat().st_size != NUM_BUCKETS * num_bytes:
        raise InfraError(
            f"Shared memory {path} is not there with {NUM_BUCKETS} x {num_bytes} bytes."
        )
    flat = torch.from_file(str(path), shared=True, size=NUM_BUCKETS * num_bytes, dtype=torch.uint8)
    return flat.view(NUM_BUCKETS, num_bytes)


class CudaIpcOutbox(Outbox):
    """Two buckets on this trainer rank's GPU."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        super().__init__(torch.empty(NUM_BUCKETS, num_bytes, dtype=torch.uint8, device=device))
        self._references: list[tuple[bytes, int]] = []
        """torch's count of each offer's receivers: its file and the place in it."""

    def offer(self) -> Offer:
        """Return the storage's IPC handles; each receiver opens them once, when it connects."""
        shared = self._memory.untyped_storage()._share_cuda_()
        values = dict(zip(_HANDLE_FIELDS, shared, strict=True))
        self._references.append((values["ref_counter_handle"], values["ref_counter_offset"]))
        fields = {
            name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
            for name, value in values.items()
        }
        uuid = str(torch.cuda.get_device_properties(self._memory.device).uuid)
        return fields | {"num_bytes": self._memory.shape[1], "gpu": uuid}

    def opened(self) -> None:
        """Let `close` free the memory at once; torch would wait until a receiver closes it."""
        # a killed one never does, and the others do when they have opened the next offer
        while self._references:
            torch.UntypedStorage._release_ipc_counter_cuda(*self._references.pop())

    def close(self) -> None:
        self.opened()
        super().close()

    def post(self, round_number: int, messages: Sequence[Message]) -> None:
        """Wait for the copies into the bucket, since receivers read from another process."""
        torch.cuda.synchronize(self._memory.device)


class CudaIpcInbox(InPlaceInbox):
    """The GPU buckets of the trainer ranks on this machine."""

    def __init__(self, offers: Sequence[Offer | None], device: torch.device) -> None:
        super().__init__(offers, lambda offer: _open_cuda(offer, device))

    def close(self) -> None:
        super().close()
        torch.cuda.ipc_collect()


def _open_cuda(offer: Offer, device: torch.device) -> torch.Tensor:
    """Map both buckets of an offer; returns [2, n] bytes.

    Maps them on this process's own GPU if that can reach theirs. On their GPU the process would
    need a context (about 0.5 GiB) for every other rank of its engine.
    """
    torch.cuda.init()
    values = {
        name: base64.b64decode(offer[name]) if isinstance(offer[name], str) else offer[name]
        for name in _HANDLE_FIELDS
    }
    own = torch.cuda.current_device() if device.index is None else device.index
    # The same GPU may have another number in this process.
    uuids = [
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(torch.cuda.device_count())
    ]
    theirs = uuids.index(offer["gpu"])
    is_near = theirs == own or torch.cuda.can_device_access_peer(own, theirs)
    values["device"] = own if is_near else theirs
    # receivers read a round after its sender has synchronised, so opening waits for nothing
    values["event_sync_required"] = False
    storage = torch.UntypedStorage._new_shared_cuda(*values.values())
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return flat[: NUM_BUCKETS * offer["num_bytes"]].view(NUM_BUCKETS, offer["num_bytes"])


class FillingTurns:
    """The turns of a trainer rank, which fills buckets.

    Args:
        patience_s: Seconds after which a reader that does not answer is left out.
    """

    def __init__(self, patience_s: float) -> None:
        # the socket has no file, so none is left if the process is killed
        self.name = f"\0megadapo-{secrets.token_hex(16)}"
        self._patience_s = patience_s
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.name)
        self._listener.listen(1024)
        self._readers: dict[int, list[socket.socket]] = {}
        self._reading: list[list[socket.socket]] = [[] for _ in range(NUM_BUCKETS)]

    def opened(self) -> None:
        """Accept the readers, all of which have connected."""
        self._listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                reader, _ = self._listener.accept()
                peer = reader.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                if struct.unpack("3i", peer)[1] == os.getuid():
                    number = int.from_bytes(reader.recv(8), "little")
                    self._readers.setdefault(number, []).append(reader)
        self._listener.close()

    def wait(self, round_number: int) -> None:
        """Wait until all readers have read the last content of a round's bucket.

        A reader that has ended or hangs is left out from now on; it gets no more turns.
        """
        until = time.monotonic() + self._patience_s
        for reader in self._reading[round_number % NUM_BUCKETS]:
            if not _is_told(reader, max(0.0, until - time.monotonic())):
                reader.close()
        self._reading[round_number % NUM_BUCKETS] = []

    def give(self, round_number: int, messages: Sequence[Message]) -> None:
        """Tell the readers of a round that its bucket is full."""
        readers = [
            reader
            for target in dict.fromkeys(message.target for message in messages)
            for reader in self._readers.get(target, ())
            if reader.fileno() >= 0
        ]
        for reader in readers:
            # `wait` finds one that has ended
            with contextlib.suppress(OSError):
                reader.send(TURN)
        self._reading[round_number % NUM_BUCKETS] = readers

    def close(self) -> None:
        for one in (self._listener, *(one for some in self._readers.values() for one in some)):
            one.close()


class ReadingTurns:
    """The turns of an engine rank, which reads buckets.

    Args:
        offers: Offer of every trainer rank; None for ranks that this engine rank does not read.
        target: Number of this engine rank in `Message.target`.
        device: Device that reads them.
    """

    def __init__(self, offers: Sequence[Offer | None], target: int, device: torch.device) -> None:
        self._device = device
        self._senders: dict[int, socket.socket] = {}
        for number, offer in enumerate(offers):
            if offer is not None:
                sender = self._senders[number] = socket.socket(socket.AF_UNIX)
                sender.connect(offer["turns"])
                sender.send(target.to_bytes(8, "little"))

    def wait(self, messages: Sequence[Message]) -> bool:
        """Wait until all buckets with these messages are full; False if one never will be."""
        senders = dict.fromkeys(message.sender for message in messages)
        return all(_is_told(self._senders[number]) for number in senders)

    def give(self, messages: Sequence[Message]) -> None:
        """Tell the trainer ranks that their buckets are read."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for number in dict.fromkeys(message.sender for message in messages):
            try:
                self._senders[number].send(TURN)
            except OSError as error:
                # the sender may have filled the bucket for a later round already
                raise InfraError(
                    f"Trainer rank {number} left out this engine rank: {error}"
                ) from None

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()


def _is_told(other: socket.socket, timeout_s: float | None = None) -> bool:
    """Wait for the other side's word; False if it has ended, takes too long or was left out."""
    try:
        other.settimeout(timeout_s)
        return bool(other.recv(1))
    except OSError:
        return False
