"""State of the trainer that leaves its GPUs while it does not compute, and comes back.

Storages are emptied and filled again in place, so everything that looks into them stays valid: a
parameter, the bucket that it travels in, the optimizer's shard of it. megatron-core's own
`offload_to_cpu` puts the optimizer's tensors into others, which are not pinned, and would cut fp32
weights off from the shards that Adam updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Literal, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, UntypedStorage
from torch.profiler import record_function

from megadapo.trainer.config import OffloadConfig

Kind = Literal["parameters", "gradients", "optimizer"]
Storages = Callable[[], Iterable[UntypedStorage]]

BLOCK_BYTES = 256 << 20
ALIGNMENT = 64


class TrainedModel(NamedTuple):
    """One model of a rank and what trains it."""

    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer


class Offload:
    """What of a rank's models is on its device; a kind that stays there is never touched."""

    def __init__(
        self, config: OffloadConfig, models: Sequence[TrainedModel], device: torch.device
    ) -> None:
        """Everything is on the device."""
        self._chunks = [chunk for model in models for chunk in model.chunks]
        self._optimizers = [model.optimizer for model in models]
        self._device = device
        found: dict[Kind, Storages] = {
            "parameters": lambda: _storages(self._parameters()),
            "gradients": lambda: _storages(self._gradients()),
            "optimizer": self._optimizer_storages,
        }
        self._kinds: dict[str, _Leaving] = {
            kind: _Leaving(storages, device, keeps=kind != "gradients")
            for kind, storages in found.items()
            if getattr(config, kind) == "cpu"
        }
        self._copies: dict[Tensor, Tensor] = {}
        """Parameter -> its weights in main memory, while those are the only ones."""

    def leave(self, *kinds: Kind) -> None:
        """Free these kinds' memory on the device; megatron-core may not compute until `bring`."""
        for kind in kinds:
            if (leaving := self._kinds.get(kind)) is not None:
                views = list(self._parameters()) if kind == "parameters" else []
                places = [(view, view.untyped_storage().data_ptr()) for view in views]
                copies = leaving.leave()
                self._copies |= {view: _like(view, copies[at]) for view, at in places if at}

    def fetch(self, *kinds: Kind) -> None:
        """Let these kinds begin to come back, beside whatever the device computes."""
        for kind in kinds:
            if (leaving := self._kinds.get(kind)) is not None:
                leaving.fetch()

    def bring(self, *kinds: Kind) -> None:
        """Have these kinds on the device before whatever it is given to compute from here on."""
        self.fetch(*kinds)
        for kind in kinds:
            if (leaving := self._kinds.get(kind)) is not None:
                leaving.arrive()
        if "parameters" in kinds:
            self._copies = {}

    @contextmanager
    def present(self, *kinds: Kind) -> Iterator[None]:
        """Have these kinds on the device within; those that were away leave again."""
        away = [kind for kind in kinds if kind in self._kinds and self._kinds[kind].is_away]
        self.bring(*kinds)
        yield
        self.leave(*away)

    def present_weights(self, parameter: Tensor) -> Tensor:
        """A parameter's weights wherever they are, to be read only."""
        return self._copies.get(parameter, parameter)

    def _parameters(self) -> Iterator[Tensor]:
        return chain.from_iterable(chunk.parameters() for chunk in self._chunks)

    def _gradients(self) -> Iterator[Tensor]:
        for chunk in self._chunks:
            yield from (buffer.grad_data for buffer in chunk.buffers)
            yield from (buffer.grad_data for buffer in chunk.expert_parallel_buffers)

    def _optimizer_storages(self) -> list[UntypedStorage]:
        """Moments and fp32 masters; fp32 weights are their own masters, and are parameters."""
        weights = {storage.data_ptr() for storage in _storages(self._parameters())}
        tensors = (
            tensor
            for optimizer in self._optimizers
            for part in optimizer.chained_optimizers
            for tensor in _tensors_of(part)
            # what Megatron's hybrid optimizer keeps in main memory is there already
            if tensor.device.type == self._device.type
        )
        return [storage for storage in _storages(tensors) if storage.data_ptr() not in weights]


class _Leaving:
    """The storages of one kind."""

    def __init__(self, storages: Storages, device: torch.device, *, keeps: bool) -> None:
        """`keeps`: whether what they hold comes back; else they come back as zeros."""
        self.is_away = False
        self._storages, self._keeps = storages, keeps
        self._memory = _MainMemory(pinned=device.type == "cuda")
        self._away: list[tuple[UntypedStorage, int, Tensor | None]] = []
        """With their sizes and copies."""
        self._stream = torch.cuda.Stream()

    @record_function("megadapo::offload")
    def leave(self) -> dict[int, Tensor]:
        """Returns where each storage was -> its copy."""
        if self.is_away:
            return {}
        self.arrive()
        self.is_away = True
        self._memory.forget()
        copies = {}
        for storage in self._storages():
            copy = None
            if self._keeps:
                copy = copies[storage.data_ptr()] = self._memory.take(storage.nbytes())
                copy.copy_(_bytes_of(storage), non_blocking=True)
            self._away.append((storage, storage.nbytes(), copy))
        torch.cuda.current_stream().synchronize()
        for storage, _, _ in self._away:
            storage.resize_(0)
        return copies

    @record_function("megadapo::offload")
    def fetch(self) -> None:
        if not self.is_away:
            return
        self.is_away = False
        for storage, size, _ in self._away:
            storage.resize_(size)
        # their memory may still be in use by what was computed before
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for storage, _, copy in self._away:
                target = _bytes_of(storage)
                if copy is None:
                    target.zero_()
                else:
                    target.copy_(copy, non_blocking=True)

    def arrive(self) -> None:
        """What was fetched is there for whatever is computed from here on."""
        if self._away and not self.is_away:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._away = []


class _MainMemory:
    """Main memory for copies, which is kept from one time to the next.

    torch rounds the size of pinned memory up to a power of two, so small copies share blocks.
    """

    def __init__(self, *, pinned: bool) -> None:
        """`pinned`: a GPU copies to and from it by itself."""
        self._pinned = pinned
        self._blocks: list[Tensor] = []
        self._block = self._start = 0

    def take(self, size: int) -> Tensor:
        """A piece of so many bytes."""
        while True:
            if self._block == len(self._blocks):
                length = max(size, BLOCK_BYTES)
                block = torch.empty(length, dtype=torch.uint8, pin_memory=self._pinned)
                self._blocks.append(block)
            block, start = self._blocks[self._block], self._start
            if start + size <= len(block):
                self._start = -(-(start + size) // ALIGNMENT) * ALIGNMENT
                return block[start : start + size]
            self._block, self._start = self._block + 1, 0

    def forget(self) -> None:
        """All pieces may be taken again."""
        self._block = self._start = 0


def _tensors_of(part: MegatronOptimizer) -> Iterator[Tensor]:
    """Masters and moments of one optimizer; it has none where the rank has nothing to train."""
    optimizer = part.optimizer
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        # numbers such as Adam's count of steps stay where they are
        yield from (one for one in state.values() if isinstance(one, Tensor) and one.dim())


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Each storage once, in the tensors' order; empty ones left out."""
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _like(view: Tensor, copy: Tensor) -> Tensor:
    """What `view` is of a storage, of the copy of its bytes."""
    typed = copy.view(view.dtype)
    start = typed.storage_offset() + view.storage_offset()
    return typed.as_strided(view.shape, view.stride(), start)
