"""vLLM's side of a weight update, as a plugin at its weight-transfer extension point.

vLLM loads the `vllm.general_plugins` entry point `register` in every one of its processes. On CUDA
slices are copied straight into live parameters. If vLLM repacks its weights after loading (on the
CPU, quantised, experts), whole shards go through its layerwise reload; delta updates then need a
copy of the unpacked shards in main memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from megadapo.cluster.process_log import write_stacks_on_signal
from megadapo.cluster.watch.guard import MARK
from megadapo.errors import WeightError
from megadapo.weights.layout.layout import ModelLayout, layout_for
from megadapo.weights.sync.delta import Delta
from megadapo.weights.sync.plan import plan_from_json
from megadapo.weights.sync.receiver import Target, WeightReceiver
from megadapo.weights.sync.transports.interface import Inbox, Offer, Transport
from megadapo.weights.sync.vllm_internals import LayerwiseReload

NAME = "megadapo"


def register() -> None:
    """Register the transfer engine with vLLM, at least once in each of its processes."""
    # other programs that use vLLM load this plugin as well
    if MARK in os.environ:
        write_stacks_on_signal()
    # for a class, the only error is that the name is already registered
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(NAME, MegadapoTransfer)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The arguments of a connection."""

    plan: dict[str, Any]
    """Result of `UpdatePlan.to_json`."""
    shape: dict[str, Any]
    """The trainer's `ModelShape`, to compare with this engine's."""
    receiver: int
    """Number of this engine's receiver in the plan."""
    member: int
    """Number of this engine among its receiver's engines."""
    bucket_bytes: int
    transport: Transport
    offers: list[Offer | None]
    deltas: bool = False
    """Whether updates may send only the changes."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The arguments of one call of an update."""

    begin: dict[str, Any] | None = None
    """Arguments of the first round: version, whether to keep checksums for a comparison at the
    end, and the fields of a `Delta` or None."""
    rounds: Sequence[int] = ()
    checksums: list[list[list[int]]] | None = None
    """[sender][round] -> the trainer's checksum of every slice, to compare with."""


@dataclass
class LiveParameters(Target):
    """The parameters that the model computes with, written in place."""

    parameters: Mapping[str, torch.Tensor]

    def begin(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.parameters[name]

    def complete(self, name: str, tensor: torch.Tensor) -> None:
        """Do nothing: the slices are already in the parameter."""


@dataclass
class KeptShards(Target):
    """Unpacked copies of all shards, for a model that computes with repacked ones."""

    repack: LayerwiseReload
    shards: dict[str, torch.Tensor]

    def begin(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self.shards:
            self.shards[name] = torch.zeros(shape, dtype=self.repack.dtype)
        return self.shards[name]

    def complete(self, name: str, tensor: torch.Tensor) -> None:
        self.repack.complete(name, tensor.to(self.repack.device))


class MegadapoTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's transfer engine of one worker, which receives its shards from the trainer."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._inbox: Inbox | None = None
        self._receiver: WeightReceiver | None = None
        self._reload: LayerwiseReload | None = None

    @property
    def weight_version(self) -> int | None:
        """Version of the last complete update over the present connection."""
        return None if self._receiver is None else self._receiver.version

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Check that trainer and engine have the same model, and open the buckets."""
        layout = layout_for(self.model_config.hf_config.to_dict())
        _check_shape(layout, init_info.shape)
        plan = plan_from_json(init_info.plan)
        rank = self.parallel_config.rank
        receiver = WeightReceiver(
            plan,
            layout.engine_shards(plan.engine.position(rank)),
            receiver=init_info.receiver,
            engine_rank=rank,
            bucket_bytes=init_info.bucket_bytes,
            dtype=self._dtype,
        )
        self.shutdown()
        self._receiver = receiver
        self._kept: dict[str, torch.Tensor] | None = {} if init_info.deltas else None
        self._inbox = receiver.open_inbox(
            init_info.transport, init_info.offers, self.device, member=init_info.member
        )

    def start_weight_update(self) -> None:
        """Check the connection; the first `receive_weights` starts the update."""
        if self._inbox is None:
            raise WeightError("Weight update before init_weight_transfer_engine.")

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive rounds, or compare checksums after the last."""
        receiver = self._connected
        if update_info.begin is not None:
            self._begin(**update_info.begin)
        with contextlib.ExitStack() as failing:
            # the trainer's ranks must not wait for an engine that is lost
            failing.callback(self.shutdown)
            if all(receiver.take(number) for number in update_info.rounds):
                failing.pop_all()
        if update_info.checksums is not None:
            receiver.verify(update_info.checksums)

    def finish_weight_update(self) -> None:
        """Check that all parameters are complete, and let vLLM repack the remaining layers."""
        self._connected.finish()
        if self._reload is not None:
            self._reload.finish(self.model_config)

    def _begin(self, version: int, with_checksums: bool, delta: dict[str, Any] | None) -> None:
        """Choose the target of the slices and start the update."""
        assert self._inbox is not None, "start_weight_update checks it"
        changes = None if delta is None else Delta(**delta)
        if changes is not None:
            self._connected.check(changes)
        target: Target | None = self._live_parameters()
        self._reload = None
        if target is None:
            target = self._reload = LayerwiseReload(self.model, self.device, self._dtype)
            if self._kept is not None:
                target = KeptShards(self._reload, self._kept)
        self._connected.start(
            target, self._inbox, with_checksums=with_checksums, version=version, delta=changes
        )

    @property
    def _connected(self) -> WeightReceiver:
        assert self._receiver is not None, "init_transfer_engine makes it"
        return self._receiver

    def shutdown(self) -> None:
        """Release the trainer's buckets."""
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None

    @property
    def _dtype(self) -> torch.dtype:
        dtype = self.model_config.dtype
        assert isinstance(dtype, torch.dtype), "vLLM has resolved the name of the type"
        return dtype

    def _live_parameters(self) -> LiveParameters | None:
        """Return the parameters, or None if vLLM computes with repacked ones."""
        if self.device.type != "cuda" or self.vllm_config.quant_config is not None:
            return None
        parameters = dict(self.model.named_parameters())
        for name, shape in self._connected.shapes.items():
            # Expert kernels may reorder their stacked weights.
            if len(shape) > 2 or name not in parameters or parameters[name].shape != shape:
                return None
        return LiveParameters(parameters)


def _check_shape(layout: ModelLayout, trainer: dict[str, Any]) -> None:
    """Raise WeightError if the engine serves another model than the trainer's."""
    own = asdict(layout.shape)
    for name, value in trainer.items():
        if own[name] != value:
            raise WeightError(
                f"Trainer and engine differ in {name}: {value} against {own[name]}; both must "
                "come from the same model.path."
            )


class UpdateExtension:
    """A mix-in of vLLM's worker; engines call its methods by name on every rank."""

    weight_transfer_engine: MegadapoTransfer

    def weight_version(self) -> int | None:
        """Return the version of this rank's weights; None after an incomplete update."""
        return self.weight_transfer_engine.weight_version
