"""The running parts of a run, as the loop uses them: the trainer and what feeds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megadapo.algorithm.config import PretrainingConfig
from megadapo.algorithm.kl_control import KlController
from megadapo.data.batch import PackedBatch
from megadapo.data.texts import TextStream, pack_texts
from megadapo.run.gpu_sharing import GpuSharing
from megadapo.run.rollouts import Rollouts
from megadapo.trainer.trainer import Trainer
from megadapo.trainer.types import UpdateResult
from megadapo.weights.disk.files import Files

KL_CONTROL_STATE = "kl_control"
TEXTS_STATE = "texts"


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The trainer and what feeds it."""

    trainer: Trainer
    rollouts: Rollouts
    tokenizer: PreTrainedTokenizerBase
    kl_controller: KlController
    gpus: GpuSharing
    pretraining: PretrainingConfig = PretrainingConfig()
    texts: TextStream | None = None
    """What there is a language-model loss on."""

    def update(self, batch: PackedBatch, step: int, *, record: Sequence[int] = ()) -> UpdateResult:
        """Train on one step's batch; engines on the trainer's GPUs sleep until the next publish.

        `record`: sequences of the batch whose log-probs the result holds.
        """
        self.gpus.start_update()
        texts = None
        if self.texts is not None:
            num_tokens = self.pretraining.tokens_per_mini_batch
            parts = [self.texts.take(num_tokens) for _ in batch.mini_batches]
            texts = pack_texts(parts, coef=self.pretraining.coef)
        result = self.trainer.update(
            batch,
            policy_version=self.rollouts.policy_version,
            step=step,
            kl_reward_coef=self.kl_controller.coef,
            texts=texts,
            record=record,
        )
        # at a learning rate of 0 the policy stays where it is, and so does its KL divergence
        if result.lr > 0.0:
            self.kl_controller.observe(result.kl.mean, batch.num_sequences)
        return result

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds beside the trainer's state, for going on after the last step."""
        state = {**self.rollouts.state_dict(), KL_CONTROL_STATE: self.kl_controller.state_dict()}
        return state if self.texts is None else {**state, TEXTS_STATE: self.texts.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            CheckpointError: the state is damaged, or of a run that did not sample.
            DataError: prompts or texts are others than those it is of.
        """
        self.rollouts.load_state_dict(state)
        self.kl_controller.load_state_dict(state.get(KL_CONTROL_STATE, {}))
        # a run that takes texts up begins with the first of them
        if self.texts is not None and TEXTS_STATE in state:
            self.texts.load_state_dict(state[TEXTS_STATE])

    @cached_property
    def checkpoint_bytes(self) -> int:
        """About how large the trainer's part of a checkpoint is."""
        return self.trainer.checkpoint_bytes()

    def begin_save(self, folder: Path) -> Callable[[], Files]:
        """Begin to write the trainer's part of a checkpoint; returns what waits for its files.

        Until this returns it needs memory that engines also use.
        """
        with self.gpus.saving():
            return self.trainer.begin_save(folder)
