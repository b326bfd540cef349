"""The whole configuration of a run: every section, and the checks that need more than one.

Each section is a frozen dataclass beside what it configures. Importing this module starts nothing
and imports no torch, Ray, vLLM or Megatron, so `--dry-run` answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.cluster.cluster import ClusterConfig
from megadapo.config.recipe import read_table
from megadapo.config.schema import build, to_dict, to_toml
from megadapo.data.config import DataConfig
from megadapo.errors import ConfigError
from megadapo.observe.oracles import OracleConfig
from megadapo.rewards.verifier import RewardConfig
from megadapo.rollout.config import EvaluationConfig, RolloutConfig, SamplingConfig
from megadapo.run.checkpoint import CheckpointConfig
from megadapo.trainer.config import ModelConfig, TrainerConfig
from megadapo.weights.config import WeightsConfig

__all__ = ["RunConfig", "RunSection", "from_dict", "load_config", "to_dict", "to_toml"]


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """Which run this is: where it is kept, how long it is, and where it starts."""

    folder: Path
    """Run folder for metrics, logs and checkpoints, relative to the current directory."""
    num_steps: int
    """Number of rollout steps of the whole run, those before a resume included."""
    seed: int = 0
    """Seed of everything random: prompt order, sampling and a random initialisation."""
    resume: str = "auto"
    """Checkpoint to start from: the newest complete one ("auto"), none ("never"), or a path."""

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ConfigError(f"run.num_steps = {self.num_steps} must be at least 1")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"run.seed = {self.seed} is not in [0, 2**31)")
        if not self.resume:
            raise ConfigError('run.resume must be "auto", "never" or the path of a checkpoint')


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides what a run does."""

    run: RunSection
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    oracles: OracleConfig = field(default_factory=OracleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        checks = (
            _check_mini_batches,
            _check_lengths,
            _check_evaluation,
            _check_reference,
            _check_transport,
        )
        problems = [problem for check in checks for problem in check(self)]
        if problems:
            raise ConfigError("\n".join(problems))


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe or a run's folder, apply `section.key=value` overrides, and check all of it.

    Raises ConfigError that names the file and lists every problem with its dotted key.
    """
    table = read_table(Path(path), overrides)
    try:
        return build(RunConfig, table)
    except ConfigError as error:
        source = f"{path} with its overrides" if overrides else str(path)
        raise ConfigError(_with_source(str(error), source)) from None


def from_dict(table: Mapping[str, Any]) -> RunConfig:
    """Make a RunConfig from the nested plain values that `to_dict` returns."""
    return build(RunConfig, table)


def _with_source(problems: str, source: str) -> str:
    lines = problems.splitlines()
    if len(lines) == 1:
        return f"{source}: {lines[0]}"
    return "\n".join([f"{source}: {len(lines)} problems", *(f"  {line}" for line in lines)])


def _check_mini_batches(config: RunConfig) -> Iterator[str]:
    size = config.algorithm.responses_per_mini_batch
    group = config.sampling.responses_per_prompt
    batch = config.sampling.prompts_per_step * group
    product = (
        f"sampling.prompts_per_step x sampling.responses_per_prompt = "
        f"{config.sampling.prompts_per_step} x {group} = {batch}"
    )
    if size % group:
        yield (
            f"algorithm.responses_per_mini_batch = {size} cuts a group in two: it must be a "
            f"multiple of sampling.responses_per_prompt = {group}"
        )
    elif batch % size:
        yield f"algorithm.responses_per_mini_batch = {size} does not divide {product}"
    if size < config.trainer.data_parallel:
        yield (
            f"algorithm.responses_per_mini_batch = {size} leaves some of the "
            f"trainer.data_parallel = {config.trainer.data_parallel} ranks without a response"
        )


def _check_lengths(config: RunConfig) -> Iterator[str]:
    buffer, longest = config.algorithm.overlong_buffer, config.rollout.max_response_tokens
    if buffer >= longest:
        yield (
            f"algorithm.overlong_buffer = {buffer} must be below rollout.max_response_tokens = "
            f"{longest}, or every response is punished; 0 turns the punishment off"
        )


def _check_evaluation(config: RunConfig) -> Iterator[str]:
    if config.evaluation.every > 0 and config.data.held_out is None:
        yield (
            f"evaluation.every = {config.evaluation.every} needs problems: set data.held_out, or "
            "evaluation.every = 0"
        )


def _check_reference(config: RunConfig) -> Iterator[str]:
    if config.algorithm.objective.kl_coef > 0:
        yield (
            f"algorithm.objective.kl_coef = {config.algorithm.objective.kl_coef} needs log-probs "
            "of a reference model, and training keeps none: set it to 0, as DAPO does"
        )


def _check_transport(config: RunConfig) -> Iterator[str]:
    transport = config.weights.transport
    placement, device = config.cluster.placement, config.cluster.device
    if transport in ("cuda_ipc", "nccl") and device == "cpu":
        yield f'weights.transport = "{transport}" needs GPUs, but cluster.device = "cpu"'
    if transport == "cuda_ipc" and placement == "separate":
        yield (
            'weights.transport = "cuda_ipc" is for engines on the trainer\'s GPUs, but '
            'cluster.placement = "separate"; use "nccl" or "auto"'
        )
    if transport == "nccl" and placement == "colocated":
        yield (
            'weights.transport = "nccl" cannot join two ranks on one GPU, but '
            'cluster.placement = "colocated"; use "cuda_ipc" or "auto"'
        )
