"""What vLLM's CPU worker lacks for pipeline parallelism, added by vLLM's worker extension.

A later stage copies what it receives into buffers that vLLM allocates while it measures memory or
compiles; an eager engine on the CPU does neither, and would stop at its first request. Tried on
vLLM 0.32; it runs in vLLM's workers, so it is apart from weights/sync/vllm_internals.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from megadapo.weights.sync.vllm_worker import HeldVersion

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces import SupportsPP
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

EXTENSION = f"{__name__}.StageBuffers"


class StageBuffers(HeldVersion):
    """Mixed into vLLM's worker; `allocate_stage_buffers` is called on every rank by its name."""

    model_runner: CPUModelRunner

    def allocate_stage_buffers(self) -> None:
        """Make room for the hidden states of the stage before; the first stage needs none."""
        import torch
        from vllm.distributed import get_pp_group

        runner = self.model_runner
        if not get_pp_group().is_first_rank:
            model = cast("SupportsPP", runner.model)
            dtype = runner.model_config.dtype
            assert isinstance(dtype, torch.dtype), "vLLM has resolved it by now"
            runner.intermediate_tensors = model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=dtype,
                device=runner.device,
            )
