"""Reward models: the critic's model learns to order the two answers of preference pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.preferences import pair_statistics
from megadapo.config import RunConfig
from megadapo.data.order import Share
from megadapo.data.pairs import Pair, fingerprint, load_pairs, pack_pairs
from megadapo.run.inputs import load_tokenizer
from megadapo.run.processes import trainer_settings
from megadapo.stages.loop import Stage
from megadapo.trainer.config import CriticConfig, CriticOptimizerConfig
from megadapo.trainer.trainer import Trainer
from megadapo.trainer.types import Metrics, TrainerSettings, UpdateRequest


@dataclass(frozen=True, kw_only=True)
class RewardModel(Stage):
    """The pairs of a reward model's run."""

    command = "reward-model"
    config: RunConfig
    pairs: Sequence[Pair]
    shares: Sequence[Share]
    held_out: Mapping[str, Sequence[Pair]]
    """Pairs of each held-out set by its name, empty for one without a name."""

    @classmethod
    def load(cls, config: RunConfig) -> Self:
        """Read and encode the pairs of data.train and data.held_out."""
        data, tokenizer = config.data, load_tokenizer(config)
        max_tokens = data.max_prompt_tokens + config.rollout.max_response_tokens
        load = partial(
            load_pairs,
            tokenizer=tokenizer,
            max_tokens=max_tokens,
            columns=data.columns,
            overlong=data.overlong_prompts,
        )
        pairs, shares = data.load_train(load)
        return cls(config=config, pairs=pairs, shares=shares, held_out=data.load_held_out(load))

    @property
    def num_rows(self) -> int:
        return len(self.pairs)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.pairs)

    def settings(self) -> TrainerSettings:
        """Return the ranks' settings: the critic's model alone, under `[trainer.optimizer]`."""
        trainer = self.config.trainer
        optimizer = CriticOptimizerConfig(
            lr=trainer.optimizer.lr, warmup_steps=trainer.optimizer.warmup_steps
        )
        return replace(
            trainer_settings(self.config),
            trainer=trainer.model_copy(update={"offload": (), "router_replay": False}),
            algorithm=AlgorithmConfig(),
            critic=CriticConfig(optimizer=optimizer),
            trains="reward_model",
        )

    def request(self, rows: Sequence[int], step: int) -> UpdateRequest:
        """Return one update on the pairs; each has the same weight."""
        batch = pack_pairs([[self.pairs[row] for row in rows]])
        return UpdateRequest(batch=batch, step=step, policy_version=step - 1)

    def evaluate(self, trainer: Trainer) -> Metrics:
        """Return loss and accuracy of the held-out pairs, of several sets their means."""
        found = {name: self._statistics(trainer, pairs) for name, pairs in self.held_out.items()}
        metrics: Metrics = {}
        for key, value in (("loss", "loss"), ("pair_accuracy", "accuracy")):
            metrics |= {f"held_out/{name}/{key}": one[value] for name, one in found.items() if name}
            metrics[f"eval/{key}"] = math.fsum(one[value] for one in found.values()) / len(found)
        return metrics

    def _statistics(self, trainer: Trainer, pairs: Sequence[Pair]) -> dict[str, float]:
        size = self.config.supervised.rows_per_update
        parts = [pairs[first : first + size] for first in range(0, len(pairs), size)]
        return pair_statistics(trainer.scores(pack_pairs(parts)))
