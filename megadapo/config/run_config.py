"""The configuration of a run: every section, from a file or from nested plain values.

Each section is defined beside what it configures. Importing this module imports no torch, Ray, vLLM
or Megatron, so `--dry-run` is fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.cluster.config import ClusterConfig
from megadapo.cluster.this_node import has_gpu
from megadapo.config.conflicts import conflicts_between
from megadapo.config.problems import allows_table, describe, refused_keys, section_of
from megadapo.config.recipe import read_table, with_key
from megadapo.config.sections import CheckpointConfig, RunSection, SupervisedConfig
from megadapo.data.config import DataConfig
from megadapo.errors import ConfigError
from megadapo.observe.config import ObserveConfig
from megadapo.observe.oracles import OracleConfig
from megadapo.rewards.config import RewardConfig
from megadapo.rollout.config import EvaluationConfig, RolloutConfig, SamplingConfig
from megadapo.section import COLLECT, Section
from megadapo.trainer.config import CriticConfig, ModelConfig, TrainerConfig
from megadapo.weights.config import WeightsConfig


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


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe or a run's folder, apply `section.key=value` overrides, and check everything.

    Raises:
        ConfigError: the message names the file and lists every problem with its dotted key.
    """
    table, texts = read_table(Path(path), overrides)
    try:
        return from_dict(_with_texts(table, texts))
    except ConfigError as error:
        source = f"{path} with its overrides" if overrides else str(path)
        problems = str(error).splitlines()
        if len(problems) == 1:
            raise ConfigError(f"{source}: {problems[0]}") from None
        count = f"{source}: {len(problems)} problems"
        raise ConfigError("\n  ".join([count, *problems])) from None


def from_dict(table: Mapping[str, Any]) -> RunConfig:
    """Return the RunConfig of nested plain values such as those of `to_dict`.

    Raises:
        ConfigError: the message lists every unknown key, wrong value, missing key and conflict.
    """
    # a missing section is an empty one, so that the error names its required keys
    complete = resolve_num_engines({name: {} for name in RunConfig.model_fields} | dict(table))
    try:
        return RunConfig.model_validate(complete, context=COLLECT)
    except ValidationError as error:
        valid = _valid_sections(complete, error)
        if table.keys() - RunConfig.model_fields.keys():
            # an unknown section may be a misspelt one of those that are missing
            valid = {name: section for name, section in valid.items() if name in table}
        problems = [*describe(error, RunConfig), *conflicts_between(valid)]
    raise ConfigError("\n".join(problems))


def to_dict(config: Section) -> dict[str, Any]:
    """Return a section as nested plain values that JSON can hold."""
    return config.model_dump(mode="json")


def _valid_sections(table: Mapping[str, Any], error: ValidationError) -> dict[str, Section]:
    """Return the sections without a problem of their own."""
    wrong = {problem["loc"][0] for problem in error.errors() if problem["loc"]}
    return {
        name: section.model_validate(table[name], context=COLLECT)
        for name, field in RunConfig.model_fields.items()
        if name not in wrong and (section := section_of(field)) is not None
    }


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


AUTO = "auto"
NUM_ENGINES_ON_CPU = 2
"""Engines without GPUs: a second engine speeds up small models more than a second thread."""


def resolve_num_engines(table: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe with `rollout.num_engines = "auto"` replaced by a number."""
    rollout = table["rollout"]
    if not isinstance(rollout, dict) or rollout.get("num_engines") != AUTO:
        return table
    return table | {"rollout": rollout | {"num_engines": _auto_num_engines(table)}}


def _auto_num_engines(table: dict[str, Any]) -> int:
    try:
        cluster = ClusterConfig.model_validate(table["cluster"])
        trainer = TrainerConfig.model_validate(table["trainer"])
        rollout = RolloutConfig.model_validate(table["rollout"] | {"num_engines": 1})
    except ConfigError:
        return 1  # the check of the sections reports the problem
    if cluster.device == "cpu" or (cluster.device == "auto" and not has_gpu()):
        return NUM_ENGINES_ON_CPU
    return max(1, trainer.num_ranks // rollout.ranks_per_engine)
