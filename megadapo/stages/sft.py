"""Supervised fine-tuning: a language model's loss on the answers of conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.algorithm.objective import LIKELIHOOD
from megadapo.config import RunConfig
from megadapo.data.answered import AnswerEncoder, fingerprint, load_answered
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
    held_out: Sequence[Sequence[LabelledTokens]]

    @classmethod
    def load(cls, config: RunConfig) -> Self:
        """Read and encode the rows of data.train and data.held_out.

        Raises:
            DataError: rows or the tokenizer cannot be used.
        """
        data = config.data
        encoder = AnswerEncoder(
            load_tokenizer(config),
            max_prompt_tokens=data.max_prompt_tokens,
            max_response_tokens=config.rollout.max_response_tokens,
        )
        sources = [data.train] if data.held_out is None else [data.train, data.held_out]
        rows, *held_out = [
            load_answered(source, encoder, overlong=data.overlong_prompts) for source in sources
        ]
        return cls(config=config, rows=rows, held_out=held_out[0] if held_out else [])

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
        )

    def request(self, rows: Sequence[int], step: int) -> UpdateRequest:
        """Return one update on the rows; each of their response tokens has the same weight."""
        return UpdateRequest(
            batch=pack_likelihood([self._sequences(rows, self.rows)]),
            step=step,
            policy_version=step - 1,
            loss="likelihood",
        )

    def evaluate(self, trainer: Trainer) -> Metrics:
        """Return the mean loss of the held-out response tokens."""
        size, numbers = self.config.supervised.rows_per_update, range(len(self.held_out))
        batch = pack_likelihood(
            [
                self._sequences(numbers[first : first + size], self.held_out)
                for first in numbers[::size]
            ]
        )
        logprobs = trainer.logprobs(batch)[batch.loss_weights != 0.0]
        return {"eval/loss": -float(logprobs.mean(dtype=np.float64))}

    @staticmethod
    def _sequences(
        rows: Sequence[int], of: Sequence[Sequence[LabelledTokens]]
    ) -> list[LabelledTokens]:
        return [sequence for row in rows for sequence in of[row]]
