"""Actions of a trainer rank for tests; they run inside the trainer processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megadapo.algorithm.importance import ImportanceConfig
from megadapo.algorithm.objective import COVARIANCE_GATES, PolicyObjective
from megadapo.data.batch import PackedBatch
from megadapo.errors import CheckpointError
from megadapo.trainer.types import Metrics, Rendezvous, TrainerSettings, UpdateRequest, UpdateResult
from tests.support.trainer.batches import COVARIANCE_DRAW, TEXT_COEF

if TYPE_CHECKING:
    from torch import Tensor

    from megadapo.trainer.batch.micro_batch import MicroBatch
    from megadapo.trainer.batch.mini_batch import MiniBatch
    from megadapo.trainer.critic import Critic
    from megadapo.trainer.model.head import PolicyHead
    from megadapo.trainer.rank import TrainerRank
    from megadapo.weights.disk.files import Files
    from megadapo.weights.layout.layout import ModelLayout
    from megadapo.weights.layout.shards import ShardPosition


@dataclass(frozen=True)
class Gradients:
    """Gradients of one mini-batch, with shifted old log-probs so that ratios differ from 1."""

    loss: float
    by_name: dict[str, np.ndarray]
    """Full gradients under their Hugging Face names."""
    grad_norm: float
    sizes: tuple[float, float]
    """Size of the policy term's gradient over the log-probs: positive tokens, and all."""
    experts: Metrics = field(default_factory=dict)


def build(
    rendezvous: Rendezvous, settings: TrainerSettings, load: Path | None = None
) -> TrainerRank:
    from megadapo.trainer.rank import TrainerRank
    from megadapo.trainer.stage_ranks import FitRank

    kind = FitRank if settings.trains == "likelihood" else TrainerRank
    rank = kind(settings, rendezvous)
    if load is not None:
        rank.load(load)
    return rank


def load_refusal(rendezvous, settings, folder) -> str:
    try:
        build(rendezvous, settings, folder)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def update(rank: TrainerRank, batch: PackedBatch, **how: Any) -> UpdateResult:
    """Train on the batch; `how`: further fields of the request."""
    return rank.update(UpdateRequest(batch=batch, **{"policy_version": 0, **how}))


def split_of(rank: TrainerRank, batch: PackedBatch, policy_version: int = 0) -> list[MiniBatch]:
    """Return the rank's micro-batches of each mini-batch."""
    return rank.splitter.split(batch, predicted=batch.is_trained, policy_version=policy_version)


def gradients_by_case(rendezvous, settings, batch, cases: dict[str, ImportanceConfig] | None):
    """Return rank 0's gradients by way to weight stale tokens; '' means the configured way."""
    cases = cases or {"": settings.algorithm.importance}
    rank = build(rendezvous, settings)
    found = {}
    for name, importance in cases.items():
        split, *_ = split_of(rank, batch, int(batch.policy_versions.max()))
        with rank.experts.counted():
            logprobs = rank.logprobs_of(split)
        rank.experts.prepare(int(np.diff(batch.cu_seqlens)[batch.mini_batches[0]].sum()))
        old = with_old_policy(rank, split, logprobs, importance)
        own = gradients_under(rank, rank.head, old)
        found[name] = replace(own, experts=rank.experts.result())
    return found if rendezvous.rank == 0 else None


def gradients_by_objective(
    rendezvous, settings, batch, cases: dict[str, PolicyObjective], pretraining=None
):
    """Return gradients by objective, with a reference policy for KL and searched bounds for `bapo`.

    With texts also `texts`: of these alone, and `ptx`: of them beside the default objective.
    """
    from megadapo.trainer.update.step import find_bounds, with_chosen_tokens

    rank = build(rendezvous, settings)
    split, *_ = split_of(rank, batch)
    present = rank.logprobs_of(split)
    found = {}
    for name, objective in cases.items():
        old = split.with_policy(
            [
                replace(
                    micro_batch,
                    proximal=values,
                    logprobs_old=shifted(micro_batch, values),
                    logprobs_ref=shifted(micro_batch, values, 0.7) if objective.kl_coef else None,
                )
                for micro_batch, values in zip(split, present, strict=False)
            ]
        )
        head = replace(rank.head, objective=objective)
        if objective.gate == "bapo":
            bapo = settings.algorithm.bapo
            bounds = find_bounds(rank.chunks, head, old, bapo, is_first=True)
            head = replace(head, objective=bounds.put_into(objective))
        if objective.gate in COVARIANCE_GATES:
            tokens = batch.tokens_with_loss(0)
            old, _ = with_chosen_tokens(
                rank.chunks, head, old, tokens, draw=COVARIANCE_DRAW, is_first=True
            )
        found[name] = gradients_under(rank, head, old)
    if pretraining is not None:
        (parts,) = rank.splitter.split_responses(pretraining)
        found["texts"] = gradients_under(rank, replace(rank.head, temperature=0.5), [], parts)
        head = replace(rank.head, objective=PolicyObjective())
        old = old.with_policy([replace(micro_batch, logprobs_ref=None) for micro_batch in old])
        found["ptx"] = gradients_under(rank, head, old, parts)
    return found if rendezvous.rank == 0 else None


def gradients_under(
    rank: TrainerRank,
    head: PolicyHead,
    micro_batches: Sequence[MicroBatch],
    pretraining: Sequence[MicroBatch] = (),
) -> Gradients:
    """Return loss and full gradients of one mini-batch that has its old policy."""
    from megadapo.trainer.update.step import compute_gradients

    def compute() -> Any:
        return compute_gradients(rank.chunks, head, micro_batches, pretraining)[0]

    sums, norm, full = full_gradients(rank, rank, compute)
    loss = sums["policy/loss"]
    if sums["pretraining/tokens"]:
        loss += TEXT_COEF * sums["pretraining/loss"] / sums["pretraining/tokens"]
    shares = (sums["policy/positive_share_in_logprobs"], sums["logprob_gradient"])
    return Gradients(loss, full, norm, shares)


def full_gradients(rank: TrainerRank, model: TrainerRank | Critic, compute: Callable[[], Any]):
    """Return sums over ranks, the norm and full gradients of the model that `compute` fills."""
    import torch

    # megatron-core learns in the first pass what to wait for, and overlaps from the second on
    for _ in range(1 + rank.settings.trainer.overlap_data_parallel):
        sums = compute()
    model.optimizer.prepare_grads()
    norm = float(model.optimizer.get_grad_norm())
    # each data-parallel rank has its own part of the sums
    buffers = [buffer for chunk in model.chunks for buffer in chunk.buffers]
    buffers += [buffer for chunk in model.chunks for buffer in chunk.expert_parallel_buffers]
    for buffer in buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            torch.distributed.all_gather_into_tensor(bucket.grad_data, own, group=group)
    return sums, norm, gathered(model, "main_grad")


def with_old_policy(
    rank: TrainerRank,
    split: MiniBatch,
    logprobs: Iterable[Tensor] | None = None,
    importance: ImportanceConfig | None = None,
) -> MiniBatch:
    """Return a mini-batch with the current weights as its old policy, or one near `logprobs`."""
    from megadapo.trainer.batch.micro_batch import old_policy

    if logprobs is None:
        near = rank.logprobs_of(split)
    else:
        near = [shifted(*pair) for pair in zip(split, logprobs, strict=False)]
    importance = importance or rank.settings.algorithm.importance
    pairs = zip(split, near, strict=False)
    return split.with_policy([old_policy(*pair, importance) for pair in pairs])


def shifted(micro_batch: MicroBatch, logprobs: Tensor, pace: float = 1.0) -> Tensor:
    """Log-probs moved by an amount that depends on the token's place in the batch only."""
    import torch

    moved = logprobs.clone()
    moved[micro_batch.rows] += torch.from_numpy(
        0.15 * np.sin(pace * micro_batch.batch_index)
    ).float()
    return moved


def full_tensors(
    tensors: Mapping[str, Tensor], layout: ModelLayout, position: ShardPosition
) -> dict[str, Tensor]:
    """Gather the shards of all ranks into full tensors by Hugging Face name; collective."""
    import torch

    from megadapo.weights.disk.sources import collect_spans, match_params

    own = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    ranks = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, (position, own))
    dtype = next(iter(own.values())).dtype
    full = {name: torch.empty(shape, dtype=dtype) for name, shape in layout.hf_shapes.items()}
    # the first stage last: its embedding is the one of a tied model
    for at, local in reversed(ranks):
        for shard, tensor in match_params(local, layout, at):
            collect_spans(full, shard, tensor)
    return full


def gathered(model: TrainerRank | Critic, attribute: str = "data") -> dict[str, np.ndarray]:
    """Return full weights, or another tensor of each, by Hugging Face name; collective."""
    tensors = {name: getattr(param, attribute) for name, param in model.parameters.items()}
    full = full_tensors(tensors, model.layout, model.position)
    return {name: tensor.float().numpy() for name, tensor in full.items()}


def steps_of(
    rank: TrainerRank,
    batch: PackedBatch,
    steps: Iterable[int],
    *,
    save: tuple[int, Path] | None = None,
    **how: Any,
) -> Iterator[Metrics]:
    """Yield the metrics of each step. `save`: after which step to save, and where."""
    for step in steps:
        yield update(rank, batch, step=step, **how).metrics
        if save is not None and step == save[0]:
            save_at(rank, save[1])


def train(
    rendezvous,
    settings,
    batch,
    num_steps,
    *,
    load=None,
    save=None,
    save_after=None,
    first_step=1,
    **how,
) -> tuple[list[Metrics], dict[str, np.ndarray]]:
    """Metrics of the steps and the full weights after them; on every rank.

    `save_after`: the step whose state is saved; None: the last one's.
    """
    rank = build(rendezvous, settings, load)
    steps = range(first_step, first_step + num_steps)
    where = None if save is None else (save_after or steps[-1], save)
    results = list(steps_of(rank, batch, steps, save=where, **how))
    return results, gathered(rank)


def train_with_separate_pass(rendezvous, settings, batch, num_steps, **how):
    """Train as `train` does, with a pass for the old log-probs before the first update."""
    from unittest.mock import patch

    from megadapo.trainer.rank import TrainerRank

    shares = TrainerRank.first_pass_is_old_policy

    def separate(rank: TrainerRank, num_mini_batches: int, *, checks_ratio: bool) -> bool:
        assert shares(rank, num_mini_batches, checks_ratio=checks_ratio), (
            "the run that this one is compared with"
        )
        return False

    with patch.object(TrainerRank, "first_pass_is_old_policy", separate):
        return train(rendezvous, settings, batch, num_steps, **how)


def save_at(
    rank: TrainerRank, folder: Path, *, meanwhile: Callable[[], object] = lambda: None
) -> Files:
    """Save as the driver does; `meanwhile` is called while files are written, or before."""
    import torch

    from megadapo.trainer.trainer import complete_save
    from megadapo.trainer.types import RankReport

    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    assert rank.begin_save(folder) == rank.checkpoint_bytes
    meanwhile()
    reports: list[RankReport] = [RankReport()] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reports, rank.writer.report(wait=True))
    files = [complete_save(folder, reports) if torch.distributed.get_rank() == 0 else {}]
    torch.distributed.broadcast_object_list(files, src=0)
    return files[0]


def updates_with_texts(rendezvous, settings, batch, pretraining, num_steps):
    """Return each step's result, all with the same texts, and the full weights after it."""
    rank = build(rendezvous, settings)
    steps = steps_of(rank, batch, range(1, num_steps + 1), pretraining=pretraining)
    return [(result, gathered(rank)) for result in steps]


def recorded_update(rendezvous, settings, batch, sequences: list[int]) -> UpdateResult:
    """Return each rank's result with the recorded tokens of some sequences."""
    return update(build(rendezvous, settings), replace(batch, recorded=sequences), step=1)


def logprobs(rendezvous, settings, batch) -> np.ndarray | None:
    return build(rendezvous, settings).logprobs(batch)


def train_and_export(rendezvous, settings, batch, folder: Path) -> np.ndarray | None:
    """Two steps, then a Hugging Face folder and the log-probs of the same weights."""
    rank = build(rendezvous, settings)
    for _ in steps_of(rank, batch, (1, 2)):
        pass
    export(rank, folder)
    return rank.logprobs(batch)


def export(rank: TrainerRank, folder: Path) -> None:
    """Write the weights of all ranks as a Hugging Face folder."""
    import torch

    from megadapo.weights.disk.export import export_weights

    tensors = full_tensors(rank.parameters, rank.layout, rank.position)
    if torch.distributed.get_rank() == 0:
        dtype, base = rank.config.params_dtype, rank.model_folder
        export_weights(tensors.items(), folder, dtype=dtype, base_folder=base)
    torch.distributed.barrier()


def initial_weights(rendezvous, settings, load: Path | None = None) -> dict[str, np.ndarray]:
    return gathered(build(rendezvous, settings, load))


def traffic(rendezvous, settings, batch) -> tuple[int, int, bool]:
    """Buckets whose sum had been started when the last backward pass ended, all buckets, and
    whether the optimizer step left weights to be gathered."""
    from megadapo.trainer.update.optimizer import gather_weights_now, step_if_finite
    from megadapo.trainer.update.step import compute_gradients

    rank = build(rendezvous, settings)
    groups = [group for chunk in rank.chunks for group in chunk.bucket_groups]
    started: list[int] = []
    finalize = rank.config.finalize_model_grads_func

    def look_and_finalize(*args: Any, **kwargs: Any) -> None:
        started.append(sum(group.grad_reduce_handle is not None for group in groups))
        finalize(*args, **kwargs)

    rank.config.finalize_model_grads_func = look_and_finalize
    split, *_ = split_of(rank, batch)
    for _ in range(2):
        sums, *_ = compute_gradients(rank.chunks, rank.head, with_old_policy(rank, split))
    step_if_finite(rank.optimizer, loss=sums["policy/loss"], lr=1e-3)
    before = [param.detach().clone() for param in rank.parameters.values()]
    gather_weights_now(rank.chunks)
    after = rank.parameters.values()
    waits = any(bool((old != new).any()) for old, new in zip(before, after, strict=True))
    return started[-1], len(groups), waits


def state_bits(rank: TrainerRank) -> list[bytes]:
    """Every bit of weights, master weights and moments this rank holds."""
    import torch

    tensors = list(rank.parameters.values())
    for optimizer in rank.optimizer.chained_optimizers:
        for state in optimizer.optimizer.state.values():
            tensors += [value for value in state.values() if hasattr(value, "numpy")]
        for group in optimizer.optimizer.param_groups:
            tensors += group["params"]
    # numpy has no bfloat16
    flat = (tensor.detach().reshape(-1) for tensor in tensors)
    return [tensor.view(torch.uint8).numpy().tobytes() for tensor in flat]


def steps_with_losses(rendezvous, settings, batch, losses: list[float]):
    """Return the optimizer's answer to each loss beside good gradients, and whether a bit moved."""
    from megadapo.trainer.update.optimizer import step_if_finite
    from megadapo.trainer.update.step import compute_gradients

    rank = build(rendezvous, settings)
    split, *_ = split_of(rank, batch)
    answers = []
    for loss in losses:
        compute_gradients(rank.chunks, rank.head, with_old_policy(rank, split))
        before = state_bits(rank)
        norm = step_if_finite(rank.optimizer, loss=loss, lr=1e-3)
        answers.append((norm, state_bits(rank) != before))
    return answers


def update_with_fault(rendezvous, settings, batch, where: str) -> dict[str, Any]:
    """A good step, one with NaN on the last rank only, and a good one; with what changed."""
    import torch

    rank = build(rendezvous, settings)
    update(rank, batch, step=1)
    before = state_bits(rank)
    is_victim = rendezvous.rank == rendezvous.world_size - 1
    heal = _poison(rank, where) if is_victim else lambda: None
    faulty = update(rank, batch, step=2)
    heal()
    unchanged = state_bits(rank) == before
    healthy = update(rank, batch, step=3)
    return {
        "faulty": faulty.metrics,
        "unchanged": unchanged,
        "healthy": healthy.metrics,
        "changed_after": state_bits(rank) != before,
        "finite": all(bool(torch.isfinite(p).all()) for p in rank.parameters.values()),
    }


def _poison(rank: TrainerRank, where: str) -> Any:
    """Make one number non-finite on this rank; returns the function that stops it."""
    if where != "gradient":
        chunks = rank.chunks if where == "activation" or rank.critic is None else rank.critic.chunks
        layer = chunks[0].module.decoder.layers[0]

        def overflow(module: Any, inputs: Any, output: Any) -> Any:
            hidden, *rest = output
            scale = hidden.new_ones(hidden.shape[0], 1, 1)
            scale[0] = float("inf")
            return (hidden * scale, *rest)

        return layer.register_forward_hook(overflow).remove
    parameter = next(iter(rank.parameters.values()))

    def nan_gradient(gradient: Any) -> Any:
        gradient = gradient.clone()
        gradient.view(-1)[0] = float("nan")
        return gradient

    return parameter.register_hook(nan_gradient).remove
