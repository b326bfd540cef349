"""Processes of `benchmarks/weights.py`: trainer ranks with weights only, and an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from baselines.measure import reset_resident_peak, resident_peak
from megadapo.cluster.this_node import node_address
from megadapo.weights.disk.sources import (
    collect_spans,
    fill_shard,
    match_params,
    open_layout,
    open_weights,
)
from megadapo.weights.layout.placement import replica_positions
from megadapo.weights.layout.shards import ShardPosition
from megadapo.weights.sync.sender import WeightSender
from megadapo.weights.sync.transports.in_place import SharedMemoryOutbox, open_shared_memory

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

DTYPE = torch.bfloat16
KV_CACHE_BYTES = 1 << 28
TIMEOUT_S = 600.0


def start_ranks(model: Path, folder: Path, *, tp_size: int, pp_size: int) -> list[Any]:
    """Start trainer ranks with the weights of `model`, connected by Gloo."""
    import ray

    positions = replica_positions(open_layout(model), tp_size=tp_size, pp_size=pp_size)
    actor: Any = ray.remote(num_cpus=0)(WeightsRank)
    ranks = [actor.remote(model, positions, rank) for rank in range(len(positions))]
    ray.get([rank.join.remote(folder / "meeting", len(ranks)) for rank in ranks])
    return ranks


class WeightsRank:
    """A trainer rank with weights only, without a model."""

    def __init__(self, model: Path, positions: Sequence[ShardPosition], rank: int) -> None:
        torch.set_num_threads(1)
        position = positions[rank]
        self._layout, self._positions, self._rank = open_layout(model), positions, rank
        self._params = {
            shard.name: torch.empty(shard.shape, dtype=DTYPE)
            for shard in self._layout.megatron_shards(position)
        }
        source = open_weights(model, self._layout)
        for shard, param in match_params(self._params, self._layout, position):
            fill_shard(param, shard, source)
        self._sender = WeightSender(self._params, self._layout, position, rank)
        self._outbox: SharedMemoryOutbox | None = None
        self._gathering: Iterator[tuple[str, torch.Tensor]] | None = None
        self._next: tuple[str, torch.Tensor] | None = None

    def join(self, meeting: Path, num_ranks: int) -> None:
        """Create the tensor- and pipeline-parallel groups for gathering."""
        dist.init_process_group("gloo", f"file://{meeting}", rank=self._rank, world_size=num_ranks)
        at = self._positions[self._rank]
        tp, pp = at.tp_size, at.pp_size
        tp_groups = [dist.new_group([s * tp + t for t in range(tp)]) for s in range(pp)]
        pp_groups = [dist.new_group([s * tp + t for s in range(pp)]) for t in range(tp)]
        self._tp_group, self._pp_group = tp_groups[at.pp_rank], pp_groups[at.tp_rank]

    def weight_sender(self, sender: str, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._sender, method)(*args, **kwargs)

    def gather_bucket(self, bucket_bytes: int) -> dict[str, Any]:
        """Gather full tensors on all ranks until a bucket is full; rank 0 copies them into it.

        The result has the tensors' names, shapes and offsets; an empty list after the last.
        """
        if self._gathering is None:
            self._gathering = self._gather()
            self._next = next(self._gathering)
        tensors: list[tuple[str, list[int], int]] = []
        used = 0
        while self._next is not None and (
            not tensors or used + self._next[1].nbytes <= bucket_bytes
        ):
            name, tensor = self._next
            tensors.append((name, list(tensor.shape), used))
            if self._rank == 0:
                bucket = self._bucket(max(bucket_bytes, tensor.nbytes))
                bucket[used : used + tensor.nbytes].copy_(tensor.view(-1).view(torch.uint8))
            used += tensor.nbytes
            self._next = next(self._gathering, None)
        if not tensors:
            self._gathering = None
        offer = None if self._outbox is None else self._outbox.offer()
        return {"tensors": tensors, "num_bytes": used, "offer": offer}

    def _gather(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every full tensor of an untied dense model on all ranks, in the same order."""
        own = self._positions[self._rank]
        for stage in range(own.pp_size):
            ranks = self._positions[stage * own.tp_size :][: own.tp_size]
            for shards in zip(*map(self._layout.megatron_shards, ranks), strict=True):
                names = dict.fromkeys(run.tensor for shard in shards for run in shard.runs)
                full = {
                    name: torch.empty(self._layout.hf_shapes[name], dtype=DTYPE) for name in names
                }
                if stage == own.pp_rank:
                    local = self._params[shards[own.tp_rank].name]
                    parts = [torch.empty_like(local) for _ in shards]
                    dist.all_gather(parts, local, group=self._tp_group)
                    for shard, part in zip(shards, parts, strict=True):
                        collect_spans(full, shard, part)
                for name, tensor in full.items():
                    sender = stage * own.tp_size + own.tp_rank
                    dist.broadcast(tensor, src=sender, group=self._pp_group)
                    yield name, tensor

    def _bucket(self, num_bytes: int) -> torch.Tensor:
        if self._outbox is None or self._outbox.offer()["num_bytes"] < num_bytes:
            if self._outbox is not None:
                self._outbox.close()
            self._outbox = SharedMemoryOutbox(num_bytes)
        return self._outbox.bucket(0)

    def reset_peak_memory(self) -> None:
        """Reset the peak of resident memory."""
        self._resident = reset_resident_peak()

    def extra_memory(self) -> int:
        """Return the peak of resident memory since the reset, above the memory then."""
        return max(0, resident_peak() - self._resident)


class GatheredLoad:
    """An extension of vLLM's worker that loads full tensors as the baselines do."""

    vllm_config: VllmConfig
    model_runner: GPUModelRunner

    def start_load(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())

    def load(self, bucket: dict[str, Any]) -> None:
        from vllm.config import set_current_vllm_config

        offer = bucket["offer"]
        data = open_shared_memory(offer)[0]
        weights = []
        for name, shape, offset in bucket["tensors"]:
            num_bytes = torch.Size(shape).numel() * DTYPE.itemsize
            # vLLM keeps tensors until a layer is complete, longer than the bucket exists
            tensor = data[offset : offset + num_bytes].clone()
            weights.append((name, tensor.view(DTYPE).view(shape)))
        model: Any = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            model.load_weights(weights)

    def finish_load(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)


class Engine:
    """A vLLM engine that only receives updates."""

    def __init__(self, model: str, tensor_parallel: int) -> None:
        os.environ |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        self._llm = LLM(
            model,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=4,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            tensor_parallel_size=tensor_parallel,
            distributed_executor_backend="mp" if tensor_parallel > 1 else "uni",
            weight_transfer_config=WeightTransferConfig(backend="megadapo"),
            worker_extension_cls=f"{__name__}.{GatheredLoad.__name__}",
        )

    def node(self) -> str:
        """Return the address of the node."""
        return node_address()

    def call(self, method: str, *args: Any) -> None:
        """Call a method of every vLLM worker."""
        self._llm.collective_rpc(method, args=args)


class Engines:
    """One engine with the interface that `Publisher` expects of an engine pool."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.policy_version = 0
        self.handles = {0: SimpleNamespace(spec=SimpleNamespace(gpus=()))}

    def publishing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def updatable(self) -> list[int]:
        return [0]

    def incarnation(self, index: int) -> int:
        return index

    def call(self, method: str, arguments: Mapping[int, tuple[object, ...]]) -> dict[int, Any]:
        if method == "node":
            return {0: self.actor.node.remote()}
        # as AsyncLLM calls it
        name = {"init_weight_transfer": "init_weight_transfer_engine"}.get(method, method)
        return {0: self.actor.call.remote(name, *arguments[0])}

    def gather(
        self,
        refs: Mapping[int, Any],
        *,
        doing: str,
        timeout_s: float,
        limit: str = "",
        forgive: bool = True,
    ) -> dict[int, Any]:
        import ray

        return {index: ray.get(ref, timeout=TIMEOUT_S) for index, ref in refs.items()}

    def finish_weight_update(
        self,
        indices: Sequence[int],
        policy_version: int,
        *,
        timeout_s: float,
        republish: Callable[[int], object],
        any_time: bool = False,
    ) -> None:
        method = "finish_weight_update"
        self.gather(self.call(method, {0: ()}), doing=method, timeout_s=timeout_s)


def start_engine(model: Path, *, tensor_parallel: int) -> Engines:
    """Start one vLLM engine with random weights."""
    import ray

    if not ray.is_initialized():
        # without "local" Ray would join any cluster that this machine is a node of
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
        )
    actor: Any = ray.remote(num_cpus=0)(Engine).remote(str(model), tensor_parallel)
    ray.get(actor.__ray_ready__.remote())
    return Engines(actor)
