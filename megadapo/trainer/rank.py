"""One rank of the trainer: its part of the model, the optimizer, and a step of training."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megadapo.algorithm.mini_batches import update_order
from megadapo.cluster.watch.heartbeat import report_progress
from megadapo.data.batch import PackedBatch
from megadapo.models.description import describe_model
from megadapo.models.folder import read_hf_config, resolve_model_folder
from megadapo.trainer.batch.micro_batch import MicroBatch, old_policy, trained_tokens, version_gaps
from megadapo.trainer.batch.mini_batch import MicroBatchSplitter, MiniBatch
from megadapo.trainer.checkpoint.checkpoint import (
    CheckpointWriter,
    load_checkpoint,
    num_bytes_written,
)
from megadapo.trainer.checkpoint.pieces import OwnedRun
from megadapo.trainer.critic.critic import Critic, CriticStep
from megadapo.trainer.model.experts import ExpertBalance, check_choices
from megadapo.trainer.model.head import PolicyHead
from megadapo.trainer.model.model_layout import validate_model_layout
from megadapo.trainer.model.parallel import has_results, join_groups
from megadapo.trainer.offload import BETWEEN_UPDATES, Offload
from megadapo.trainer.reference import ReferencePolicy, Teacher
from megadapo.trainer.trained_model import TrainedModel
from megadapo.trainer.types import (
    CRITIC_FOLDER,
    REFERENCE_FOLDER,
    Metrics,
    Rendezvous,
    TrainerSettings,
    UpdateRequest,
    UpdateResult,
)
from megadapo.trainer.update.metrics import MiniBatchSums, UpdateRecorder, summarize
from megadapo.trainer.update.optimizer import gather_weights_now, step_if_finite, wait_for_weight
from megadapo.trainer.update.step import BoundSearch, compute_gradients, compute_logprobs
from megadapo.weights.sync.sender import WeightSender

LIKELIHOOD_METRICS = (
    *("tokens/trained", "policy/loss", "policy/entropy", "policy/token_probability_mean"),
    *("policy/grad_norm", "policy/lr", "policy/skipped_updates"),
)
"""Metrics of a policy's update that do not need an old policy, for `LikelihoodRank`."""


class TrainerRank(TrainedModel):
    """Model and optimizer of one rank. Every method is collective, properties are not."""

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
        uses_first = reference.path is None and reference.refresh_every is None
        keeps_first = algorithm.objective.kl_coef != 0.0 and uses_first
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
            # a fixed reference policy keeps them, also if a checkpoint is loaded next
            needs_weights=settings.reads_weights or keeps_first,
        )
        self.experts = ExpertBalance(self.chunks, coef=settings.trainer.router_aux_loss_coef)
        self.reference = self._reference_policy()
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
        self.checkpoint_bytes = sum(num_bytes_written(runs) for runs, _ in self._saved.values())
        """Size of this rank's part of a checkpoint."""
        models = [self] if self.critic is None else [self, self.critic]
        self.offload = Offload(settings.trainer.offload, models, self.device)
        self.offload.evict(*BETWEEN_UPDATES)
        shards = (self.parameters, self.layout, self.position, torch.distributed.get_rank())
        self.weight_sender, self.pinned_sender, self.published_sender = (
            WeightSender(*shards, present=self.offload.values_of) for _ in range(3)
        )
        self.splitter = MicroBatchSplitter(self.model, settings.trainer, self.device)

    def _reference_policy(self) -> ReferencePolicy | None:
        """Return the policy of the KL divergence, if the run has one."""
        algorithm = self.settings.algorithm
        teacher: Teacher | None = None
        if algorithm.objective.kl_coef == 0.0:
            return None
        if algorithm.reference.path is not None:
            teacher = Teacher(self.settings, policy=self.model, device=self.device)
        # the reference's routers choose their own experts
        score = partial(self.logprobs_of, replays=False)
        return ReferencePolicy(
            self.settings, self.chunks, self.parameters, score=score, teacher=teacher
        )

    def update(self, request: UpdateRequest) -> UpdateResult:
        """Train on all mini-batches of one rollout step; return the same metrics on every rank.

        Old log-probs of the whole batch are computed before the first update, in the same
        micro-batches as the updates, or by the first update (`first_pass_is_old_policy`).
        """
        batch, version = request.batch, request.policy_version
        importance = self.settings.algorithm.importance
        self.check_experts(batch)
        self.offload.load("parameters")
        self.offload.prefetch("optimizer")
        kl_coef = request.kl_reward_coef
        if kl_coef is None:
            kl_coef = self.settings.algorithm.objective.kl_reward_coef
        trained, num_dropped = trained_tokens(batch)
        gaps = version_gaps(batch, version)
        predicted = trained & (gaps == 0) if importance.stale_logprobs == "none" else trained
        split = self.splitter.split(batch, predicted=predicted, policy_version=version)
        split, seconds = self._with_old_policy(split, checks_ratio=request.checks_first_ratio)
        if self.reference is not None:
            split = self.reference.add_logprobs(
                batch, predicted, split, self.settings.algorithm, kl_reward_coef=kl_coef
            )
        critic = None
        if self.critic is not None:
            critic = CriticStep(self.critic, split, request.step, kl_coef=kl_coef)
            split = critic.split
        recorder = UpdateRecorder(batch, batch.recorded)
        metrics = self.apply_updates(
            request,
            split,
            critic=critic,
            recorder=recorder,
            version_gaps=gaps[trained],
            kl_coef=self.settings.algorithm.objective.kl_loss_coef + kl_coef,
        )
        if not seconds and self.device.type == "cuda":
            # one pass gave both log-probs
            metrics["policy/ratio_first_max_error"] = None
        of_critic = {} if critic is None else critic.result()
        self.offload.evict(*BETWEEN_UPDATES)
        return UpdateResult(
            metrics=metrics | of_critic | self.experts.result(),
            num_dropped_tokens=num_dropped,
            rank_tokens=(sum(micro_batch.num_tokens for part in split for micro_batch in part),),
            rank_seconds=tuple(seconds),
            recorded=recorder.tokens() if batch.recorded and self.has_results else None,
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

    def _with_old_policy(
        self, split: list[MiniBatch], *, checks_ratio: bool
    ) -> tuple[list[MiniBatch], list[float]]:
        """Return the mini-batches with their old log-probs, and the time to compute them.

        If the first update computes them, the mini-batches are as before, and there is no time.
        """
        if self.first_pass_is_old_policy(len(split), checks_ratio=checks_ratio):
            return split, []
        found, seconds = [], 0.0
        with self.experts.counted():
            for mini_batch in split:
                start = time.perf_counter()
                logprobs = self.logprobs_of(mini_batch)
                if self.device.type == "cuda":
                    torch.cuda.current_stream().synchronize()
                seconds += time.perf_counter() - start
                pairs = zip(mini_batch, logprobs, strict=False)
                computed = [old_policy(*pair, self.settings.algorithm.importance) for pair in pairs]
                found.append(mini_batch.with_policy(computed))
        return found, [seconds]

    def bound_search(self) -> BoundSearch:
        """Return the search for a step's clip bounds, which keeps them if they are fixed."""
        return BoundSearch(
            self.settings.algorithm.bapo,
            dual_clip=self.settings.algorithm.objective.dual_clip,
            score=self.logprobs_of,
            contributes=self.has_results,
            device=self.device,
        )

    def apply_updates(
        self,
        request: UpdateRequest,
        split: Sequence[MiniBatch],
        *,
        critic: CriticStep | None,
        recorder: UpdateRecorder,
        version_gaps: np.ndarray,
        kl_coef: float,
    ) -> Metrics:
        """Apply the updates of all passes; return the policy's metrics.

        Args:
            split: mini-batches with their old policy, or one whose first update computes it.
            version_gaps: as for `summarize`, like `kl_coef`.
        """
        search = self.bound_search()
        sums, grad_norms, num_left_out = self._run_updates(request, split, critic, search, recorder)
        # saves and weight updates read the weights after this
        gather_weights_now(self.chunks)
        if self.reference is not None:
            self.reference.follow(request.step)
        return summarize(
            sums,
            num_mini_batches=len(split),
            num_left_out=None if self.settings.algorithm.max_kl is None else num_left_out,
            grad_norms=grad_norms,
            lr=self.settings.lr_at(request.step) or 0.0,
            version_gaps=version_gaps,
            importance=self.settings.algorithm.importance,
            bounds=search.found,
            kl_coef=kl_coef,
        )

    def _run_updates(
        self,
        request: UpdateRequest,
        split: Sequence[MiniBatch],
        critic: CriticStep | None,
        search: BoundSearch,
        recorder: UpdateRecorder,
    ) -> tuple[list[MiniBatchSums], list[float], int]:
        """Run the updates of all passes; a divergence ends the policy's, and not the critic's.

        Returns:
            The sums of each measured update over all ranks, the gradient norms of applied updates,
            and the number of updates left out.
        """
        settings, max_kl = self.settings, self.settings.algorithm.max_kl
        passes = settings.algorithm.passes
        order = update_order(len(split), passes, seed=settings.seed, step=request.step)
        pretraining: Sequence[Sequence[MicroBatch]] = [()] * len(order)
        if request.pretraining is not None:
            pretraining = self.splitter.split_responses(request.pretraining)
        split, lengths = list(split), np.diff(request.batch.cu_seqlens)
        reduced: list[MiniBatchSums] = []
        grad_norms: list[float] = []
        num_left_out, lr = 0, settings.lr_at(request.step)
        self.offload.load("gradients")
        for update, number in enumerate(order):
            if num_left_out == 0:
                self.experts.prepare(int(lengths[request.batch.mini_batches[number]].sum()))
                sums, logprobs, known = self._gradients(split[number], pretraining[update], search)
                split[number] = split[number].with_policy(known)
                if update < len(split):
                    recorder.add_update(split[number], logprobs)
                sums = sums.reduced(contributes=self.has_results, device=self.device)
                reduced.append(sums)
                if max_kl is not None and sums.mean_kl > max_kl:
                    num_left_out = len(order) - update
            # until here its copies to the GPU are beside the forward and backward pass
            self.offload.load("optimizer")
            if num_left_out == 0:
                loss = sums.loss + sums.pretraining_loss
                norm = step_if_finite(self.optimizer, loss=loss, lr=lr)
                grad_norms += [] if norm is None else [norm]
            if critic is not None:
                critic.update(number)
            report_progress()
        return reduced, grad_norms, num_left_out

    def _gradients(
        self,
        mini_batch: MiniBatch,
        pretraining: Sequence[MicroBatch],
        search: BoundSearch,
    ) -> tuple[MiniBatchSums, list[Tensor], list[MicroBatch]]:
        """Search for the update's bounds, and leave its gradients in the buffers."""
        head = replace(self.head, objective=search.objective(self.head.objective, mini_batch))
        return compute_gradients(self.chunks, head, mini_batch, pretraining)

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

    def logprobs_of(
        self, micro_batches: Sequence[MicroBatch], *, replays: bool = True
    ) -> list[Tensor]:
        with torch.no_grad():
            return compute_logprobs(self.chunks, self.head, micro_batches, replays=replays)

    def check_experts(self, batch: PackedBatch) -> None:
        """Check with `trainer.router_replay` that the batch has the engines' experts."""
        if self.settings.trainer.router_replay:
            check_choices(batch, self.model)


class LikelihoodRank(TrainerRank):
    """A rank that trains on given answers, as for supervised fine-tuning.

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
        metrics = self.apply_updates(
            request,
            split,
            critic=None,
            recorder=UpdateRecorder(batch, ()),
            version_gaps=batch.policy_versions[:0],
            kl_coef=0.0,
        )
        balance = self.experts.result() if settings.trainer.router_aux_loss_coef else {}
        self.offload.evict(*BETWEEN_UPDATES)
        return UpdateResult(
            metrics={name: metrics[name] for name in LIKELIHOOD_METRICS} | balance,
            num_dropped_tokens=0,
            rank_tokens=(sum(micro_batch.num_tokens for part in split for micro_batch in part),),
        )


def _without_old_policy(micro_batch: MicroBatch) -> MicroBatch:
    # the loss has no ratio: old log-probs only have to be finite
    zeros = torch.zeros_like(micro_batch.loss_weights)
    return replace(micro_batch, proximal=zeros, logprobs_old=zeros)
