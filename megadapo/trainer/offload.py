"""State of the trainer that is in main memory while its GPUs belong to the engines.

Storages are emptied and filled in place, so all views of them stay valid: parameters, buckets and
the optimizer's shards. megatron-core's own `offload_to_cpu` replaces the optimizer's tensors. The
new ones are not pinned, and fp32 weights would lose the memory they share with Adam's shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, UntypedStorage
from torch.profiler import record_function

from megadapo.errors import InfraError
from megadapo.trainer.config import StateKind
from megadapo.trainer.trained_model import TrainedModel
from megadapo.weights.host_memory import HostMemory

Storages = Callable[[], Iterable[UntypedStorage]]

BETWEEN_UPDATES: tuple[StateKind, StateKind] = ("gradients", "optimizer")
"""State that is needed in updates only."""


class Offload:
    """Moves the state of a rank's models to main memory and back. Kinds of state that
    `trainer.offload` does not name stay on the device."""

    def __init__(
        self, kinds: Sequence[StateKind], models: Sequence[TrainedModel], device: torch.device
    ) -> None:
        self._chunks = [chunk for model in models for chunk in model.chunks]
        self._optimizers = [model.optimizer for model in models]
        self._device = device
        storages: dict[StateKind, Storages] = {
            "parameters": lambda: storages_of(self._parameters()),
            "gradients": lambda: storages_of(self._gradients()),
            "optimizer": self._optimizer_storages,
        }
        self._kinds: dict[str, OffloadedStorages] = {
            kind: OffloadedStorages(find, device, keeps_values=kind != "gradients")
            for kind, find in storages.items()
            if kind in kinds
        }
        self.engines_use_device = False
        """Whether engines use the memory of the device, so that nothing may be loaded."""

    def evict(self, *kinds: StateKind) -> None:
        """Free the device memory of these kinds; megatron-core must not compute until `load`."""
        for kind in kinds:
            if (offloaded := self._kinds.get(kind)) is not None:
                offloaded.evict()

    def prefetch(self, *kinds: StateKind) -> None:
        """Start to copy these kinds back while the device computes.

        Raise InfraError while engines use the memory of the device.
        """
        if self.engines_use_device:
            raise InfraError(
                f"{' and '.join(kinds)} cannot be loaded while engines use this rank's GPU: let "
                "them sleep first (run/processes.py)"
            )
        for kind in kinds:
            if (offloaded := self._kinds.get(kind)) is not None:
                offloaded.prefetch()

    def load(self, *kinds: StateKind) -> None:
        """Make these kinds available to everything that the device computes from here on."""
        self.prefetch(*kinds)
        for kind in kinds:
            if (offloaded := self._kinds.get(kind)) is not None:
                offloaded.wait()

    @contextmanager
    def resident(self, *kinds: StateKind) -> Iterator[None]:
        """Load these kinds for the block; evict those again that were evicted before."""
        evicted = [kind for kind in kinds if kind in self._kinds and self._kinds[kind].is_evicted]
        self.load(*kinds)
        yield
        self.evict(*evicted)

    def values_of(self, tensor: Tensor) -> Tensor:
        """Return a tensor's values, on the device or in main memory; for reading only."""
        storage = tensor.untyped_storage()._cdata
        for offloaded in self._kinds.values():
            if (copy := offloaded.copies.get(storage)) is not None:
                return _like(tensor, copy)
        return tensor

    def _parameters(self) -> Iterator[Tensor]:
        return chain.from_iterable(chunk.parameters() for chunk in self._chunks)

    def _gradients(self) -> Iterator[Tensor]:
        for chunk in self._chunks:
            yield from (buffer.grad_data for buffer in chunk.buffers)
            yield from (buffer.grad_data for buffer in chunk.expert_parallel_buffers)

    def _optimizer_storages(self) -> list[UntypedStorage]:
        """Return moments and fp32 masters; fp32 weights are their own masters, so parameters."""
        weights = {storage.data_ptr() for storage in storages_of(self._parameters())}
        tensors = (
            tensor
            for optimizer in self._optimizers
            for part in optimizer.chained_optimizers
            for tensor in _optimizer_tensors(part)
            # Megatron's hybrid optimizer keeps some in main memory itself
            if tensor.device.type == self._device.type
        )
        return [storage for storage in storages_of(tensors) if storage.data_ptr() not in weights]


class OffloadedStorages:
    """Storages of one kind of state."""

    def __init__(self, storages: Storages, device: torch.device, *, keeps_values: bool) -> None:
        """`keeps_values`: whether values are copied; otherwise storages come back as zeros."""
        self.is_evicted = False
        self._storages, self._keeps_values = storages, keeps_values
        self._memory = HostMemory(pinned=device.type == "cuda")
        self._evicted: list[tuple[UntypedStorage, int]] = []
        """Each storage with its size in bytes."""
        self.copies: dict[int, Tensor] = {}
        """Address of torch's object of each storage -> its bytes, while they are not loaded."""
        self._stream = torch.cuda.Stream()

    @record_function("megadapo::offload")
    def evict(self) -> None:
        if self.is_evicted:
            return
        self.wait()
        self.is_evicted = True
        self._memory.reset()
        with self._memory.copying() as copy:
            for storage in self._storages():
                if self._keeps_values:
                    self.copies[storage._cdata] = copy(_bytes_of(storage))
                self._evicted.append((storage, storage.nbytes()))
        for storage, _ in self._evicted:
            storage.resize_(0)

    @record_function("megadapo::offload")
    def prefetch(self) -> None:
        if not self.is_evicted:
            return
        self.is_evicted = False
        for storage, size in self._evicted:
            storage.resize_(size)
        # earlier work on the device may still use this memory
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for storage, _ in self._evicted:
                target = _bytes_of(storage)
                if self._keeps_values:
                    target.copy_(self.copies[storage._cdata], non_blocking=True)
                else:
                    target.zero_()

    def wait(self) -> None:
        """Let the device wait for a prefetch before it computes anything else."""
        if self._evicted and not self.is_evicted:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._evicted, self.copies = [], {}


def _optimizer_tensors(part: MegatronOptimizer) -> Iterator[Tensor]:
    """Yield masters and moments; a rank without parameters to train has no inner optimizer."""
    optimizer = part.optimizer
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        # 0-d tensors such as Adam's step count stay
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim())


def storages_of(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return each non-empty storage once, in the tensors' order."""
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _like(view: Tensor, copy: Tensor) -> Tensor:
    """Return the part of `copy`, the bytes of a storage, that `view` is of the storage."""
    typed = copy.view(view.dtype)
    start = typed.storage_offset() + view.storage_offset()
    return typed.as_strided(view.shape, view.stride(), start)
