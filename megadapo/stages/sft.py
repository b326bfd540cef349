"""Supervised fine-tuning: a language model's loss on the answers of conversations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import numpy as np

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.objective import LIKELIHOOD
from megadapo.config import RunConfig
from megadapo.data.answered import AnswerEncoder, fingerprint, load_answered
from megadapo.data.order import Share
from megadapo.data.pretraining import LabelledTokens, pack_likelihood
from megadapo.run.inputs import load_tokenizer
from megadapo.run.processes import trainer_settings
from megadapo.stages.loop import Stage
from megadapo.trainer.trainer import Trainer
from megadapo.trainer.types import Metrics, TrainerSettings, UpdateRequest


@dataclass(frozen=True, kw_only=True)
class FineTuning(Stage):
    """The rows of a fine-tuning run, each with its sequences."""

    command = "sft"
    config: RunConfig
    rows: Sequence[Sequence[LabelledTokens]]
    shares: Sequence[Share]
    held_out: Mapping[str, Sequence[Sequence[LabelledTokens]]]
    """Rows of each held-out set by its name, empty for one without a name."""

    @classmethod
    def load(cls, config: RunConfig) -> Self:
        """Read and encode the rows of data.train and data.held_out."""
        data = config.data
        encoder = AnswerEncoder(
            load_tokenizer(config),
            max_prompt_tokens=data.max_prompt_tokens,
            max_response_tokens=config.rollout.max_response_tokens,
        )
        load = partial(
            load_answered, encoder=encoder, columns=data.columns, overlong=data.overlong_prompts
        )
        rows, shares = data.load_train(load)
        return cls(config=config, rows=rows, shares=shares, held_out=data.load_held_out(load))

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.rows)

    def settings(self) -> TrainerSettings:
        """Return the ranks' settings: no critic, reference or engines, and temperature 1."""
        trainer = self.config.trainer.model_copy(update={"offload": (), "router_replay": False})
        return replace(
            trainer_settings(self.config),
            trainer=trainer,
            algorithm=AlgorithmConfig(objective=LIKELIHOOD),
            temperature=1.0,
            critic=None,
            trains="likelihood",
        )

    def request(self, rows: Sequence[int], step: int) -> UpdateRequest:
        """Return one update on the rows; each of their response tokens has the same weight."""
        return UpdateRequest(
            batch=pack_likelihood([self._sequences(rows, self.rows)]),
            step=step,
            policy_version=step - 1,
        )

    def evaluate(self, trainer: Trainer) -> Metrics:
        """Return the mean loss of the held-out response tokens, of several sets their mean."""
        losses = {name: self._loss(trainer, rows) for name, rows in self.held_out.items()}
        of_sets = {f"held_out/{name}/loss": loss for name, loss in losses.items() if name}
        return {"eval/loss": math.fsum(losses.values()) / len(losses), **of_sets}

    def _loss(self, trainer: Trainer, rows: Sequence[Sequence[LabelledTokens]]) -> float:
        size, numbers = self.config.supervised.rows_per_update, range(len(rows))
        batch = pack_likelihood(
            [self._sequences(numbers[first : first + size], rows) for first in numbers[::size]]
        )
        logprobs = trainer.logprobs(batch)[batch.loss_weights != 0.0]
        return -float(logprobs.mean(dtype=np.float64))

    @staticmethod
    def _sequences(
        rows: Sequence[int], of: Sequence[Sequence[LabelledTokens]]
    ) -> list[LabelledTokens]:
        return [sequence for row in rows for sequence in of[row]]
