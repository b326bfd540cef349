"""One rank of a trainer with the loss of a language model, as for supervised fine-tuning."""

from __future__ import annotations

from dataclasses import replace

import torch

from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.offload import BETWEEN_UPDATES
from megadapo.trainer.rank import TrainerRank
from megadapo.trainer.types import UpdateRequest, UpdateResult
from megadapo.trainer.update.metrics import summarize
from megadapo.trainer.update.recorder import UpdateRecorder

METRICS = (
    *("tokens/trained", "policy/loss", "policy/entropy", "policy/token_probability_mean"),
    *("policy/grad_norm", "policy/lr", "policy/skipped_updates"),
)
"""Metrics of a policy's update that do not need an old policy."""


class LikelihoodRank(TrainerRank):
    """A rank that trains on given answers.

    Its objective is `LIKELIHOOD`: a token's loss is minus its log-prob, times its weight.
    """

    def update(self, request: UpdateRequest) -> UpdateResult:
        """Apply one update per mini-batch; return the same metrics on every rank.

        Without a ratio there is no pass for old log-probs before the updates.
        """
        batch, settings = request.batch, self.settings
        self.offload.load("parameters")
        split = self.splitter.split(batch, predicted=batch.loss_weights != 0.0, policy_version=None)
        if settings.trainer.router_aux_loss_coef:
            # the load-balancing loss needs the routing of the whole step
            with self.experts.counted():
                for mini_batch in split:
                    self.logprobs_of(mini_batch)
        split = [part.with_policy([_without_old_policy(one) for one in part]) for part in split]
        sums, grad_norms, num_left_out = self.apply_updates(
            request,
            split,
            critic=None,
            search=self.bound_search(),
            recorder=UpdateRecorder(batch, ()),
        )
        metrics = summarize(
            sums,
            num_mini_batches=len(split),
            num_left_out=num_left_out,
            grad_norms=grad_norms,
            lr=settings.lr_at(request.step) or 0.0,
            version_gaps=batch.policy_versions[:0],
            importance=settings.algorithm.importance,
        )
        balance = self.experts.result() if settings.trainer.router_aux_loss_coef else {}
        self.offload.evict(*BETWEEN_UPDATES)
        return UpdateResult(
            metrics={name: metrics[name] for name in METRICS} | balance,
            num_dropped_tokens=0,
            rank_tokens=(sum(micro_batch.num_tokens for part in split for micro_batch in part),),
        )


def _without_old_policy(micro_batch: MicroBatch) -> MicroBatch:
    # the loss has no ratio: old log-probs only have to be finite
    zeros = torch.zeros_like(micro_batch.loss_weights)
    return replace(micro_batch, proximal=zeros, logprobs_old=zeros)
