"""One rank of the trainer: its part of the model, the optimizer, and a step of training."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megadapo.algorithm.bapo import BapoBounds
from megadapo.algorithm.mini_batches import update_order
from megadapo.algorithm.objective import COVARIANCE_GATES
from megadapo.cluster.watch.heartbeat import report_progress
from megadapo.data.batch import PackedBatch
from megadapo.models.description import describe_model
from megadapo.models.folder import read_hf_config, resolve_model_folder
from megadapo.trainer.batch.micro_batch import MicroBatch
from megadapo.trainer.batch.mini_batch import MicroBatchSplitter, MiniBatch
from megadapo.trainer.checkpoint.checkpoint import (
    CheckpointWriter,
    load_checkpoint,
    num_bytes_written,
)
from megadapo.trainer.checkpoint.pieces import OwnedRun
from megadapo.trainer.critic import Critic
from megadapo.trainer.model.experts import ExpertBalance, check_choices
from megadapo.trainer.model.head import PolicyHead
from megadapo.trainer.model.model_layout import validate_model_layout
from megadapo.trainer.model.parallel import has_results, join_groups
from megadapo.trainer.offload import BETWEEN_UPDATES, Offload
from megadapo.trainer.reference import ReferencePolicy
from megadapo.trainer.trained_model import TrainedModel
from megadapo.trainer.types import (
    CRITIC_FOLDER,
    RANK_SECONDS,
    REFERENCE_FOLDER,
    Metrics,
    Rendezvous,
    TrainerSettings,
    UpdateRequest,
    UpdateResult,
)
from megadapo.trainer.update.metrics import Sums, rank_tokens, recorded_tokens, summarize
from megadapo.trainer.update.optimizer import gather_weights_now, step_if_finite, wait_for_weight
from megadapo.trainer.update.step import (
    compute_gradients,
    compute_logprobs,
    find_bounds,
    with_chosen_tokens,
    with_old_policy,
)
from megadapo.weights.config import SenderName
from megadapo.weights.sync.sender import WeightSender


class TrainerRank(TrainedModel):
    """Model and optimizer of one rank. All ranks call each method at once, unless it says
    otherwise; properties need no other rank."""

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
        algorithm, reference = settings.algorithm, settings.algorithm.reference
        has_kl = algorithm.objective.kl_coef != 0.0
        keeps_first = has_kl and reference.path is None and reference.refresh_every is None
        model = describe_model(read_hf_config(folder))
        # every rank raises before it joins: none waits for another
        validate_model_layout(model, settings.trainer)
        self.device = join_groups(rendezvous, settings.trainer, listener, seed=settings.seed)
        cuda = self.device.type == "cuda"
        super().__init__(
            settings,
            model,
            settings.trainer.optimizer,
            folder,
            # a fixed reference policy has the first weights, also if a checkpoint is loaded next
            needs_weights=settings.reads_weights or keeps_first,
        )
        self.experts = ExpertBalance(self.chunks, coef=settings.trainer.router_aux_loss_coef)
        self.critic: Critic | None = None
        if settings.critic is not None:
            self.critic = Critic(settings, policy=self.model, device=self.device)
        self.writer = CheckpointWriter(torch.distributed.get_rank(), pinned=cuda)
        self.head = PolicyHead(
            objective=algorithm.objective,
            importance=algorithm.importance,
            temperature=settings.temperature,
            vocab_size=self.layout.shape.vocab_size,
            wait_for_weight=partial(wait_for_weight, self.chunks[-1]),
            tp_invariant=settings.trainer.deterministic or not cuda,
        )
        self.reference = ReferencePolicy(self, self.head, self.device) if has_kl else None
        self.checkpoint_bytes = sum(num_bytes_written(runs) for runs, _ in self._saved.values())
        """Size of this rank's part of a checkpoint."""
        models = [self] if self.critic is None else [self, self.critic]
        self.offload = Offload(settings.trainer.offload, models, self.device)
        self.offload.evict(*BETWEEN_UPDATES)
        shards = (self.parameters, self.layout, self.position, torch.distributed.get_rank())
        new_sender = partial(WeightSender, *shards, present=self.offload.values_of)
        self.weight_senders = {name: new_sender() for name in get_args(SenderName)}
        self.splitter = MicroBatchSplitter(self.model, settings.trainer, self.device)

    def update(self, request: UpdateRequest) -> UpdateResult:
        """Train on all mini-batches of one rollout step; return the same metrics on every rank.

        The mini-batches get old log-probs and advantages before the first update, in the same
        micro-batches as the updates. One mini-batch alone may get its old log-probs in its update
        (`first_pass_is_old_policy`).
        """
        batch, algorithm = request.batch, self.settings.algorithm
        kl_coef = request.kl_reward_coef
        if kl_coef is None:
            kl_coef = algorithm.objective.kl_reward_coef
        self.check_experts(batch)
        self.offload.load("parameters")
        self.offload.prefetch("optimizer")
        version = request.policy_version
        leaves_out_stale = algorithm.importance.stale_logprobs == "none"
        predicted = batch.predicted(version, leaves_out_stale=leaves_out_stale)
        split = self.splitter.split(batch, predicted=predicted, policy_version=version)
        seconds: list[float] = []
        if not self.first_pass_is_old_policy(len(split), checks_ratio=request.checks_first_ratio):
            with self.experts.counted():
                split, own_seconds = with_old_policy(self.chunks, self.head, split)
            seconds.append(own_seconds)
        if self.reference is not None:
            split = self.reference.add_logprobs(
                batch, predicted, split, algorithm, kl_reward_coef=kl_coef
            )
        if self.critic is not None:
            split = self.critic.add_advantages(split, kl_coef=kl_coef)
        order = update_order(
            len(split), algorithm.passes, seed=self.settings.seed, step=request.step
        )
        self.offload.load("gradients")
        split, metrics = self._update_policy(request, split, order, kl_coef)
        if not seconds and self.device.type == "cuda":
            # one pass gave both log-probs
            metrics["policy/ratio_first_max_error"] = None
        if self.critic is not None:
            # a divergence that ends the policy's updates does not end the critic's
            self.offload.load("optimizer")
            metrics |= self.critic.fit(split, order, request.step)
        self.offload.evict(*BETWEEN_UPDATES)
        return UpdateResult(
            metrics=metrics | self.experts.result(),
            num_dropped_tokens=int(np.count_nonzero(batch.loss_weights) - batch.is_trained.sum()),
            of_ranks=rank_tokens(split) | {RANK_SECONDS: tuple(seconds)},
            recorded=recorded_tokens(batch, split) if batch.recorded and self.has_results else None,
        )

    def first_pass_is_old_policy(self, num_mini_batches: int, *, checks_ratio: bool) -> bool:
        """Return whether the update's own forward pass gives the old log-probs.

        With one mini-batch, both passes have the same weights.

        Args:
            checks_ratio: whether a GPU repeats the pass, so that the first ratio shows whether its
                kernels repeat their bits.
        """
        is_read_before = (
            self.settings.algorithm.reads_old_policy or self.config.num_moe_experts is not None
        )
        is_repeated = checks_ratio and self.device.type == "cuda"
        return num_mini_batches == 1 and not (is_read_before or is_repeated)

    def _update_policy(
        self, request: UpdateRequest, split: list[MiniBatch], order: Sequence[int], kl_coef: float
    ) -> tuple[list[MiniBatch], Metrics]:
        """Apply the policy's updates, until it diverges, and return their metrics; `order`: the
        mini-batch of each. Return the mini-batches too, with what their first update computed."""
        batch, algorithm = request.batch, self.settings.algorithm
        lr, lengths = self.settings.lr_at(request.step), np.diff(batch.cu_seqlens)
        pretraining: Sequence[Sequence[MicroBatch]] = [()] * len(order)
        if request.pretraining is not None:
            pretraining = self.splitter.split_responses(request.pretraining)
        split, num_left_out = list(split), 0
        head = self._head_of_step(request)
        measured: list[Sums] = []
        grad_norms: list[float] = []
        bounds: list[BapoBounds] = []
        shares: list[float] = []
        for number, texts in zip(order, pretraining, strict=True):
            self.experts.prepare(int(lengths[batch.mini_batches[number]].sum()))
            split[number] = self._with_chosen_tokens(request, number, split[number], shares)
            own_head = self._head_of_update(head, split[number], bounds)
            sums, computed = compute_gradients(self.chunks, own_head, split[number], texts)
            split[number] = split[number].with_policy(computed)
            measured.append(sums)
            divergence = sums.value("policy/approx_kl") or 0.0
            if algorithm.max_kl is not None and divergence > algorithm.max_kl:
                num_left_out = len(order) - len(measured) + 1
                break
            # until here its copies to the GPU are beside the forward and backward pass
            self.offload.load("optimizer")
            loss = sums["policy/loss"] + sums["pretraining/loss"]
            norm = step_if_finite(self.optimizer, loss=loss, lr=lr)
            grad_norms += [] if norm is None else [norm]
            report_progress()
        # saves and weight updates read the weights after this
        gather_weights_now(self.chunks)
        if self.reference is not None:
            self.reference.follow(request.step)
        return split, summarize(
            measured,
            num_mini_batches=len(split),
            num_left_out=None if algorithm.max_kl is None else num_left_out,
            grad_norms=grad_norms,
            lr=lr or 0.0,
            version_gaps=batch.version_gaps(request.policy_version)[batch.is_trained],
            bounds=bounds,
            chosen_shares=shares,
            kl_coef=algorithm.objective.kl_loss_coef + kl_coef,
            old_kl_coef=head.objective.old_kl_coef,
        )

    def _head_of_step(self, request: UpdateRequest) -> PolicyHead:
        """Return the head with the coefficients that the driver moves from step to step."""
        moved = {"old_kl_coef": request.old_kl_coef, "entropy_coef": request.entropy_coef}
        known = {name: coef for name, coef in moved.items() if coef is not None}
        objective = self.settings.algorithm.objective.model_copy(update=known)
        return replace(self.head, objective=objective)

    def _head_of_update(
        self, head: PolicyHead, mini_batch: MiniBatch, bounds: list[BapoBounds]
    ) -> PolicyHead:
        """Return the head; with gate "bapo" it has the update's bounds, which join `bounds`."""
        algorithm = self.settings.algorithm
        if algorithm.objective.gate != "bapo":
            return head
        is_first = not bounds
        found = find_bounds(self.chunks, head, mini_batch, algorithm.bapo, is_first=is_first)
        bounds.append(found)
        return replace(head, objective=found.put_into(head.objective))

    def _with_chosen_tokens(
        self, request: UpdateRequest, number: int, mini_batch: MiniBatch, shares: list[float]
    ) -> MiniBatch:
        """Return the mini-batch; with gate "clip_cov" or "kl_cov" it has the update's choice of
        tokens, whose share joins `shares`."""
        if self.head.objective.gate not in COVARIANCE_GATES:
            return mini_batch
        chosen, share = with_chosen_tokens(
            self.chunks,
            self.head,
            mini_batch,
            request.batch.tokens_with_loss(number),
            draw=(self.settings.seed, request.step, len(shares)),
            is_first=not shares,
        )
        shares.append(share)
        return chosen

    def logprobs(self, batch: PackedBatch) -> np.ndarray | None:
        """Return [T] fp32 log-probs of the response tokens this rank computed, NaN elsewhere.

        None on ranks that compute none or the same as another rank.
        """
        self.check_experts(batch)
        result = np.full(len(batch.tokens), np.nan, dtype=np.float32)
        with self.offload.resident("parameters"):
            for mini_batch in self.splitter.split_responses(batch):
                computed = self.logprobs_of(mini_batch)
                for micro_batch, values in zip(mini_batch, computed, strict=False):
                    result[micro_batch.batch_index] = values[micro_batch.rows].cpu().numpy()
        return result if self.has_results else None

    def begin_save(self, folder: Path) -> int:
        """Copy weights and optimizer to the host, start to write them, return their bytes.

        Training may continue meanwhile; `writer.report` returns the outcome.
        """
        return self.writer.save(folder, self._saved, values_of=self.offload.values_of)

    @property
    def _saved(self) -> dict[str, tuple[list[OwnedRun], MegatronOptimizer]]:
        """Runs of each folder of a checkpoint, and the optimizer that counts its updates."""
        saved = {"": (self.runs, self.optimizer)}
        if self.critic is not None:
            saved[CRITIC_FOLDER] = (self.critic.runs, self.critic.optimizer)
        if self.reference is not None and self.reference.runs:
            saved[REFERENCE_FOLDER] = (self.reference.runs, self.optimizer)
        return saved

    def load(self, folder: Path) -> None:
        """Read a checkpoint of any split."""
        with self.offload.resident("parameters", "optimizer"):
            load_checkpoint(self.runs, self.chunks, self.optimizer, folder)
            if self.reference is not None:
                self.reference.load(folder)
            if self.critic is not None:
                self.critic.load(folder)

    def leave_to_engines(self) -> None:
        """Free the memory of a shared GPU; until `take_gpu` nothing is loaded to it."""
        self.offload.evict("parameters", *BETWEEN_UPDATES)
        self.offload.engines_use_device = True

    def take_gpu(self) -> None:
        """Allow this rank to load its state: the engines on its GPU sleep."""
        self.offload.engines_use_device = False

    @property
    def has_results(self) -> bool:
        """Whether this rank's sums count."""
        return has_results()

    @property
    def data_parallel_rank(self) -> int:
        """Index among the ranks with the same weights, context-parallel ranks included."""
        return int(mpu.get_data_parallel_rank(with_context_parallel=True))

    def logprobs_of(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        return compute_logprobs(self.chunks, self.head, micro_batches)

    def check_experts(self, batch: PackedBatch) -> None:
        """Check with `trainer.router_replay` that the batch has the engines' experts."""
        if self.settings.trainer.router_replay:
            check_choices(batch, self.model)
