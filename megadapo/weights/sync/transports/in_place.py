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
from collections.abc import Iterator, Sequence
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


class InPlaceOutbox(Outbox):
    """Two buckets that engine ranks read in turn.

    `patience_s`: seconds after which a reader that does not answer is left out.
    """

    def __init__(self, memory: torch.Tensor, patience_s: float) -> None:
        super().__init__(memory)
        self._patience_s = patience_s
        self._listener = socket.socket(socket.AF_UNIX)
        # the socket has no file, so none is left if the process is killed
        self._name = f"\0megadapo-{secrets.token_hex(16)}"
        self._listener.bind(self._name)
        self._listener.listen(1024)
        self._readers: dict[int, list[socket.socket]] = {}
        self._reading: list[list[socket.socket]] = [[] for _ in range(NUM_BUCKETS)]

    def offer(self) -> Offer:
        return {"turns": self._name, "num_bytes": self._memory.shape[1]}

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

    def bucket(self, round_number: int) -> torch.Tensor:
        """Return the bytes to fill, once all readers have read their previous content.

        A reader that has ended or hangs is left out from now on; it gets no more turns.
        """
        half = round_number % NUM_BUCKETS
        until = time.monotonic() + self._patience_s
        for reader in self._reading[half]:
            if not _is_told(reader, max(0.0, until - time.monotonic())):
                reader.close()
        self._reading[half] = []
        return self._memory[half]

    def post(self, round_number: int, messages: Sequence[Message]) -> None:
        """Tell the readers of a round that its bucket is full."""
        if self._memory.is_cuda:
            # they read from another process
            torch.cuda.synchronize(self._memory.device)
        readers = [
            reader
            for target in dict.fromkeys(message.target for message in messages)
            for reader in self._readers.get(target, ())
            if reader.fileno() >= 0
        ]
        for reader in readers:
            # `bucket` finds one that has ended
            with contextlib.suppress(OSError):
                reader.send(TURN)
        self._reading[round_number % NUM_BUCKETS] = readers

    def close(self) -> None:
        for one in (self._listener, *(one for some in self._readers.values() for one in some)):
            one.close()
        super().close()


class SharedMemoryOutbox(InPlaceOutbox):
    """Two buckets in one mapped file."""

    def __init__(self, num_bytes: int, patience_s: float = 60.0) -> None:
        folder = MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else Path(tempfile.gettempdir())
        handle, name = tempfile.mkstemp(prefix="megadapo-weights-", dir=folder)
        self._path = Path(name)
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
        memory = open_shared_memory({"path": name, "num_bytes": num_bytes})
        super().__init__(memory, patience_s)

    def offer(self) -> Offer:
        return super().offer() | {"path": str(self._path)}

    def opened(self) -> None:
        """Remove the name as well; the memory exists until no process maps it."""
        super().opened()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        super().close()


def open_shared_memory(offer: Offer) -> torch.Tensor:
    """Map the file of an offer, which must have exactly two buckets; returns [2, n] bytes."""
    path, num_bytes = Path(offer["path"]), offer["num_bytes"]
    if not path.is_file() or path.stat().st_size != NUM_BUCKETS * num_bytes:
        raise InfraError(
            f"Shared memory {path} is not there with {NUM_BUCKETS} x {num_bytes} bytes."
        )
    flat = torch.from_file(str(path), shared=True, size=NUM_BUCKETS * num_bytes, dtype=torch.uint8)
    return flat.view(NUM_BUCKETS, num_bytes)


class CudaIpcOutbox(InPlaceOutbox):
    """Two buckets on this trainer rank's GPU."""

    def __init__(self, num_bytes: int, device: torch.device, patience_s: float = 60.0) -> None:
        memory = torch.empty(NUM_BUCKETS, num_bytes, dtype=torch.uint8, device=device)
        super().__init__(memory, patience_s)
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
        return super().offer() | fields | {"gpu": uuid}

    def opened(self) -> None:
        """Let `close` free the memory at once; torch would wait until a receiver closes it."""
        super().opened()
        self._release()

    def close(self) -> None:
        self._release()
        super().close()

    def _release(self) -> None:
        # a killed receiver never closes it, and the others do when they have opened the next offer
        while self._references:
            torch.UntypedStorage._release_ipc_counter_cuda(*self._references.pop())


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


class InPlaceInbox:
    """The buckets of the trainer ranks whose memory this process can open.

    Args:
        offers: Offer of every trainer rank; None for ranks that this engine rank does not read.
        target: Number of this engine rank in `Message.target`.
    """

    def __init__(self, offers: Sequence[Offer | None], target: int, device: torch.device) -> None:
        self._device = device
        self._memory: dict[int, torch.Tensor] = {}
        self._senders: dict[int, socket.socket] = {}
        for number, offer in enumerate(offers):
            if offer is not None:
                is_shared = "path" in offer
                self._memory[number] = (
                    open_shared_memory(offer) if is_shared else _open_cuda(offer, device)
                )
                sender = self._senders[number] = socket.socket(socket.AF_UNIX)
                sender.connect(offer["turns"])
                sender.send(target.to_bytes(8, "little"))

    def wait(self, messages: Sequence[Message]) -> bool:
        """Wait until all buckets with these messages are full; False if one never will be."""
        senders = dict.fromkeys(message.sender for message in messages)
        return all(_is_told(self._senders[number]) for number in senders)

    def receive(self, round_number: int, messages: Sequence[Message]) -> Iterator[torch.Tensor]:
        """Yield the bytes of each message, then tell the trainer ranks that they are read.

        Raises ConnectionError if one has ended or left out this engine rank: it may have filled the
        bucket again.
        """
        for message in messages:
            bucket = self._memory[message.sender][round_number % NUM_BUCKETS]
            yield bucket.narrow(0, message.offset, message.num_bytes)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for number in dict.fromkeys(message.sender for message in messages):
            self._senders[number].send(TURN)

    def close(self) -> None:
        """Leave the trainer ranks, so that none waits for this one, and release the buckets."""
        for sender in self._senders.values():
            sender.close()
        self._memory = {}
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()


def _is_told(other: socket.socket, timeout_s: float | None = None) -> bool:
    """Wait for the other side's word; False if it has ended, takes too long or was left out."""
    try:
        other.settimeout(timeout_s)
        return bool(other.recv(1))
    except OSError:
        return False
