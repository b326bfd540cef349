"""Buckets in GPU memory that processes on one machine share through CUDA IPC.

The handles travel once, as the plain integers and bytes they are; a round then costs one copy out
of the trainer's parameters and one into the engine's.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import torch

from megadapo.weights.sync.transports.in_place import InPlaceInbox
from megadapo.weights.sync.transports.parcels import NUM_BUCKETS, Offer, Parcel

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
"""What torch's `UntypedStorage._share_cuda_` returns, in its order."""


class CudaIpcOutbox:
    """Two buckets on this trainer rank's GPU."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._memory = torch.empty(NUM_BUCKETS, num_bytes, dtype=torch.uint8, device=device)
        self._num_bytes = num_bytes

    def offer(self) -> Offer:
        """The storage's IPC handles; each receiver opens them once, when it connects."""
        shared = self._memory.untyped_storage()._share_cuda_()
        fields = {
            name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
            for name, value in zip(_HANDLE_FIELDS, shared, strict=True)
        }
        uuid = str(torch.cuda.get_device_properties(self._memory.device).uuid)
        return fields | {"num_bytes": self._num_bytes, "gpu": uuid}

    def connect(self, offers: Sequence[Offer | None]) -> None:
        """Receivers need nothing but the offer."""

    def opened(self) -> None:
        """The handles stay valid as long as the buckets do."""

    def bucket(self, round_number: int) -> torch.Tensor:
        """The bytes to fill for a round."""
        return self._memory[round_number % NUM_BUCKETS]

    def post(self, round_number: int, parcels: Sequence[Parcel]) -> None:
        """Receivers read from another process, so the copies must be on the device by now."""
        torch.cuda.synchronize(self._memory.device)

    def close(self) -> None:
        """Give the memory back."""
        self._memory = torch.empty(0, dtype=torch.uint8)


class CudaIpcInbox(InPlaceInbox):
    """The buckets of the trainer ranks on this machine."""

    def __init__(self, offers: Sequence[Offer | None], device: torch.device) -> None:
        super().__init__(offers, lambda offer: _open(offer, device))

    def close(self) -> None:
        """Let go of the buckets."""
        super().close()
        torch.cuda.ipc_collect()


def _open(offer: Offer, device: torch.device) -> torch.Tensor:
    """Both buckets of an offer, mapped on this process's own GPU where that can reach their GPU.

    On the GPU that they lie on, the process would take a context there (about 0.5 GiB) for every
    other rank of its engine.
    """
    torch.cuda.init()
    values = {
        name: base64.b64decode(offer[name]) if isinstance(offer[name], str) else offer[name]
        for name in _HANDLE_FIELDS
    }
    own = torch.cuda.current_device() if device.index is None else device.index
    # The same GPU may have another number in this process.
    theirs = _gpu_index(offer["gpu"])
    is_near = theirs == own or torch.cuda.can_device_access_peer(own, theirs)
    values["device"] = own if is_near else theirs
    # a round is read when it was filled, not when its buckets are opened
    values["event_sync_required"] = False
    storage = torch.UntypedStorage._new_shared_cuda(*values.values())
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return flat[: NUM_BUCKETS * offer["num_bytes"]].view(NUM_BUCKETS, offer["num_bytes"])


def _gpu_index(uuid: str) -> int:
    uuids = [
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(torch.cuda.device_count())
    ]
    return uuids.index(uuid)
