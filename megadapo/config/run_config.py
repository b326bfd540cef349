"""The configuration of a run: every section, from a file or from nested plain values.

Each section is defined beside what it configures. `[run]`, `[supervised]` and `[checkpoint]` are
here, because `megadapo/run` imports the configuration. Importing this module imports no torch, Ray,
vLLM or Megatron, so `--dry-run` is fast.

The checks at the end find combinations of sections that cannot work. A check's parameters are the
sections that it reads, by name. If one of these sections has an error of its own, the check is
skipped and the others still run, so a user sees as many problems as possible.
"""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PositiveInt, ValidationError

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.kl_control import MAX_ERROR
from megadapo.cluster.config import ClusterConfig
from megadapo.cluster.this_node import has_gpu
from megadapo.config.problems import (
    allows_table,
    describe,
    refused_keys,
    section_of,
    unusable_values,
)
from megadapo.config.recipe import override_texts, read_table, with_key
from megadapo.data.config import DataConfig
from megadapo.errors import ConfigError
from megadapo.observe.config import ObserveConfig
from megadapo.observe.oracles import OracleConfig
from megadapo.rewards.config import ENVIRONMENT, RewardConfig
from megadapo.rollout.config import EvaluationConfig, RolloutConfig, SamplingConfig
from megadapo.section import COLLECT, Section
from megadapo.trainer.config import CriticConfig, ModelConfig, TrainerConfig
from megadapo.weights.config import WeightsConfig

AUTO = "auto"
NUM_ENGINES_ON_CPU = 2
"""Engines without GPUs: a second engine speeds up small models more than a second thread."""


class RunSection(Section, title="run"):
    """The run's folder, length, seed and starting point."""

    # a home folder in place of `~`, as data.train is read
    folder: Annotated[
        Path, Field(strict=False), AfterValidator(lambda path: Path(os.path.expanduser(path)))
    ]
    """Run folder for metrics, logs and checkpoints, relative to the current directory."""
    num_steps: PositiveInt
    """Number of rollout steps of the whole run, including those before a resume."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of prompt order, sampling and random initialisation."""
    resume: str = "auto"
    """Checkpoint to start from: the newest complete one ("auto"), none ("never"), or a path. A path
    is used once: when the run has a later checkpoint, a restart uses the newest."""
    grace_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that the scheduler leaves between SIGTERM and SIGKILL. An update or an evaluation
    that would not end in time is cancelled. If updates take longer than this, every step is saved,
    because half an update cannot be. 0: always finish the current phase."""

    on_event: str | None = None
    """Command that gets the run's events, a JSON object on standard input for each: start, step,
    save, restart, oracle and end. Its words are split as by a shell, but no shell runs. It is
    killed after 10 s, and its failures are one warning."""

    def conflicts(self) -> Iterator[str]:
        try:
            if self.on_event is not None and not shlex.split(self.on_event):
                yield 'run.on_event is empty; "none" stands for no command'
        except ValueError as error:
            yield f"run.on_event = {self.on_event!r} is no command: {error}"
        if self.folder == Path():
            yield "run.folder: expected a folder of the run's own, found the current directory"
        if not self.resume:
            yield 'run.resume must be "auto", "never" or the path of a checkpoint'


class SupervisedConfig(Section, title="supervised"):
    """Training on rows of data.train instead of rollouts, as `megadapo sft` and
    `megadapo reward-model` do it."""

    rows_per_update: PositiveInt = 64
    """Rows of one optimizer update, which is one step."""
    epochs: PositiveInt | None = None
    """Passes over the rows, which set the number of steps; none: run.num_steps sets it."""


class CheckpointConfig(Section, title="checkpoint"):
    """Intervals between checkpoints, and the number of checkpoints to keep."""

    every: PositiveInt = 10
    """Steps between checkpoints. The last completed step of a run is always saved, also if it ends
    early, unless the trainer has failed."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Complete checkpoints to keep. An older one is deleted after a newer one is committed. At
    least 2, because the newest may be damaged."""


class RunConfig(Section, title="megadapo"):
    """The complete configuration of a run."""

    run: RunSection
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    sampling: SamplingConfig = SamplingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    supervised: SupervisedConfig = SupervisedConfig()
    trainer: TrainerConfig = TrainerConfig()
    critic: CriticConfig = CriticConfig()
    weights: WeightsConfig = WeightsConfig()
    oracles: OracleConfig = OracleConfig()
    observe: ObserveConfig = ObserveConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def groups_per_mini_batch(self) -> int:
        """Number of groups in one optimizer update of a full batch."""
        return self.algorithm.responses_per_mini_batch // self.sampling.responses_per_prompt

    @property
    def model_paths(self) -> dict[str, str]:
        """The folder or Hub name of each model that the run starts from, by key."""
        paths = {
            "model.path": self.model.path,
            "critic.path": self.critic.path,
            "algorithm.reference.path": self.algorithm.reference.path,
        }
        return {key: path for key, path in paths.items() if path}

    @property
    def num_engines(self) -> int:
        """Number of engines of the run, including one for evaluation."""
        return self.rollout.num_engines + self.evaluation.num_engines

    @property
    def is_deterministic(self) -> bool:
        """Whether the trainer computes the same bits twice: on a CPU, or if deterministic."""
        return self.trainer.deterministic or not self.cluster.uses_cuda

    @property
    def reads_extra_info(self) -> bool:
        """Whether further columns of the prompts are read, by a reward function or environment."""
        return self.reward.reads_extra_info or bool(self.rollout.environments)

    def warnings(self) -> list[str]:
        """Return a warning for each warm-up that is longer than the run."""
        warmups = {"trainer": self.trainer.optimizer.warmup_steps}
        if self.algorithm.advantage == "gae":
            warmups["critic"] = self.critic.optimizer.warmup_steps
        return [
            f"{name}.optimizer.warmup_steps = {warmup} is longer than "
            f"run.num_steps = {self.run.num_steps}: the run never reaches {name}.optimizer.lr"
            for name, warmup in warmups.items()
            if warmup > self.run.num_steps
        ]

    def conflicts(self) -> Iterator[str]:
        return conflicts_between(dict(self))


def load_config(
    source: os.PathLike[str] | str | Mapping[str, Any] | Section,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    trains: bool = True,
) -> RunConfig:
    """Read a recipe, a run's folder or nested tables, apply overrides, and check everything.

    `trains`: whether keys of training must fit those of rollouts; otherwise they are made to.

    Raises:
        ConfigError: the message names the file and lists every problem with its dotted key.
    """
    table, texts = read_table(source, override_texts(overrides))
    table = table if trains else _for_rollouts(table)
    try:
        return from_dict(_with_texts(table, texts))
    except ConfigError as error:
        name = "the configuration" if isinstance(source, Mapping) else str(source)
        name = f"{name} with its overrides" if overrides else name
        problems = str(error).splitlines()
        if len(problems) == 1:
            raise ConfigError(f"{name}: {problems[0]}") from None
        count = f"{name}: {len(problems)} problems"
        raise ConfigError("\n  ".join([count, *problems])) from None


def from_dict(table: Mapping[str, Any]) -> RunConfig:
    """Return the RunConfig of nested plain values such as those of `to_dict`.

    Raises:
        ConfigError: the message lists every unknown key, wrong value, missing key and conflict.
    """
    if unusable := list(unusable_values(table)):
        raise ConfigError("\n".join(unusable))
    # a missing section is an empty one, so that the error names its required keys
    complete = resolve_num_engines({name: {} for name in RunConfig.model_fields} | dict(table))
    try:
        return RunConfig.model_validate(complete, context=COLLECT)
    except ValidationError as error:
        wrong = {problem["loc"][0] for problem in error.errors() if problem["loc"]}
        valid = {
            name: section.model_validate(complete[name], context=COLLECT)
            for name, field in RunConfig.model_fields.items()
            if name not in wrong and (section := section_of(field)) is not None
        }
        if table.keys() - RunConfig.model_fields.keys():
            # an unknown section may be a misspelt one of those that are missing
            valid = {name: section for name, section in valid.items() if name in table}
        problems = [*describe(error, RunConfig), *conflicts_between(valid)]
    raise ConfigError("\n".join(problems))


def to_dict(config: Section) -> dict[str, Any]:
    """Return a section as nested plain values that JSON can hold."""
    return config.model_dump(mode="json")


def _with_texts(table: dict[str, Any], texts: Mapping[tuple[str, ...], str]) -> dict[str, Any]:
    """Read overrides as plain text if their TOML value is refused: a folder may be named 7."""
    for keys, text in texts.items():
        # a table where one is allowed is meant as one, and has a mistake
        is_meant = text.startswith(("{", "[")) and allows_table(RunConfig, keys)
        if not is_meant and keys in refused_keys(RunConfig, table):
            as_text = with_key(table, keys, text)
            if keys not in refused_keys(RunConfig, as_text):
                table = as_text
    return table


def _for_rollouts(table: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe whose keys of training fit its rollouts: one update of all responses."""
    names = ("run", "sampling", "rollout", "algorithm")
    run, sampling, rollout, algorithm = (table.get(name, {}) for name in names)
    try:
        groups = SamplingConfig.model_validate(sampling)
        longest = RolloutConfig.model_validate(rollout | {"num_engines": 1}).max_response_tokens
        fitting = {
            "responses_per_mini_batch": groups.prompts_per_step * groups.responses_per_prompt
        }
        if algorithm.get("overlong_buffer", AlgorithmConfig().overlong_buffer) >= longest:
            fitting["overlong_buffer"] = 0
        fitted = {"algorithm": algorithm | fitting, "run": {"num_steps": 1} | run}
    except (AttributeError, ConfigError, TypeError):
        return table  # the check of the sections reports the problem
    return {**table, **fitted, "critic": {}, "evaluation": {"every": 0}}


def resolve_num_engines(table: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe with `rollout.num_engines = "auto"` replaced by a number."""
    given = table["rollout"]
    if not isinstance(given, dict) or given.get("num_engines") != AUTO:
        return table
    number = 1
    # if a section has a problem, the check of the sections reports it
    with suppress(ConfigError):
        cluster = ClusterConfig.model_validate(table["cluster"])
        trainer = TrainerConfig.model_validate(table["trainer"])
        rollout = RolloutConfig.model_validate(given | {"num_engines": 1})
        number = max(1, trainer.num_ranks // rollout.ranks_per_engine)
        if cluster.device == "cpu" or (cluster.device == "auto" and not has_gpu()):
            number = NUM_ENGINES_ON_CPU
    return table | {"rollout": given | {"num_engines": number}}


def conflicts_between(sections: Mapping[str, Section]) -> Iterator[str]:
    """Yield the problems of every check whose sections are all there, each with its keys."""
    for check in CHECKS:
        names = inspect.signature(check).parameters.keys()
        if names <= sections.keys():
            yield from check(**{name: sections[name] for name in names})


def _check_mini_batches(algorithm: AlgorithmConfig, sampling: SamplingConfig) -> Iterator[str]:
    size, group = algorithm.responses_per_mini_batch, sampling.responses_per_prompt
    batch = sampling.prompts_per_step * group
    if size % group:
        yield (
            f"algorithm.responses_per_mini_batch = {size} splits a group: it must be a "
            f"multiple of sampling.responses_per_prompt = {group}"
        )
    elif batch % size:
        yield (
            f"algorithm.responses_per_mini_batch = {size} does not divide "
            "sampling.prompts_per_step x sampling.responses_per_prompt = "
            f"{sampling.prompts_per_step} x {group} = {batch}"
        )


def _check_ranks(algorithm: AlgorithmConfig, trainer: TrainerConfig) -> Iterator[str]:
    size = algorithm.responses_per_mini_batch
    if size < trainer.data_parallel:
        yield (
            f"algorithm.responses_per_mini_batch = {size} leaves some of the "
            f"trainer.data_parallel = {trainer.data_parallel} ranks without a response"
        )


def _check_context_parallel(
    trainer: TrainerConfig, data: DataConfig, rollout: RolloutConfig
) -> Iterator[str]:
    ranks = trainer.context_parallel
    longest = data.max_prompt_tokens + rollout.max_response_tokens
    if ranks > 1 and longest < 2 * ranks:
        yield (
            f"trainer.context_parallel = {ranks} splits each sequence into {2 * ranks} chunks, "
            "more than its data.max_prompt_tokens + rollout.max_response_tokens = "
            f"{longest} tokens: lower it, and raise trainer.data_parallel"
        )


def _check_overlong_buffer(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> Iterator[str]:
    buffer, longest = algorithm.overlong_buffer, rollout.max_response_tokens
    if buffer >= longest:
        yield (
            f"algorithm.overlong_buffer = {buffer} must be below rollout.max_response_tokens = "
            f"{longest}, or every response is punished; 0 turns the punishment off"
        )


def _check_evaluation(evaluation: EvaluationConfig, data: DataConfig) -> Iterator[str]:
    if evaluation.every > 0 and data.held_out is None:
        yield (
            f"evaluation.every = {evaluation.every} needs problems: set data.held_out, or "
            "evaluation.every = 0"
        )


def _check_evaluation_engine(
    evaluation: EvaluationConfig, cluster: ClusterConfig, checkpoint: CheckpointConfig
) -> Iterator[str]:
    if evaluation.num_engines == 0:
        return
    if cluster.placement == "colocated":
        yield (
            'evaluation.placement = "engine" generates while the trainer updates, but with '
            'cluster.placement = "colocated" engines share the trainer\'s GPUs: set it to '
            '"separate"'
        )
    if evaluation.every % checkpoint.every:
        yield (
            f"evaluation.every = {evaluation.every} must be a multiple of checkpoint.every = "
            f'{checkpoint.every} with evaluation.placement = "engine": a run that was stopped '
            "finds the weights of an unfinished evaluation in the checkpoint of its step"
        )


def _check_reference(algorithm: AlgorithmConfig, run: RunSection) -> Iterator[str]:
    refresh_every = algorithm.reference.refresh_every
    if refresh_every is not None and refresh_every >= run.num_steps:
        yield (
            f"algorithm.reference.refresh_every = {refresh_every}: a run of "
            f"run.num_steps = {run.num_steps} never uses refreshed weights: lower it, or leave it "
            "out"
        )


def _check_kl_control(algorithm: AlgorithmConfig, sampling: SamplingConfig) -> Iterator[str]:
    control = algorithm.kl_control
    num_responses = sampling.prompts_per_step * sampling.responses_per_prompt
    is_scaled = control.target is not None and control.rule == "proportional"
    if is_scaled and MAX_ERROR * num_responses >= control.horizon:
        yield (
            f"algorithm.kl_control.horizon = {control.horizon}: {num_responses} responses a step "
            f"(sampling) times {MAX_ERROR:g}, the largest error that counts, must be below it, or "
            "one step could take the coefficient to 0"
        )
    num_updates = algorithm.passes * num_responses // algorithm.responses_per_mini_batch
    limits_kl = algorithm.objective.old_kl_coef != 0.0 or algorithm.max_kl is not None
    if limits_kl and num_updates <= 1:
        yield (
            "algorithm.objective.old_kl_coef and algorithm.max_kl have no effect on the first "
            "update of a step, whose ratios are 1, and there is no other one: raise "
            "algorithm.passes, lower algorithm.responses_per_mini_batch, or leave them out"
        )


def _check_binary_rewards(algorithm: AlgorithmConfig, reward: RewardConfig) -> Iterator[str]:
    if algorithm.advantage == "maxrl" and not reward.is_rule_alone:
        yield (
            'algorithm.advantage = "maxrl" needs rewards of two values: leave reward.functions at '
            '["rule"]'
        )


def _check_process_rewards(
    algorithm: AlgorithmConfig, reward: RewardConfig, sampling: SamplingConfig
) -> Iterator[str]:
    says = any(one.may_say_correct or one.right_above is not None for one in reward.functions)
    if sampling.changed("accuracy_range") and not says:
        yield (
            "sampling.accuracy_range has no effect: no entry of reward.functions says what is "
            "correct; set right_above in one, or leave it out"
        )
    if not algorithm.compares_steps:
        return
    process = 'algorithm.advantage = "grpo-process"'
    if not any(function.may_score_steps for function in reward.functions):
        yield (
            f"{process} needs scores of steps, and no entry of reward.functions gives any: name a "
            "function that does (docs/rewards.md)"
        )
    if sampling.changed("accuracy_range"):
        yield (
            f"sampling.accuracy_range: with {process} a group is mixed if its steps differ, at any "
            "accuracy; leave it out"
        )


def _check_critic(
    algorithm: AlgorithmConfig, critic: CriticConfig, trainer: TrainerConfig, run: RunSection
) -> Iterator[str]:
    if algorithm.advantage != "gae":
        if critic != CriticConfig():
            yield 'critic: it is used only with algorithm.advantage = "gae"; leave it out'
        return
    if critic.warmup >= run.num_steps:
        yield (
            f"critic.warmup = {critic.warmup} leaves no step of run.num_steps = {run.num_steps} in "
            "which the policy is trained"
        )
    decay_steps, warmup = trainer.optimizer.decay_steps, critic.optimizer.warmup_steps
    if 0 < decay_steps <= warmup:
        yield (
            f"trainer.optimizer.decay_steps = {decay_steps} is the critic's too: it must be 0 or "
            f"above critic.optimizer.warmup_steps = {warmup}"
        )


def _check_timeouts(weights: WeightsConfig, trainer: TrainerConfig) -> Iterator[str]:
    if weights.deadline_s > trainer.timeout_s:
        yield (
            f"weights.deadline_s = {weights.deadline_s:g} is above trainer.timeout_s = "
            f"{trainer.timeout_s:g}, after which the trainer's own process groups end: a stuck "
            "update would end without the name of the rank that is stuck"
        )


def _check_quantization(
    rollout: RolloutConfig, algorithm: AlgorithmConfig, model: ModelConfig, cluster: ClusterConfig
) -> Iterator[str]:
    if rollout.quantization == "none":
        return
    quantization = f'rollout.quantization = "{rollout.quantization}"'
    if algorithm.importance.scope != "all":
        yield (
            f"{quantization} samples from a policy that is not quite the trained one: correct for "
            'it on fresh tokens too, with algorithm.importance.scope = "all"'
        )
    if model.dtype != "bfloat16":
        yield f'{quantization} needs model.dtype = "bfloat16"'
    if cluster.device == "cpu":
        yield f'{quantization} needs GPUs, but cluster.device = "cpu"'


def _check_router_replay(trainer: TrainerConfig, rollout: RolloutConfig) -> Iterator[str]:
    if not trainer.router_replay:
        return
    wanted = "trainer.router_replay: vLLM hands over the experts of each token only"
    if not rollout.vllm_arguments["enable_prefix_caching"]:
        yield f"{wanted} with rollout.vllm.enable_prefix_caching = true"
    if rollout.pipeline_parallel > 1:
        yield f"{wanted} where an engine has one stage: set rollout.pipeline_parallel = 1"


def _check_cpu_optimizers(
    trainer: TrainerConfig, model: ModelConfig, cluster: ClusterConfig
) -> Iterator[str]:
    fraction = trainer.optimizer.cpu_offload_fraction
    if fraction == 0.0:
        return
    found = f"trainer.optimizer.cpu_offload_fraction = {fraction:g}"
    if cluster.device == "cpu":
        yield f'{found} needs GPUs, but cluster.device = "cpu"; without them set it to 0'
    if model.dtype == "float32":
        yield (
            f"{found}: Megatron's hybrid optimizer cannot load fp32 weights, which are their own "
            'masters; set it to 0, or model.dtype = "bfloat16"'
        )


def _check_stale_logprobs(algorithm: AlgorithmConfig, sampling: SamplingConfig) -> Iterator[str]:
    leaves_out = algorithm.importance.stale_logprobs == "none"
    if leaves_out and sampling.overlaps:
        yield (
            'algorithm.importance.stale_logprobs = "none" leaves stale tokens out of the loss, and '
            f'with sampling.mode = "{sampling.mode}" those are whole groups: set it to '
            '"recompute" or "rollout"'
        )


def _check_overlap(
    sampling: SamplingConfig, cluster: ClusterConfig, evaluation: EvaluationConfig
) -> Iterator[str]:
    if sampling.mode == "async" and evaluation.every and evaluation.placement != "engine":
        yield (
            f'evaluation.placement = "{evaluation.placement}" waits for engines that sampling.mode '
            '= "async" always uses: set it to "engine", or evaluation.every = 0'
        )
    if sampling.overlaps and cluster.placement == "colocated":
        yield (
            f'sampling.mode = "{sampling.mode}" generates while the trainer updates, but with '
            'cluster.placement = "colocated" the engines sleep then: set it to "separate"'
        )


def _check_environments(reward: RewardConfig, rollout: RolloutConfig) -> Iterator[str]:
    named = [function for function in reward.functions if function.function == ENVIRONMENT]
    if named and not rollout.environments:
        yield (
            f'reward.functions: "{ENVIRONMENT}" is what a response earns in its environment, and '
            "there is none: add one to rollout.environments"
        )


def _check_branching(sampling: SamplingConfig, rollout: RolloutConfig) -> Iterator[str]:
    if sampling.branching.is_on and not rollout.environments:
        yield (
            "sampling.branching.initial_rollouts: responses branch after answers of an "
            "environment, and there is none: add one to rollout.environments, or leave it out"
        )
    once = [
        environment.label for environment in rollout.environments if environment.recovery == "once"
    ]
    if sampling.branching.is_on and once:
        yield (
            f'rollout.environments.recovery = "once" of {", ".join(once)} does not repeat actions, '
            "and a branch needs those of its parent: take another one, or leave "
            "sampling.branching.initial_rollouts out"
        )


CHECKS: tuple[Callable[..., Iterator[str]], ...] = (
    _check_mini_batches,
    _check_ranks,
    _check_context_parallel,
    _check_overlong_buffer,
    _check_evaluation,
    _check_evaluation_engine,
    _check_reference,
    _check_kl_control,
    _check_binary_rewards,
    _check_process_rewards,
    _check_critic,
    _check_timeouts,
    _check_quantization,
    _check_router_replay,
    _check_cpu_optimizers,
    _check_stale_logprobs,
    _check_overlap,
    _check_branching,
    _check_environments,
)
