"""The `[rollout]`, `[sampling]` and `[evaluation]` sections.

Imports neither torch nor vLLM: a configuration is checked before anything heavy starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, WithJsonSchema

from megadapo.rollout.branching_config import BranchingConfig
from megadapo.rollout.tools import ToolsConfig
from megadapo.section import Section, Timeout

NUMBER_OR_AUTO: dict[str, Any] = {
    "anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"const": "auto"}]
}
"""A count in a recipe; what "auto" means is known before the section is made."""


JournalSync = Literal["never", "step", "group"]


class RolloutConfig(Section, title="rollout"):
    """The engines: how many, how large, and how responses are drawn from the policy."""

    num_engines: Annotated[PositiveInt, WithJsonSchema(NUMBER_OR_AUTO)] = 1
    """Number of vLLM engines; groups are dealt out to them in turn. "auto" is what the trainer's
    GPUs have room for, and two without GPUs."""
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
    quantization: Literal["none", "fp8"] = "none"
    """What an engine's linear layers compute in: none: model.dtype; fp8: 8-bit floats with a scale
    for each 128 x 128 weights, made anew from every update; only with CUDA."""
    sleep_level: Literal[1, 2] = 2
    """What an engine on the trainer's GPUs does with its weights while the trainer works: keep them
    in main memory (1), so that updates may send only what changed (weights.mode), or drop them
    (2)."""
    sleep_mode_offload_cudagraph: bool = False
    """Whether such an engine puts its CUDA graphs into main memory as well."""
    enable_nccl_comm_suspend: bool = False
    """Whether it gives up the buffers of NCCL between its ranks as well; vLLM calls this
    experimental."""
    batch_invariant: bool = False
    """vLLM's batch-invariant kernels on CUDA: the same bits for every batch, at a cost in speed."""
    start_timeout_s: Timeout = 900.0
    """Seconds an engine may take to load and answer."""
    engine_progress_timeout_s: Timeout = 180.0
    """Seconds an engine may give no token while it has work before it counts as lost."""
    max_engine_restarts: NonNegativeInt = 3
    """Engines that are lost and started again in a run; after that it goes on with the others."""
    tools: ToolsConfig = ToolsConfig()
    """What responses may call while they are written."""

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

        if self.sleep_mode_offload_cudagraph and self.enforce_eager:
            yield (
                "rollout.sleep_mode_offload_cudagraph: with rollout.enforce_eager there are no "
                "CUDA graphs; leave one of them out"
            )
        if self.enable_nccl_comm_suspend and self.ranks_per_engine == 1:
            yield (
                "rollout.enable_nccl_comm_suspend: an engine of one rank has no use for NCCL; "
                "leave it out"
            )

    @property
    def ranks_per_engine(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel


class SamplingConfig(Section, title="sampling"):
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): how a step's batch is filled."""

    mode: Literal["sync", "rounds", "partial", "one_step_off"] = "sync"
    """sync: the first groups with a signal in asking order, every earlier one is waited for;
    rounds: fixed rounds that wait for their longest answer; partial: unfinished answers go on in
    the next step, with its weights; one_step_off: as sync, while the trainer updates."""
    prompts_per_step: PositiveInt = 512
    """Groups in one step's batch, each neither all right nor all wrong."""
    responses_per_prompt: Annotated[int, Field(ge=2)] = 16
    """Responses of a group (G)."""
    prompts_per_round: PositiveInt | None = None
    """Groups asked for at a time where mode is "rounds"; none: prompts_per_step."""
    max_asked_per_prompt: Annotated[float, Field(ge=1.0)] = 10.0
    """Bound on the groups asked for in a step, as a multiple of prompts_per_step."""
    on_shortfall: Literal["train", "stop"] = "train"
    """At that bound: train on the groups found, if there are any, or stop with a message."""
    selection: Literal["signal", "all"] = "signal"
    """Keep groups with a signal, or all of them, as plain GRPO does."""
    min_accuracy: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """A group has a signal where the share of right responses is above this."""
    max_accuracy: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """A group has a signal where the share of right responses is below this."""
    max_staleness: NonNegativeInt = 0
    """Weight publications a token may be older than the weights it is trained on; 0: surplus
    groups are dropped, and their prompts asked again with the next weights."""
    reserve_limit: NonNegativeInt | None = None
    """Surplus groups kept for the next step; none: half of prompts_per_step."""
    rest_after: PositiveInt | None = None
    """A prompt whose latest groups were all right so many times in a row is left out; none: no
    prompt is."""
    rest_epochs: PositiveInt = 2
    """Epochs for which such a prompt is left out."""
    longest_first: bool = False
    """Let engines begin with the prompts whose latest answers were longest."""
    branching: BranchingConfig = BranchingConfig()
    """Responses that branch off others of their group."""
    journal: bool = True
    """Write each scored group to RUN/journal until a checkpoint holds its step, so that a run that
    was killed does not ask for it again."""
    journal_fsync: JournalSync = "step"
    """When that is put on the disk itself, where it outlives the machine as well: after each group,
    after each step's last one, or whenever the system does it."""

    def conflicts(self) -> Iterator[str]:
        yield from self._round_conflicts()
        yield from self._staleness_conflicts()
        yield from self._branching_conflicts()
        if self.min_accuracy >= self.max_accuracy:
            yield (
                f"sampling.min_accuracy = {self.min_accuracy} must be below "
                f"sampling.max_accuracy = {self.max_accuracy}"
            )

    def _round_conflicts(self) -> Iterator[str]:
        if self.prompts_per_round is not None and self.mode != "rounds":
            yield (
                f"sampling.prompts_per_round = {self.prompts_per_round} means nothing with "
                f'sampling.mode = "{self.mode}": set sampling.mode = "rounds", or leave it out'
            )
        if self.round_size > self.max_asked_per_step:
            yield (
                f"sampling.prompts_per_round = {self.round_size} is more than "
                f"sampling.max_asked_per_prompt x sampling.prompts_per_step = "
                f"{self.max_asked_per_step}: a step would end before its first round"
            )

    def _staleness_conflicts(self) -> Iterator[str]:
        if self.mode in ("partial", "one_step_off") and self.max_staleness == 0:
            yield (
                f'sampling.mode = "{self.mode}" trains on tokens of earlier weights: set '
                "sampling.max_staleness to at least 1"
            )
        if self.mode == "rounds" and self.max_staleness > 0:
            yield (
                f"sampling.max_staleness = {self.max_staleness} means nothing with "
                'sampling.mode = "rounds", which throws surplus groups away: set it to 0'
            )
        if self.reserve_limit is not None and (self.max_staleness == 0 or self.mode != "sync"):
            yield (
                f"sampling.reserve_limit = {self.reserve_limit} is for surplus groups of "
                'sampling.mode = "sync" with sampling.max_staleness above 0: leave it out'
            )
        if self.reserve_limit is not None and self.reserve_limit >= self.prompts_per_step:
            yield (
                f"sampling.reserve_limit = {self.reserve_limit} must be below "
                f"sampling.prompts_per_step = {self.prompts_per_step}: a step made of reserved "
                "groups alone would train on nothing the current policy wrote"
            )

    def _branching_conflicts(self) -> Iterator[str]:
        initial = self.branching.initial_rollouts
        if initial is not None and initial >= self.responses_per_prompt:
            yield (
                f"sampling.branching.initial_rollouts = {initial} must be below "
                f"sampling.responses_per_prompt = {self.responses_per_prompt}, or no response is "
                "left to branch"
            )
        if initial is not None and self.mode == "partial":
            yield (
                "sampling.branching looks at whole responses, but with sampling.mode = "
                '"partial" they are stopped in the middle: choose another mode'
            )

    @property
    def responses_at_once(self) -> int:
        """Responses of a group that are generated at the same time."""
        return self.branching.initial_rollouts or self.responses_per_prompt

    @property
    def sampler_staleness(self) -> int:
        """Weight publications a token may be behind the engines' weights when its step ends."""
        return self.max_staleness - (self.mode == "one_step_off")

    @property
    def forgets_surplus(self) -> bool:
        """Whether groups after the last one of a batch are asked for again in the next step."""
        return self.sampler_staleness == 0 and self.mode != "rounds"

    @property
    def reserve_size(self) -> int:
        """Largest number of groups in the reserve."""
        if self.sampler_staleness == 0:
            return 0
        if self.mode == "partial":
            # nothing that was begun may be lost; what is open is bounded instead
            return self.max_staleness * self.prompts_per_step
        return self.prompts_per_step // 2 if self.reserve_limit is None else self.reserve_limit

    @property
    def follows_speed(self) -> bool:
        """Whether it depends on the engines' speed which groups of a step are trained on, and
        when."""
        return self.sampler_staleness > 0

    @property
    def round_size(self) -> int:
        """Groups of one round."""
        return self.prompts_per_round or self.prompts_per_step

    @property
    def max_asked_per_step(self) -> int:
        """Largest number of groups asked for in one step."""
        return int(self.max_asked_per_prompt * self.prompts_per_step)


class EvaluationConfig(Section, title="evaluation"):
    """Accuracy on held-out problems: avg@k, with its own sampling distribution."""

    every: NonNegativeInt = 0
    """Evaluate after every so many steps; 0 means never."""
    placement: Literal["alone", "interleaved", "engine"] = "alone"
    """alone: training waits; interleaved: asked with the next step's rollouts, in the slots they
    leave idle, and only what is left when the trainer's new weights are ready is waited for;
    engine: asked of one more engine, which keeps the weights until it has answered."""
    samples_per_problem: PositiveInt = 32
    """Responses per problem (the k of avg@k)."""
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 1.0
    """Sampling temperature; 0 takes the most probable token."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 0.7
    """Nucleus: responses come from the most probable tokens that hold this mass."""
    max_problems: PositiveInt | None = None
    """Use only so many problems, the first ones; none means all."""

    @property
    def num_engines(self) -> int:
        """Engines that have the held-out problems to themselves."""
        return int(self.placement == "engine" and self.every > 0)
