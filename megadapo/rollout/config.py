"""The `[rollout]`, `[sampling]` and `[evaluation]` sections.

Imports neither torch nor vLLM: a configuration is checked before anything heavy starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megadapo.section import Section, Timeout


class RolloutConfig(Section, title="rollout"):
    """The engines: how many, how large, and how responses are drawn from the policy."""

    num_engines: PositiveInt = 1
    """Number of vLLM engines; groups are dealt out to them in turn."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share each weight matrix of an engine."""
    pipeline_parallel: PositiveInt = 1
    """Stages that share the layers of an engine; it has tensor x pipeline ranks, on one node."""
    expert_parallel: bool = False
    """Spread whole experts over an engine's tensor-parallel ranks, instead of cutting each one."""
    temperature: Annotated[float, Field(ge=0.01, le=100.0)] = 1.0
    """Sampling temperature of training rollouts; log-probs are taken at this temperature."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus of training rollouts; only 1: the trainer scores tokens with the whole softmax."""
    max_response_tokens: PositiveInt = 20480
    """Longest response, in tokens; a longer one is cut and has finish reason "length"."""
    max_num_seqs: PositiveInt = 256
    """Responses an engine generates at the same time."""
    max_num_batched_tokens: PositiveInt = 8192
    """Tokens of one engine step; where prompts are not cut, at least the longest sequence."""
    prefix_caching: bool = True
    """Let the responses of a group share the key-value cache of their prompt."""
    kv_cache_gib: PositiveFloat = 1.0
    """GiB of main memory for the key-value cache of one engine rank; only without a GPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.6
    """Share of a GPU's memory for an engine's weights and key-value cache; only with CUDA."""
    num_threads: PositiveInt = 1
    """CPU threads of one engine rank; only without a GPU."""
    enforce_eager: bool = False
    """Run without CUDA graphs; an engine without a GPU always does."""
    batch_invariant: bool = False
    """vLLM's batch-invariant kernels on CUDA: the same bits for every batch, at a cost in speed."""
    start_timeout_s: Timeout = 900.0
    """Seconds an engine may take to load and answer."""
    round_timeout_s: Timeout = 7200.0
    """Seconds one round of generation may take before the engines count as stuck."""

    def conflicts(self) -> Iterator[str]:
        if self.top_p < 1.0:
            yield (
                f"rollout.top_p = {self.top_p} cuts the distribution that responses are drawn "
                "from, but the trainer scores them with the whole softmax: set rollout.top_p = 1; "
                "evaluation.top_p is free"
            )
        if self.expert_parallel and self.tensor_parallel == 1:
            yield (
                "rollout.expert_parallel spreads experts over the tensor-parallel ranks: set "
                "rollout.tensor_parallel above 1, or turn it off"
            )

    @property
    def ranks_per_engine(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel


class SamplingConfig(Section, title="sampling"):
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): how a step's batch is filled."""

    prompts_per_step: PositiveInt = 512
    """Groups in one step's batch, each neither all right nor all wrong."""
    responses_per_prompt: Annotated[int, Field(ge=2)] = 16
    """Responses of a group (G)."""
    oversampling: Annotated[float, Field(ge=1.0)] = 1.2
    """Groups asked for per group expected to be needed; surplus goes to the reserve."""
    max_asked_per_prompt: Annotated[float, Field(ge=1.0)] = 10.0
    """Bound on the groups asked for in a step, as a multiple of prompts_per_step."""
    on_shortfall: Literal["train", "stop"] = "train"
    """At that bound: train on the groups found, if there are any, or stop with a message."""
    reserve_limit: NonNegativeInt | None = None
    """Surplus groups kept for the next step; none: half of prompts_per_step."""

    def conflicts(self) -> Iterator[str]:
        if self.reserve_limit is not None and self.reserve_limit >= self.prompts_per_step:
            yield (
                f"sampling.reserve_limit = {self.reserve_limit} must be below "
                f"sampling.prompts_per_step = {self.prompts_per_step}: a step made of reserved "
                "groups alone would train on nothing the current policy wrote"
            )

    @property
    def reserve_size(self) -> int:
        """Largest number of groups in the reserve."""
        return self.prompts_per_step // 2 if self.reserve_limit is None else self.reserve_limit

    @property
    def max_asked_per_step(self) -> int:
        """Largest number of groups asked for in one step."""
        return int(self.max_asked_per_prompt * self.prompts_per_step)


class EvaluationConfig(Section, title="evaluation"):
    """Accuracy on held-out problems: avg@k, with its own sampling distribution."""

    every: NonNegativeInt = 0
    """Evaluate after every so many steps; 0 means never."""
    samples_per_problem: PositiveInt = 32
    """Responses per problem (the k of avg@k)."""
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 1.0
    """Sampling temperature; 0 takes the most probable token."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 0.7
    """Nucleus: responses come from the most probable tokens that hold this mass."""
    max_problems: PositiveInt | None = None
    """Use only so many problems, the first ones; none means all."""
