"""vLLM's side of a weight update: its weight-transfer extension point, entered as a plugin.

vLLM loads the `vllm.general_plugins` entry point `register` in every one of its processes. On CUDA
slices go straight into live parameters; where vLLM repacks its weights after loading (on the CPU,
quantised, experts) whole shards go through its layerwise reload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, cast

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    make_online_process_loader,
)

from megadapo.errors import WeightError
from megadapo.weights.layout.layout import ModelLayout, layout_for
from megadapo.weights.sync.parcels import Offer
from megadapo.weights.sync.plan import plan_from_json
from megadapo.weights.sync.receiver import Target, WeightReceiver
from megadapo.weights.sync.transports import Inbox, open_inbox

NAME = "megadapo"


def register() -> None:
    """Make the engine known to vLLM; called once in each of its processes, or more often."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, __name__, MegadapoTransfer.__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What a worker is told once."""

    plan: dict[str, Any]
    """`Plan.to_json`."""
    shape: dict[str, Any]
    """The trainer's `ModelShape`, to be compared with this engine's."""
    engine: int
    """Number of this engine's receiver in the plan."""
    bucket_bytes: int
    transport: str
    offers: list[Offer | None]
    """Per trainer rank, what opens its buckets."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One call of an update: a round to take, or checksums to compare with."""

    round: int | None = None
    with_checksums: bool = False
    """On the first round: keep checksums for a comparison at the end."""
    checksums: list[list[list[int]]] | None = None
    """[feeder][round] -> the trainer's checksum of every slice."""


@dataclass
class LiveParameters(Target):
    """Slices go into the parameters that the model computes with."""

    parameters: Mapping[str, torch.Tensor]

    def begin(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.parameters[name]

    def complete(self, name: str, tensor: torch.Tensor) -> None:
        """Nothing is left to do."""


class _Loadable(Protocol):
    """A parameter, with the function that vLLM hangs on it to load it by."""

    weight_loader: Callable[..., object]


@dataclass
class LayerwiseReload(Target):
    """Whole shards go through vLLM's loading, which repacks a layer once it is complete."""

    model: torch.nn.Module
    device: torch.device
    dtype: torch.dtype
    layers: dict[str, tuple[torch.nn.Module, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tied = _tied_layers(self.model)
        self._replaced: list[tuple[_Loadable, Callable[..., object]]] = []
        if self.device.type == "cpu":
            _forget_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)
        for prefix, layer in self.model.named_modules():
            for name, _ in layer.named_parameters(recurse=False):
                self.layers[f"{prefix}.{name}"] = (layer, name)

    def begin(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def complete(self, name: str, tensor: torch.Tensor) -> None:
        layer, attribute = self.layers[name]
        param = getattr(layer, attribute)
        # vLLM replays the loader when the layer is complete; ours takes the shard as it is. It
        # reuses the parameter in later reloads, so its own loader must come back.
        self._replaced.append((param, _get_original_loader(param)))
        param.weight_loader = _load_shard
        param.weight_loader = make_online_process_loader(layer, attribute)
        param.weight_loader(param, tensor)

    def finish(self, model_config: ModelConfig) -> None:
        """Let vLLM process what it put off, and what shares a parameter with a loaded layer.

        The reload processes the first layer of a tied parameter only; on the CPU the head would
        go on computing with the packed copy it made of the old weights.
        """
        finalize_layerwise_reload(self.model, model_config)
        for param, loader in self._replaced:
            param.weight_loader = loader
        for layer in self._tied:
            cast(QuantizeMethodBase, layer.quant_method).process_weights_after_loading(layer)


def _tied_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Layers whose parameter belongs to an earlier layer too."""
    seen: set[int] = set()
    tied = []
    for layer in model.modules():
        own = {id(param) for param in layer.parameters(recurse=False)}
        if own & seen:
            tied.append(layer)
        seen |= own
    return tied


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    """Have experts packed anew: vLLM packs them for the CPU only while there is no kernel yet,
    and would otherwise compute with the unpacked weights of the update."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _load_shard(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    if param.shape != loaded_weight.shape:
        raise WeightError(
            f"The engine's parameter has shape {list(param.shape)}, its layout says "
            f"{list(loaded_weight.shape)}."
        )
    param.data.copy_(loaded_weight)


class MegadapoTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives this worker's own shards from the trainer's buckets."""

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

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Check that trainer and engine have the same model, and open the buckets."""
        layout = layout_for(self.model_config.hf_config.to_dict())
        _check_shape(layout, init_info.shape)
        plan = plan_from_json(init_info.plan)
        rank = self.parallel_config.rank
        self._receiver = WeightReceiver(
            plan,
            layout.engine_shards(plan.engine.position(rank)),
            engine=init_info.engine,
            engine_rank=rank,
            bucket_bytes=init_info.bucket_bytes,
            dtype=self._dtype,
        )
        self.shutdown()
        self._inbox = open_inbox(
            init_info.transport,
            init_info.offers,
            num_bytes=self._receiver.largest_wave,
            device=self.device,
            rank=plan.engine_rank_number(init_info.engine, rank),
            num_ranks=plan.num_ranks,
        )

    def start_weight_update(self) -> None:
        """Choose where the slices go."""
        if self._inbox is None:
            raise WeightError("Weight update before init_weight_transfer_engine.")
        live = self._live_parameters()
        self._target = live or LayerwiseReload(self.model, self.device, self._dtype)
        self._started = False

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take one round, or compare checksums after the last."""
        if not self._started:
            assert self._inbox is not None, "start_weight_update checks it"
            self._receiver.start(
                self._target, self._inbox, with_checksums=update_info.with_checksums
            )
            self._started = True
        if update_info.round is not None:
            self._receiver.take(update_info.round)
        if update_info.checksums is not None:
            self._receiver.verify(update_info.checksums)

    def finish_weight_update(self) -> None:
        """Make sure that everything came, and let vLLM repack what is left."""
        self._receiver.finish()
        if isinstance(self._target, LayerwiseReload):
            self._target.finish(self.model_config)

    def shutdown(self) -> None:
        """Let go of the trainer's buckets."""
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None

    @property
    def _dtype(self) -> torch.dtype:
        """The type of the engine's weights, which vLLM has resolved by now."""
        dtype = self.model_config.dtype
        assert isinstance(dtype, torch.dtype), dtype
        return dtype

    def _live_parameters(self) -> LiveParameters | None:
        """The parameters themselves, if vLLM computes with them as the layout describes them."""
        if self.device.type != "cuda" or self.vllm_config.quant_config is not None:
            return None
        parameters = dict(self.model.named_parameters())
        for name, shape in self._receiver.shapes.items():
            # The expert kernels may order their stacked weights in a way of their own.
            if len(shape) > 2 or name not in parameters or parameters[name].shape != shape:
                return None
        return LiveParameters(parameters)


def _check_shape(layout: ModelLayout, trainer: dict[str, Any]) -> None:
    """Refuse an engine that serves another model than the trainer trains."""
    own = asdict(layout.shape)
    for name, value in trainer.items():
        if own[name] != value:
            raise WeightError(
                f"Trainer and engine differ in {name}: {value} against {own[name]}; both must "
                "come from the same model.path."
            )
