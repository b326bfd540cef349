"""Models of a large trainer's ranks on the meta device, without memory or other ranks."""

from collections.abc import Sequence
from typing import Any

from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.types import Rendezvous


def parameters_of(
    rendezvous: Rendezvous, trainer: TrainerConfig, hf_config: dict[str, Any], ranks: Sequence[int]
) -> list[tuple[int, int]]:
    """Return counts of all and of experts' parameters by rank; runs inside a trainer process."""
    return [_parameters(trainer, hf_config, rank) for rank in ranks]


def _parameters(trainer: TrainerConfig, hf_config: dict[str, Any], rank: int) -> tuple[int, int]:
    import torch
    from megatron.core import parallel_state as mpu
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megadapo.models.description import describe_model
    from megadapo.trainer.model.model import build_chunks, transformer_config
    from megadapo.trainer.model.parallel import leave_groups, seed_everything

    torch.distributed.init_process_group(
        "fake", rank=rank, world_size=trainer.num_ranks, store=FakeStore()
    )
    try:
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=trainer.tensor_parallel,
            pipeline_model_parallel_size=trainer.pipeline_parallel,
            context_parallel_size=trainer.context_parallel,
            expert_model_parallel_size=trainer.expert_parallel,
            expert_tensor_parallel_size=trainer.expert_tensor_parallel,
            create_gloo_process_groups=False,
        )
        seed_everything(0)
        model = describe_model(hf_config)
        config = transformer_config(model, trainer, dtype=torch.bfloat16)
        with torch.device("meta"):
            chunks = build_chunks(config, model, trainer)
    finally:
        leave_groups()
    sizes = [
        (name, parameter.numel())
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
    ]
    of_experts = sum(size for name, size in sizes if ".experts." in name)
    return sum(size for _, size in sizes), of_experts
