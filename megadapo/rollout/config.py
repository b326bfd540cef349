"""The `[rollout]`, `[sampling]` and `[evaluation]` sections.

Imports neither torch nor vLLM: a configuration is checked before anything heavy starts.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, WithJsonSchema

from megadapo.environments.config import EnvironmentConfig
from megadapo.section import Pair, Section, Timeout

NUMBER_OR_AUTO: dict[str, Any] = {
    "anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"const": "auto"}]
}
"""JSON schema of a count in a recipe; "auto" is replaced before the section is made."""


VLLM_DEFAULTS: dict[str, Any] = {"enable_prefix_caching": True, "max_num_batched_tokens": 8192}
"""Values of vLLM's arguments where rollout.vllm has none. With prefix caching, the responses of a
group share the key-value cache of their prompt."""
OWN_ARGUMENTS = {
    "model": "set model.path",
    "dtype": "set model.dtype",
    "quantization": "set rollout.quantization",
    "tensor_parallel_size": "set rollout.tensor_parallel",
    "pipeline_parallel_size": "set rollout.pipeline_parallel",
    "enable_expert_parallel": "set rollout.expert_parallel",
    "data_parallel_size": "set rollout.num_engines",
    "max_model_len": "set data.max_prompt_tokens and rollout.max_response_tokens",
    "max_num_seqs": "set rollout.max_num_seqs",
    "gpu_memory_utilization": "set rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "set rollout.kv_cache_gib, or rollout.gpu_memory_utilization",
    "enable_return_routed_experts": "set trainer.router_replay",
    "enable_sleep_mode": "set cluster.placement",
    "weight_transfer_config": "the [weights] section has its keys",
    "load_format": "megadapo chooses it: the engines of a run get their weights from the trainer",
    "worker_extension_cls": "megadapo's own extension receives the weights",
    "distributed_executor_backend": "an engine is one Ray actor with processes of its own",
    "scheduler_cls": "megadapo needs its own scheduler",
    "scheduling_policy": "megadapo serves prompts in their order, with vLLM's priorities",
    "logprobs_mode": "the trainer compares its log-probs with the engine's",
    "seed": "each response has a seed of its own, from run.seed",
    "profiler_config": "megadapo profile sets it",
    "disable_log_stats": "megadapo counts an engine's steps itself",
}
"""Arguments of vLLM's engine that rollout.vllm cannot set, with the reason."""


def _read_vllm(*place: str) -> list[ast.stmt]:
    """Return the statements of a file of vLLM; none if vLLM is not installed.

    They are read from its source, because importing vLLM takes seconds.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return []
    return ast.parse(Path(spec.origin).parent.joinpath(*place).read_text(encoding="utf-8")).body


@cache
def vllm_argument_names() -> tuple[str, ...]:
    """Return the names of vLLM's engine arguments; none if vLLM is not installed."""
    return tuple(
        field.target.id
        for node in _read_vllm("engine", "arg_utils.py")
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


@cache
def tool_parser_names() -> tuple[str, ...]:
    """Return the names of vLLM's parsers of tool calls; none if vLLM is not installed."""
    return tuple(
        str(key.value)
        for node in _read_vllm("tool_parsers", "__init__.py")
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for key in node.value.keys
        if isinstance(key, ast.Constant)
    )


class RolloutConfig(Section, title="rollout"):
    """The engines: their number, their size, and the sampling of responses."""

    num_engines: Annotated[PositiveInt, WithJsonSchema(NUMBER_OR_AUTO)] = 1
    """Number of vLLM engines. "auto": as many as fit on the trainer's GPUs, or two without GPUs."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share each weight matrix of an engine."""
    pipeline_parallel: PositiveInt = 1
    """Stages that share the layers of an engine; it has tensor x pipeline ranks, on one node."""
    expert_parallel: bool = False
    """Spread whole experts over an engine's tensor-parallel ranks instead of splitting each."""
    temperature: Annotated[float, Field(ge=0.01, le=100.0)] = 1.0
    """Sampling temperature of training rollouts; log-probs are taken at this temperature."""
    max_response_tokens: PositiveInt = 20480
    """Longest response, in tokens; a longer one is cut off with finish reason "length"."""
    max_num_seqs: PositiveInt = 256
    """Responses that an engine generates at the same time."""
    kv_cache_gib: PositiveFloat = 1.0
    """Main memory in GiB for the key-value cache of one engine rank; only without a GPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.6
    """Share of a GPU's memory for an engine's weights and key-value cache; only with CUDA."""
    num_threads: PositiveInt = 1
    """CPU threads of one engine rank; only without a GPU."""
    quantization: Literal["none", "fp8"] = "none"
    """Number format of an engine's linear layers; only with CUDA. none: model.dtype. fp8: 8-bit
    floats with one scale per 128 x 128 weights, quantized again at every update."""
    batch_invariant: bool = False
    """vLLM's batch-invariant kernels on CUDA: the same bits for every batch, at a cost in speed."""
    engine_progress_timeout_s: Timeout = 180.0
    """Seconds without a token after which an engine with work counts as dead."""
    vllm: dict[str, Any] = {}
    """Further arguments of vLLM's engine, under its names, such as enforce_eager. Without them,
    enable_prefix_caching is true and max_num_batched_tokens 8192. An engine without a GPU runs
    without graphs and splits no prompt in any case; its block_size is 32."""
    environments: tuple[EnvironmentConfig, ...] = ()
    """The environments that answer responses turn by turn."""

    def conflicts(self) -> Iterator[str]:
        if self.expert_parallel and self.tensor_parallel == 1:
            yield (
                "rollout.expert_parallel spreads experts over the tensor-parallel ranks: set "
                "rollout.tensor_parallel above 1, or turn it off"
            )
        labels = [environment.label for environment in self.environments]
        for label in sorted({label for label in labels if labels.count(label) > 1}):
            yield f'rollout.environments: two have the name "{label}": give one another `name`'
        known = tool_parser_names()
        for environment in self.environments:
            parser = environment.tool_parser
            if parser is not None and known and parser not in known:
                near = difflib.get_close_matches(parser, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                yield (
                    f'rollout.environments.tool_parser = "{parser}": vLLM has no such parser; '
                    f"{hint}"
                )
        yield from self._vllm_conflicts()

    @property
    def ranks_per_engine(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def vllm_arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's engine that have no key of their own."""
        return VLLM_DEFAULTS | self.vllm

    def _vllm_conflicts(self) -> Iterator[str]:
        if not self.vllm:
            return
        known = vllm_argument_names()
        for name, value in self.vllm.items():
            default = VLLM_DEFAULTS.get(name)
            if name in OWN_ARGUMENTS:
                yield f"rollout.vllm.{name} cannot be set: {OWN_ARGUMENTS[name]}"
            elif known and name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                yield f"rollout.vllm.{name}: vLLM's engine has no such argument{hint}"
            elif default is not None and type(value) is not type(default):
                yield f"rollout.vllm.{name} = {value!r} must be of type {type(default).__name__}"


class BranchingConfig(Section, title="sampling.branching"):
    """ARPO (arXiv 2507.19849): responses that branch off others after a tool call."""

    initial_rollouts: PositiveInt | None = None
    """Responses of a group that start at the prompt (N). The others branch off them, or start at
    the prompt if too few branch. None: no response branches."""
    decision: Literal["threshold", "draw"] = "threshold"
    """threshold: a response branches wherever the entropy has risen since its start, as in the
    paper. draw: it branches with a probability of 0.5 plus 0.2 times the rise of the entropies'
    sum, as in the authors' code."""
    beam_size: Annotated[int, Field(ge=2)] = 2
    """Responses that continue from a branching point, its own response included."""
    num_tokens: PositiveInt = 20
    """Largest number of tokens at a response's start, and after a call, whose entropy counts."""

    @property
    def is_on(self) -> bool:
        return self.initial_rollouts is not None

    def conflicts(self) -> Iterator[str]:
        unused = self.changed()
        if not self.is_on and unused:
            keys = ", ".join(f"sampling.branching.{name}" for name in unused)
            yield f"{keys}: used only with sampling.branching.initial_rollouts; leave it out"


class SamplingConfig(Section, title="sampling"):
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): the groups of a step's batch."""

    mode: Literal["sync", "rounds", "partial", "one_step_off", "async"] = "sync"
    """sync: the first mixed groups in prompt order; every earlier group is waited for. rounds:
    fixed rounds that wait for their longest response. partial: unfinished responses continue in the
    next step, with its weights. one_step_off: as sync, while the trainer updates. async: engines
    always generate; a publication of weights stops responses, which continue at the same
    token, and a step begins as soon as enough groups are ready."""
    prompts_per_step: PositiveInt = 512
    """Groups in one step's batch."""
    responses_per_prompt: Annotated[int, Field(ge=2)] = 16
    """Responses of a group (G)."""
    prompts_per_round: PositiveInt | None = None
    """Groups of one round if mode is "rounds"; none: prompts_per_step."""
    max_asked_per_prompt: Annotated[float, Field(ge=1.0)] = 10.0
    """Largest number of groups generated for a step, as a multiple of prompts_per_step."""
    on_shortfall: Literal["train", "stop"] = "train"
    """At that limit: train on the groups found, if there are any, or stop with a message."""
    selection: Literal["signal", "all"] = "signal"
    """Keep mixed groups only, or all groups as plain GRPO does."""
    accuracy_range: Pair[Annotated[float, Field(ge=0.0, le=1.0)]] = (0.0, 1.0)
    """Shares of correct responses between which a group is mixed; both bounds are excluded."""
    max_staleness: NonNegativeInt = 0
    """Largest age of a trained token, in weight publications: 0 with "sync" and "rounds", 1 with
    "one_step_off", at least 1 with "partial", at least 2 with "async". Groups that would become too
    old are waited for."""
    branching: BranchingConfig = BranchingConfig()
    """Responses that branch off others of their group."""

    def conflicts(self) -> Iterator[str]:
        yield from self._round_conflicts()
        yield from self._staleness_conflicts()
        yield from self._branching_conflicts()
        low, high = self.accuracy_range
        if low >= high:
            yield f"sampling.accuracy_range = [{low}, {high}]: the first must be below the second"

    def _round_conflicts(self) -> Iterator[str]:
        if self.prompts_per_round is not None and self.mode != "rounds":
            yield (
                f"sampling.prompts_per_round = {self.prompts_per_round} has no effect with "
                f'sampling.mode = "{self.mode}": set sampling.mode = "rounds", or leave it out'
            )
        if self.round_size > self.max_asked_per_step:
            yield (
                f"sampling.prompts_per_round = {self.round_size} is more than "
                f"sampling.max_asked_per_prompt x sampling.prompts_per_step = "
                f"{self.max_asked_per_step}: a step would end before its first round"
            )

    def _staleness_conflicts(self) -> Iterator[str]:
        if self.mode == "partial" and self.max_staleness == 0:
            yield (
                'sampling.mode = "partial" trains on tokens of earlier weights: set '
                "sampling.max_staleness to at least 1"
            )
        if self.mode == "one_step_off" and self.max_staleness != 1:
            yield (
                f"sampling.max_staleness = {self.max_staleness}, but every token of "
                'sampling.mode = "one_step_off" is one publication old: set it to 1'
            )
        if self.mode == "async" and self.max_staleness < 2:
            yield (
                f'sampling.max_staleness = {self.max_staleness} with sampling.mode = "async": a '
                "group that is requested while the trainer updates would be due in the next batch; "
                'set it to at least 2, or sampling.mode = "one_step_off" for 1'
            )
        if self.mode in ("sync", "rounds") and self.max_staleness > 0:
            yield (
                f"sampling.max_staleness = {self.max_staleness} has no effect with "
                f'sampling.mode = "{self.mode}", which discards surplus groups: set it to 0, or '
                'sampling.mode = "partial"'
            )

    def _branching_conflicts(self) -> Iterator[str]:
        initial = self.branching.initial_rollouts
        if initial is not None and initial >= self.responses_per_prompt:
            yield (
                f"sampling.branching.initial_rollouts = {initial} must be below "
                f"sampling.responses_per_prompt = {self.responses_per_prompt}, or no response is "
                "left to branch"
            )
        if initial is not None and self.carries:
            yield (
                "sampling.branching needs whole responses, but with sampling.mode = "
                f'"{self.mode}" they are stopped in the middle: choose another mode'
            )

    @property
    def responses_at_once(self) -> int:
        """Number of responses of a group that are generated at the same time."""
        return self.branching.initial_rollouts or self.responses_per_prompt

    @property
    def carries(self) -> bool:
        """Whether groups that are not in a batch continue, so that speed decides what is in it."""
        return self.mode in ("partial", "async")

    @property
    def overlaps(self) -> bool:
        """Whether groups are generated while the trainer updates."""
        return self.mode in ("one_step_off", "async")

    @property
    def round_size(self) -> int:
        """Number of groups of one round."""
        return self.prompts_per_round or self.prompts_per_step

    @property
    def max_asked_per_step(self) -> int:
        """Largest number of groups generated for one step."""
        return int(self.max_asked_per_prompt * self.prompts_per_step)


class EvaluationConfig(Section, title="evaluation"):
    """Accuracy on held-out problems: avg@k, with its own sampling distribution."""

    every: NonNegativeInt = 0
    """Number of steps between evaluations; 0: never."""
    placement: Literal["alone", "interleaved", "engine"] = "alone"
    """alone: training waits. interleaved: evaluate in slots that the next step's rollouts leave
    idle, and wait for the rest when the trainer's new weights are ready. engine: evaluate on one
    more engine, which keeps the weights until it is done."""
    samples_per_problem: PositiveInt = 32
    """Responses per problem (the k of avg@k)."""
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 1.0
    """Sampling temperature; 0: the most probable token."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 0.7
    """Nucleus: probability mass of the most probable tokens that are sampled from."""

    @property
    def num_engines(self) -> int:
        """Number of engines reserved for the held-out problems."""
        return int(self.placement == "engine" and self.every > 0)
