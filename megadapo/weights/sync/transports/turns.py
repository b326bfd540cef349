"""Turns at the buckets that engine ranks read in a trainer rank's memory.

A rank tells each reader that a bucket is full, and the reader tells it that it has read the bucket:
one byte over a Unix socket. So no round needs the driver. A process that ends closes
its sockets, so the others do not wait for it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence

import torch

from megadapo.errors import InfraError
from megadapo.weights.sync.transports.interface import NUM_BUCKETS, Message, Offer

TURN = b"\1"


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
