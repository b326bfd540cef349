"""Reward models: the critic's model learns to order the two answers of preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.preferences import pair_statistics
from megadapo.config import RunConfig
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
    held_out: Sequence[Pair]

    @classmethod
    def load(cls, config: RunConfig) -> Self:
        """Read and encode the pairs of data.train and data.held_out.

        Raises:
            DataError: pairs or the tokenizer cannot be used.
        """
        data, tokenizer = config.data, load_tokenizer(config)
        max_tokens = data.max_prompt_tokens + config.rollout.max_response_tokens
        sources = [data.train] if data.held_out is None else [data.train, data.held_out]
        pairs, *held_out = [
            load_pairs(source, tokenizer, max_tokens=max_tokens, overlong=data.overlong_prompts)
            for source in sources
        ]
        return cls(config=config, pairs=pairs, held_out=held_out[0] if held_out else [])

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
        """Return loss and accuracy of the held-out pairs."""
        size = self.config.supervised.rows_per_update
        parts = [
            self.held_out[first : first + size] for first in range(0, len(self.held_out), size)
        ]
        found = pair_statistics(trainer.scores(pack_pairs(parts)))
        return {"eval/loss": found["loss"], "eval/pair_accuracy": found["accuracy"]}
