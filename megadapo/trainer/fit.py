"""One rank of a trainer that fits a policy to given answers: supervised fine-tuning."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.rank import TrainerRank
from megadapo.trainer.types import Metrics, UpdateRequest, UpdateResult
from megadapo.trainer.update.metrics import MiniBatchSums, ratio
from megadapo.trainer.update.optimizer import gather_weights_now, step_if_finite
from megadapo.trainer.update.step import compute_gradients


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
        measured: list[MiniBatchSums] = []
        norms: list[float] = []
        for mini_batch, members in zip(split, batch.mini_batches, strict=True):
            self.experts.prepare(int(lengths[members].sum()))
            fitted = mini_batch.with_policy([_without_old_policy(one) for one in mini_batch])
            sums, _ = compute_gradients(self.chunks, self.head, fitted)
            measured.append(sums)
            norm = step_if_finite(self.optimizer, loss=sums.loss, lr=lr)
            norms += [] if norm is None else [norm]
        # saves read the weights after this
        gather_weights_now(self.chunks)
        total = MiniBatchSums.merged(measured)
        metrics: Metrics = {
            "tokens/trained": int(total.num_tokens),
            "policy/loss": ratio(total.loss, len(measured)),
            "policy/entropy": ratio(total.entropy, total.num_tokens),
            "policy/token_probability_mean": ratio(total.token_probability, total.num_tokens),
            "policy/grad_norm": ratio(sum(norms), len(norms)),
            "policy/lr": lr,
            "policy/skipped_updates": len(measured) - len(norms),
        }
        return UpdateResult(
            metrics=metrics | (self.experts.result() if balances else {}),
            num_dropped_tokens=0,
            rank_tokens=(sum(mini_batch.num_tokens for mini_batch in split),),
        )


def _without_old_policy(micro_batch: MicroBatch) -> MicroBatch:
    # the loss has no ratio: old log-probs only have to be finite
    zeros = torch.zeros_like(micro_batch.loss_weights)
    return replace(micro_batch, proximal=zeros, logprobs_old=zeros)
