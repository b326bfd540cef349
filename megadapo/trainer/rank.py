"""One rank of the trainer: its part of the model, the optimizer, and what can be asked of it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from megadapo.algorithm.bapo import BapoBounds
from megadapo.cluster.heartbeat import piece_done
from megadapo.data.batch import PackedBatch
from megadapo.errors import DamageError
from megadapo.models.description import describe_model
from megadapo.models.folder import read_hf_config, resolve_model_folder
from megadapo.trainer.checkpoint_writer import CheckpointWriter
from megadapo.trainer.checkpointing import (
    load_checkpoint,
    num_bytes_written,
    reader_of,
    take_snapshot,
)
from megadapo.trainer.clip_bounds import BoundSearch
from megadapo.trainer.cpu_platform import CPU
from megadapo.trainer.critic import Critic
from megadapo.trainer.critic_step import CriticStep
from megadapo.trainer.expert_balance import ExpertBalance
from megadapo.trainer.gradient_buffers import (
    gather_weights_now,
    wait_for_weight,
    wrap_for_gradients,
)
from megadapo.trainer.head import PolicyHead
from megadapo.trainer.initialize import initialize_randomly
from megadapo.trainer.kl import with_kl_in_reward, with_reference
from megadapo.trainer.metrics import MiniBatchSums, summarize
from megadapo.trainer.micro_batch import (
    MicroBatch,
    MicroBatchBuilder,
    trained_tokens,
    version_gaps,
)
from megadapo.trainer.mini_batch import MiniBatchCutter
from megadapo.trainer.model import (
    build_chunks,
    rotary_of_own_layers,
    transformer_config,
)
from megadapo.trainer.model_layout import validate_model_layout
from megadapo.trainer.off_policy import OldPolicy, old_policy
from megadapo.trainer.offload import Kind, Offload, TrainedModel
from megadapo.trainer.optimizer import build_optimizer, step_if_finite
from megadapo.trainer.parallel import context_part, join_groups, leave_groups
from megadapo.trainer.position import parameters_by_global_name, shard_position
from megadapo.trainer.recorder import UpdateRecorder
from megadapo.trainer.reference_policy import ReferencePolicy
from megadapo.trainer.result import UpdateResult
from megadapo.trainer.router_replay import check_choices
from megadapo.trainer.settings import CRITIC_FOLDER, Rendezvous, TrainerSettings
from megadapo.trainer.shape_probe import probe_shape
from megadapo.trainer.step import compute_gradients, compute_logprobs, finalize_sums
from megadapo.weights.disk.export import export_weights
from megadapo.weights.disk.gather import ProcessGroups, gather_weights
from megadapo.weights.disk.hashed_files import FileEntry, Files, check_files
from megadapo.weights.disk.load import import_weights
from megadapo.weights.layout.layout import ModelLayout
from megadapo.weights.sync.sender import HeldWeightSender, WeightSender

BETWEEN_UPDATES: tuple[Kind, Kind] = ("gradients", "optimizer")
"""What may leave the device when a step's updates are done."""


class TrainerRank:
    """Model, optimizer and step of one rank. Every method but the properties is collective."""

    def __init__(
        self,
        settings: TrainerSettings,
        rendezvous: Rendezvous,
        listener: socket.socket | None = None,
    ) -> None:
        """`listener`: rank 0's open socket at the rendezvous; None makes it open one."""
        self.settings = settings
        self.model_folder = resolve_model_folder(
            settings.model.path, with_weights=settings.model.init == "pretrained"
        )
        self.model = describe_model(read_hf_config(self.model_folder))
        validate_model_layout(self.model, settings.trainer)
        dtype = getattr(torch, settings.model.dtype)
        self.config = transformer_config(self.model, settings.trainer, dtype=dtype)
        join_groups(rendezvous, settings.trainer, listener, seed=settings.seed)
        self.device = _device()
        self.config.finalize_model_grads_func = finalize_sums
        chunks = build_chunks(self.config, self.model, settings.trainer)
        self.layout = ModelLayout(self.model.family, self.model.shape)
        self.position = shard_position(chunks, settings.trainer)
        self.groups = ProcessGroups(
            tp=mpu.get_tensor_model_parallel_group(),
            pp=mpu.get_pipeline_model_parallel_group(),
            ep=mpu.get_expert_model_parallel_group(),
            etp=mpu.get_expert_tensor_parallel_group(),
        )
        self.parameters = parameters_by_global_name(chunks)
        self._set_weights()
        # megatron-core copies weights into its buffers and masters here: they must be set before
        self.chunks = wrap_for_gradients(chunks, self.config, settings.trainer)
        self.optimizer = build_optimizer(self.chunks, settings.trainer.optimizer)
        self.experts = ExpertBalance(self.chunks, coef=settings.trainer.router_aux_loss_coef)
        self.reference = (
            ReferencePolicy(settings.reference, self.chunks, self.parameters)
            if settings.objective.kl_coef != 0.0
            else None
        )
        self.critic: Critic | None = None
        if settings.critic is not None:
            self.critic = Critic(settings, policy=self.model, device=self.device)
        self.writer = CheckpointWriter(torch.distributed.get_rank())
        self.head = PolicyHead(
            objective=settings.objective,
            temperature=settings.temperature,
            vocab_size=self.layout.shape.vocab_size,
            wait_for_weight=partial(wait_for_weight, self.chunks[-1]),
        )
        models = [TrainedModel(self.chunks, self.optimizer)]
        if self.critic is not None:
            models.append(TrainedModel(self.critic.chunks, self.critic.optimizer))
        self.offload = Offload(settings.trainer.offload, models, self.device)
        self.offload.leave(*BETWEEN_UPDATES)
        shards = (self.parameters, self.layout, self.position, torch.distributed.get_rank())
        present = self.offload.present_weights
        self.weight_sender = WeightSender(*shards, present=present)
        self.held_sender = HeldWeightSender(*shards, present=present)
        self.cutter = MiniBatchCutter(
            MicroBatchBuilder(
                inverse_frequencies=rotary_of_own_layers(self.model),
                token_multiple=settings.trainer.tensor_parallel,
                part=context_part(),
                takes_experts=settings.trainer.router_replay,
            ),
            settings.trainer,
            hidden_size=self.layout.shape.hidden_size,
            device=self.device,
        )

    def update(
        self,
        batch: PackedBatch,
        *,
        policy_version: int,
        step: int,
        kl_reward_coef: float | None = None,
        texts: PackedBatch | None = None,
        recorder: UpdateRecorder | None = None,
    ) -> UpdateResult:
        """All mini-batches of one rollout step, one optimizer update each.

        Old log-probs are taken for the whole batch before the first update, in the micro-batches
        of the updates.

        Args:
            policy_version: of the present weights, to find the tokens they sampled.
            step: rollout step, which decides the learning rate; the first is 1.
            kl_reward_coef: of the KL divergence in the reward, in place of the objective's.
            texts: as many mini-batches of texts, whose language-model loss is part of the updates.
            recorder: is told what this rank computes.

        Returns:
            The same numbers on every rank.
        """
        recorder = recorder or UpdateRecorder(batch, ())
        self._check_experts(batch)
        self.offload.bring("parameters")
        self.offload.fetch("optimizer")
        lr = self._learning_rate(step)
        importance, objective = self.settings.importance, self.settings.objective
        if kl_reward_coef is None:
            kl_reward_coef = objective.kl_reward_coef
        trained, num_dropped = trained_tokens(batch)
        gaps = version_gaps(batch, policy_version)
        predicted = trained & (gaps == 0) if importance.stale_logprobs == "none" else trained
        cut = self.cutter.cut(batch, predicted=predicted, policy_version=policy_version)
        of_texts = [()] * len(cut) if texts is None else self.cutter.cut_responses(texts)
        with self.experts.counted():
            old = [self._old_policies(micro_batches, recorder) for micro_batches in cut]
        proximal = [policy.proximal for policy in old[0]] if old else []
        old = self.hold_against_reference(batch, predicted, cut, old, kl_reward_coef=kl_reward_coef)
        probe = probe_shape(
            cut,
            build=partial(
                self.cutter.alone, batch, predicted=predicted, policy_version=policy_version
            ),
            score=self.logprobs_of,
            multiple_of=self.cutter.multiple_of,
        )
        values = None
        if self.critic is not None:
            values = CriticStep(self.critic, cut, old, step, kl_coef=kl_reward_coef)
        old = old if values is None else values.old
        search = self.bound_search()
        lengths = np.diff(batch.cu_seqlens)
        reduced, grad_norms, bounds = [], [], []
        self.offload.bring(*BETWEEN_UPDATES)
        for number, (micro_batches, policies) in enumerate(zip(cut, old, strict=True)):
            self.experts.prepare(int(lengths[batch.mini_batches[number]].sum()))
            sums, found = self._gradients(
                micro_batches, policies, of_texts[number], recorder, search
            )
            bounds += found
            if number == 0:
                probe.add_to(sums, micro_batches, proximal)
            sums = sums.reduced(contributes=self.has_results, device=self.device)
            loss = sums.loss + sums.text_loss
            outcome = step_if_finite(self.optimizer, loss=loss, lr=lr)
            reduced.append(sums)
            if outcome.applied:
                grad_norms.append(outcome.grad_norm)
            if values is not None:
                values.update(number)
            piece_done()
        # whoever reads weights after this (save, export, weight updates) finds them whole
        gather_weights_now(self.chunks)
        if self.reference is not None:
            self.reference.follow(step)
        critic = None if values is None else values.result()
        self.offload.leave(*BETWEEN_UPDATES)
        return summarize(
            reduced,
            grad_norms=grad_norms,
            skipped_updates=len(cut) - len(grad_norms),
            num_dropped_tokens=num_dropped,
            lr=lr or 0.0,
            version_gaps=gaps[trained],
            importance=importance,
            bounds=bounds,
            kl_coef=objective.kl_loss_coef + kl_reward_coef,
            critic=critic,
            experts=self.experts.result(),
        )

    def logprobs(self, batch: PackedBatch) -> np.ndarray | None:
        """[T] fp32 log-probs of the response tokens this rank computed, NaN elsewhere.

        None on ranks that compute none or the same as another.
        """
        self._check_experts(batch)
        result = np.full(len(batch.tokens), np.nan, dtype=np.float32)
        with self.offload.present("parameters"):
            for micro_batches in self.cutter.cut_responses(batch):
                computed = self.logprobs_of(micro_batches)
                for micro_batch, values in zip(micro_batches, computed, strict=False):
                    result[micro_batch.source] = values[micro_batch.rows].cpu().numpy()
        return result if self.has_results else None

    def begin_save(self, folder: Path) -> int:
        """Copy weights and optimizer to the host and begin to write them; returns the bytes.

        Any other split can load them. Training may go on; `writer.report` says what has become of
        it.
        """
        number = self.writer.num_begun
        with self.offload.present("parameters", "optimizer"):
            snapshots = {"": take_snapshot(self.chunks, self.optimizer, number=number)}
            if self.critic is not None:
                snapshots[CRITIC_FOLDER] = self.critic.snapshot(number)
        others: list[Callable[[Path], Files]] = []
        if self.reference is not None:
            others = [self.reference.snapshot(self.layout, self.position, self.model_folder)]
        num_bytes = sum(snapshot.num_bytes for snapshot in snapshots.values())
        self.writer.begin(folder, snapshots, others)
        return num_bytes

    def checkpoint_bytes(self) -> int:
        """What this rank writes into a checkpoint, a reference policy's weights left out."""
        with self.offload.present("parameters", "optimizer"):
            num_bytes = num_bytes_written(self.chunks, self.optimizer)
            if self.critic is not None:
                num_bytes += num_bytes_written(self.critic.chunks, self.critic.optimizer)
        return num_bytes

    def check_files(self, folder: Path, files: Mapping[str, FileEntry]) -> None:
        """Compare a checkpoint's files with their hashes, each on the rank that will read it.

        Raises:
            DamageError: on every rank, one or more differ.
        """
        rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        own = {name: files[name] for name in files if reader_of(name, num_ranks) == rank}
        problems: list[str] = [""] * num_ranks
        try:
            check_files(folder, own)
            problem = ""
        except DamageError as error:
            problem = str(error)
        torch.distributed.all_gather_object(problems, problem)
        if found := [problem for problem in problems if problem]:
            raise DamageError("; ".join(found))

    def load(self, folder: Path) -> None:
        """Read what was saved, at whatever split it was written.

        Raises:
            CheckpointError: it is damaged, or of another model.
        """
        with self.offload.present("parameters", "optimizer"):
            load_checkpoint(self.chunks, self.optimizer, folder)
            if self.reference is not None:
                self.reference.load(folder, self.layout, self.position)
            if self.critic is not None:
                self.critic.load(folder)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder with the present weights, from the first rank."""
        with self.offload.present("parameters"):
            tensors = gather_weights(self.parameters, self.layout, self.position, self.groups)
            if torch.distributed.get_rank() == 0:
                export_weights(
                    tensors,
                    folder,
                    layout=self.layout,
                    dtype=self.config.params_dtype,
                    base_folder=self.model_folder,
                )
            else:
                for _ in tensors:  # the gathering is collective
                    pass
        torch.distributed.barrier()

    def leave_to_engines(self) -> None:
        """Free what engines on the same GPU may have while they generate."""
        self.offload.leave("parameters", *BETWEEN_UPDATES)

    def leave(self) -> None:
        """Take the process groups apart."""
        leave_groups()

    @property
    def has_results(self) -> bool:
        """Whether this rank's sums count: one tensor-parallel rank of each last stage, of which
        context-parallel ranks have different tokens."""
        return bool(mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0)

    @property
    def data_parallel_rank(self) -> int:
        """Which of the ranks with the same weights this is, context-parallel ones among them."""
        return int(mpu.get_data_parallel_rank(with_context_parallel=True))

    def logprobs_of(
        self, micro_batches: Sequence[MicroBatch], *, replays: bool = True
    ) -> list[Tensor]:
        with torch.no_grad():
            return compute_logprobs(self.chunks, self.head, micro_batches, replays=replays)

    def _check_experts(self, batch: PackedBatch) -> None:
        if self.settings.trainer.router_replay:
            check_choices(batch, self.model)

    def _old_policies(
        self, micro_batches: Sequence[MicroBatch], recorder: UpdateRecorder
    ) -> list[OldPolicy]:
        """From the mini-batch's old log-probs; how long they take is this rank's own speed."""
        start = time.perf_counter()
        logprobs = self.logprobs_of(micro_batches)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        recorder.add_share(micro_batches, time.perf_counter() - start)
        return [
            old_policy(micro_batch, values, self.settings.importance)
            for micro_batch, values in zip(micro_batches, logprobs, strict=False)
        ]

    def hold_against_reference(
        self,
        batch: PackedBatch,
        trained: np.ndarray,
        cut: Sequence[Sequence[MicroBatch]],
        old: list[list[OldPolicy]],
        *,
        kl_reward_coef: float,
    ) -> list[list[OldPolicy]]:
        """`old` with the reference's log-probs, from the same micro-batches, where there is one.

        With new advantages where rewards have a KL divergence in them.
        """
        if self.reference is None:
            return old
        with self.reference.in_place():
            # another model, with routers of its own
            logprobs_ref = [self.logprobs_of(part, replays=False) for part in cut]
        objective = self.settings.objective
        held = [
            with_reference(*parts, objective) for parts in zip(cut, old, logprobs_ref, strict=True)
        ]
        if objective.kl_in == "loss" or self.critic is not None:
            return held
        return with_kl_in_reward(
            batch,
            trained,
            cut,
            held,
            settings=self.settings,
            kl_coef=kl_reward_coef,
            contributes=self.has_results,
            device=self.device,
        )

    def _learning_rate(self, step: int) -> float | None:
        """None while the critic alone is trained."""
        critic = self.settings.critic
        if critic is not None and step <= critic.warmup:
            return None
        return self.settings.trainer.optimizer.lr_at(step)

    def bound_search(self) -> BoundSearch | None:
        """What finds the clip bounds of a step's updates, where they are not fixed."""
        if self.settings.objective.gate != "bapo":
            return None
        return BoundSearch(
            self.settings.bapo,
            score=self.logprobs_of,
            contributes=self.has_results,
            device=self.device,
        )

    def _gradients(
        self,
        micro_batches: Sequence[MicroBatch],
        old: list[OldPolicy],
        texts: Sequence[MicroBatch],
        recorder: UpdateRecorder,
        search: BoundSearch | None,
    ) -> tuple[MiniBatchSums, list[BapoBounds]]:
        """Leave the mini-batch's gradients in the buffers; `old`: what it is held against.

        Returns its sums and the clip bounds that were searched for it, if any.
        """
        head, bounds = self.head, []
        if search is not None:
            bounds = [search.bounds(micro_batches, old)]
            head = replace(head, objective=bounds[0].put_into(head.objective))
        sums, logprobs = compute_gradients(self.chunks, head, micro_batches, old, texts)
        if self.has_results:
            recorder.add_update(micro_batches, old, logprobs)
        if search is not None:
            search.observe(micro_batches, old, logprobs)
        return sums, bounds

    def _set_weights(self) -> None:
        settings = self.settings
        keeps_first = settings.objective.kl_coef != 0.0 and settings.reference.kind == "fixed"
        if not (settings.reads_weights or keeps_first):
            return
        if self.settings.model.init == "pretrained":
            import_weights(self.model_folder, self.parameters, self.layout, self.position)
            return
        initialize_randomly(
            self.parameters,
            self.layout,
            self.position,
            std=self.model.initializer_range,
            seed=self.settings.seed,
        )


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
