"""The `[rollout]`, `[sampling]` and `[evaluation]` sections.

Imports neither torch nor vLLM: a configuration is checked before anything heavy starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megadapo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The engines: how many, how large, and how responses are drawn from the policy."""

    num_engines: int = 1
    """Number of vLLM engines; groups are dealt out to them in turn."""
    tensor_parallel: int = 1
    """Ranks that share each weight matrix of an engine."""
    pipeline_parallel: int = 1
    """Stages that share the layers of an engine; it has tensor x pipeline ranks, on one node."""
    expert_parallel: bool = False
    """Spread whole experts over an engine's tensor-parallel ranks, instead of cutting each one."""
    temperature: float = 1.0
    """Sampling temperature of training rollouts; log-probs are taken at this temperature."""
    top_p: float = 1.0
    """Nucleus of training rollouts; DAPO samples from the whole distribution."""
    max_response_tokens: int = 20480
    """Longest response, in tokens; a longer one is cut and has finish reason "length"."""
    max_num_seqs: int = 256
    """Responses an engine generates at the same time."""
    max_num_batched_tokens: int = 8192
    """Tokens of one engine step; where prompts are not cut, at least the longest sequence."""
    prefix_caching: bool = True
    """Let the responses of a group share the key-value cache of their prompt."""
    kv_cache_gib: float = 1.0
    """GiB of main memory for the key-value cache of one engine rank; only without a GPU."""
    gpu_memory_utilization: float = 0.6
    """Share of a GPU's memory for an engine's weights and key-value cache; only with CUDA."""
    num_threads: int = 1
    """CPU threads of one engine rank; only without a GPU."""
    enforce_eager: bool = False
    """Run without CUDA graphs; an engine without a GPU always does."""
    batch_invariant: bool = False
    """vLLM's batch-invariant kernels on CUDA: the same bits for every batch, at a cost in speed."""
    start_timeout_s: float = 900.0
    """Seconds an engine may take to load and answer."""
    round_timeout_s: float = 7200.0
    """Seconds one round of generation may take before the engines count as stuck."""

    def __post_init__(self) -> None:
        _at_least("rollout", self, 1, "num_engines", "tensor_parallel", "pipeline_parallel")
        _at_least("rollout", self, 1, "max_response_tokens", "max_num_seqs")
        _at_least("rollout", self, 1, "max_num_batched_tokens", "num_threads")
        if self.kv_cache_gib <= 0:
            raise ConfigError(f"rollout.kv_cache_gib = {self.kv_cache_gib} must be positive")
        _check_distribution("rollout", self.temperature, self.top_p, coldest=0.01)
        if not 0.0 < self.gpu_memory_utilization < 1.0:
            raise ConfigError(
                f"rollout.gpu_memory_utilization = {self.gpu_memory_utilization} is not in (0, 1)"
            )
        if self.start_timeout_s <= 0 or self.round_timeout_s <= 0:
            raise ConfigError("rollout.start_timeout_s and rollout.round_timeout_s must be > 0")
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ConfigError(
                "rollout.expert_parallel spreads experts over the tensor-parallel ranks: set "
                "rollout.tensor_parallel above 1, or turn it off"
            )

    @property
    def ranks_per_engine(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): how a step's batch is filled."""

    prompts_per_step: int = 512
    """Groups in one step's batch, each neither all right nor all wrong."""
    responses_per_prompt: int = 16
    """Responses of a group (G)."""
    oversampling: float = 1.2
    """Groups asked for per group expected to be needed; surplus goes to the reserve."""
    max_asked_per_prompt: float = 10.0
    """Bound on the groups asked for in a step, as a multiple of prompts_per_step."""
    on_shortfall: Literal["train", "stop"] = "train"
    """At that bound: train on the groups found, if there are any, or stop with a message."""
    reserve_limit: int | None = None
    """Surplus groups kept for the next step; none: half of prompts_per_step."""

    def __post_init__(self) -> None:
        _at_least("sampling", self, 1, "prompts_per_step")
        _at_least("sampling", self, 2, "responses_per_prompt")
        _at_least("sampling", self, 1.0, "oversampling", "max_asked_per_prompt")
        if self.on_shortfall not in ("train", "stop"):
            raise ConfigError(f'sampling.on_shortfall = {self.on_shortfall!r}: "train" or "stop"')
        if self.reserve_limit is not None and not 0 <= self.reserve_limit < self.prompts_per_step:
            raise ConfigError(
                f"sampling.reserve_limit = {self.reserve_limit} must be at least 0 and below "
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


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Accuracy on held-out problems: avg@k, with its own sampling distribution."""

    every: int = 0
    """Evaluate after every so many steps; 0 means never."""
    samples_per_problem: int = 32
    """Responses per problem (the k of avg@k)."""
    temperature: float = 1.0
    """Sampling temperature; 0 takes the most probable token."""
    top_p: float = 0.7
    """Nucleus: responses come from the most probable tokens that hold this mass."""
    max_problems: int | None = None
    """Use only so many problems, the first ones; none means all."""

    def __post_init__(self) -> None:
        _at_least("evaluation", self, 0, "every")
        _at_least("evaluation", self, 1, "samples_per_problem")
        _check_distribution("evaluation", self.temperature, self.top_p, coldest=0.0)
        if self.max_problems is not None and self.max_problems < 1:
            raise ConfigError("evaluation.max_problems must be at least 1")


def _at_least(section: str, config: object, bound: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value < bound:
            raise ConfigError(f"{section}.{name} = {value} must be at least {bound}")


def _check_distribution(section: str, temperature: float, top_p: float, coldest: float) -> None:
    if not coldest <= temperature <= 100.0:
        raise ConfigError(f"{section}.temperature = {temperature} is not in [{coldest:g}, 100]")
    if not 0.0 < top_p <= 1.0:
        raise ConfigError(f"{section}.top_p = {top_p} is not in (0, 1]")
