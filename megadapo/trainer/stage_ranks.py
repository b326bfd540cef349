"""The ranks of the stages before rollouts: supervised fine-tuning, and a reward model's training.

The reward model is the critic's model; a response's score is the value at its last token. The two
responses of a pair may be on different ranks and in different micro-batches. So an update has two
passes. The first computes all scores of the update. The second has a loss that is linear in the
scores, with the gradient of the pairs' loss at these scores.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import record_function

from megadapo.algorithm.preferences import pair_losses, pair_statistics
from megadapo.data.batch import PackedBatch
from megadapo.models.description import describe_critic
from megadapo.models.folder import read_hf_config, resolve_model_folder
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.mini_batch import MicroBatchSplitter, MiniBatch
from megadapo.trainer.checkpoint.checkpoint import CheckpointWriter, num_bytes_written
from megadapo.trainer.critic import Critic, ValueOutput, predicted_values
from megadapo.trainer.model.model_layout import validate_model_layout
from megadapo.trainer.model.parallel import has_results, join_groups
from megadapo.trainer.rank import TrainerRank
from megadapo.trainer.types import (
    CRITIC_FOLDER,
    Metrics,
    Rendezvous,
    TrainerSettings,
    UpdateRequest,
    UpdateResult,
)
from megadapo.trainer.update.metrics import Sums, mean_of, rank_tokens, ratio
from megadapo.trainer.update.optimizer import gather_weights_now, step_if_finite
from megadapo.trainer.update.step import compute_gradients, run_schedule

_FITTED = ("policy/loss", "policy/entropy", "policy/token_probability_mean")
"""Sums that a loss without a ratio and without advantages has."""


class FitRank(TrainerRank):
    """A rank whose objective is `LIKELIHOOD`: minus each token's log-prob, times its weight."""

    def update(self, request: UpdateRequest) -> UpdateResult:
        """Apply one update per mini-batch; return the same metrics on every rank."""
        batch, balances = request.batch, self.settings.trainer.router_aux_loss_coef != 0.0
        split = self.splitter.split(batch, predicted=batch.loss_weights != 0.0, policy_version=None)
        if balances:
            # the load-balancing loss needs the routing of the whole step
            with self.experts.counted():
                for mini_batch in split:
                    self.logprobs_of(mini_batch)
        lr, lengths = self.settings.trainer.optimizer.lr_at(request.step), np.diff(batch.cu_seqlens)
        measured: list[Sums] = []
        norms: list[float] = []
        for mini_batch, members in zip(split, batch.mini_batches, strict=True):
            self.experts.prepare(int(lengths[members].sum()))
            fitted = mini_batch.with_policy([_without_old_policy(one) for one in mini_batch])
            sums, _ = compute_gradients(self.chunks, self.head, fitted)
            measured.append(sums)
            norm = step_if_finite(self.optimizer, loss=sums["policy/loss"], lr=lr)
            norms += [] if norm is None else [norm]
        # saves read the weights after this
        gather_weights_now(self.chunks)
        total = Sums.merged(measured)
        metrics: Metrics = {
            "tokens/trained": int(total["tokens"]),
            **{name: total.value(name) for name in _FITTED},
            "policy/grad_norm": ratio(sum(norms), len(norms)),
            "policy/lr": lr,
            "policy/skipped_updates": len(measured) - len(norms),
        }
        return UpdateResult(
            metrics=metrics | (self.experts.result() if balances else {}),
            num_dropped_tokens=0,
            of_ranks=rank_tokens(split),
        )


def _without_old_policy(micro_batch: MicroBatch) -> MicroBatch:
    # the loss has no ratio: old log-probs only have to be finite
    zeros = torch.zeros_like(micro_batch.loss_weights)
    return replace(micro_batch, proximal=zeros, logprobs_old=zeros)


class RewardModelRank:
    """Model and optimizer of one rank. Every method is collective."""

    def __init__(
        self,
        settings: TrainerSettings,
        rendezvous: Rendezvous,
        listener: socket.socket | None = None,
    ) -> None:
        """`listener`: rank 0's open socket at the rendezvous; None opens one."""
        folder = resolve_model_folder(
            settings.model.path, with_weights=settings.model.init == "pretrained"
        )
        model = describe_critic(read_hf_config(folder))
        # every rank raises before it joins: none waits for another
        validate_model_layout(model, settings.trainer)
        self.device = join_groups(rendezvous, settings.trainer, listener, seed=settings.seed)
        self.settings = settings
        self.critic = Critic(settings, policy=model, device=self.device)
        self.splitter = MicroBatchSplitter(model, settings.trainer, self.device)
        self.writer = CheckpointWriter(
            torch.distributed.get_rank(), pinned=self.device.type == "cuda"
        )
        self.checkpoint_bytes = num_bytes_written(self.critic.runs)
        """Size of this rank's part of a checkpoint."""

    def update(self, request: UpdateRequest) -> UpdateResult:
        """Apply one update per mini-batch of `pack_pairs`; return the same metrics on all ranks."""
        batch, critic = request.batch, self.critic
        lr = critic.optimizer_config.lr_at(request.step)
        measured: list[dict[str, float]] = []
        norms: list[float] = []
        split = self.splitter.split_responses(batch)
        for mini_batch, members in zip(split, batch.mini_batches, strict=True):
            scores = self._scores(mini_batch, batch.num_sequences)
            measured.append(pair_statistics(scores[members]))
            self.gradients(mini_batch, members, scores)
            norm = step_if_finite(critic.optimizer, loss=measured[-1]["loss"], lr=lr)
            if norm is not None:
                norms.append(norm)
        # saves and scores read the weights after this
        gather_weights_now(critic.chunks)
        means = {
            name: mean_of(sum(one[name] for one in measured), len(measured)) for name in measured[0]
        }
        metrics: Metrics = {
            "policy/loss": means["loss"],
            "policy/grad_norm": mean_of(sum(norms), len(norms)),
            "policy/lr": lr,
            "policy/skipped_updates": len(measured) - len(norms),
            "pairs/accuracy": means["accuracy"],
            "pairs/margin": means["margin"],
        }
        return UpdateResult(
            metrics=metrics,
            num_dropped_tokens=0,
            of_ranks=rank_tokens(split),
        )

    def scores(self, batch: PackedBatch) -> np.ndarray:
        """Return [S] float64 scores of the sequences of all mini-batches, 0 for others."""
        split = self.splitter.split_responses(batch)
        parts = [self._scores(mini_batch, batch.num_sequences) for mini_batch in split]
        found: np.ndarray = np.sum(parts, axis=0)
        return found

    def gradients(self, mini_batch: MiniBatch, members: np.ndarray, scores: np.ndarray) -> None:
        """Leave the summed gradients of a mini-batch's pairs in the buffers.

        Args:
            members: sequences of the whole mini-batch, pair by pair.
            scores: [S] of the batch's sequences, with the current weights.
        """
        chosen, rejected = members[0::2], members[1::2]
        _, slopes = pair_losses(scores[chosen], scores[rejected])
        weights = np.zeros_like(scores)
        weights[chosen], weights[rejected] = slopes / len(chosen), -slopes / len(chosen)
        work = []
        for micro_batch in mini_batch:
            spread = micro_batch.at_rows(weights[micro_batch.members[micro_batch.sequences]])
            work.append((replace(micro_batch, loss_weights=spread), _weighted))
        for chunk in self.critic.chunks:
            chunk.zero_grad_buffer()
        with record_function("megadapo::pair_gradients"):
            run_schedule(self.critic.chunks, work, forward_only=False)

    def begin_save(self, folder: Path) -> int:
        """Copy weights and optimizer to the host, start to write them, return their bytes.

        Training may continue meanwhile; `writer.report` returns the outcome.
        """
        saved = {CRITIC_FOLDER: (self.critic.runs, self.critic.optimizer)}
        return self.writer.save(folder, saved)

    def load(self, folder: Path) -> None:
        """Read a checkpoint of any split."""
        self.critic.load(folder)

    def _scores(self, mini_batch: MiniBatch, num_sequences: int) -> np.ndarray:
        """Return [S] float64: scores of the sequences of a mini-batch on all ranks, else 0."""
        found = torch.zeros(num_sequences, dtype=torch.float64)
        computed = self.critic.values(mini_batch)
        if has_results():
            for micro_batch, values in zip(mini_batch, computed, strict=True):
                sequences = torch.from_numpy(micro_batch.members[micro_batch.sequences])
                found[sequences] = values.double().cpu()
        found = found.to(self.device)
        torch.distributed.all_reduce(found)
        return found.cpu().numpy()


def _weighted(*, context: MicroBatch, **passed: Any) -> ValueOutput:
    """Return the loss that is linear in the values; an `output_processor`."""
    values = predicted_values(context=context, **passed)
    loss = (context.loss_weights[context.rows] * values).sum()
    return ValueOutput(loss=loss, clipped=torch.zeros_like(loss))
