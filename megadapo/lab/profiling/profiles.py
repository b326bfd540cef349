"""Profiles of a recipe's training step on its real ranks, and of the policy head alone."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from megadapo.data.batch import PackedBatch, pack_responses
from megadapo.data.group import Response
from megadapo.data.group_codec import expert_dtype
from megadapo.lab.profiling.time_table import (
    bytes_moved,
    format_profile,
    measure_roofline,
    phase_table,
    profile_table,
    write_trace,
)
from megadapo.plan.cards import card_of
from megadapo.plan.step_time import update_flops

if TYPE_CHECKING:
    from megadapo.config import RunConfig
    from megadapo.models.description import ModelDescription
    from megadapo.trainer.rank import TrainerRank
    from megadapo.trainer.trainer import Trainer
    from megadapo.trainer.types import TrainerSettings

_MAX_MEMORY_EVENTS = 1_000_000
"""Limit of allocations and releases in a snapshot; the oldest are dropped."""


@dataclass(frozen=True, kw_only=True)
class Updates:
    """Settings of the profiled updates: each is one mini-batch of random tokens."""

    config: RunConfig
    num_sequences: int
    """Number of responses in the mini-batch."""
    num_steps: int
    memory: Path | None = None
    """Folder for a snapshot of each rank's CUDA memory."""
    nvtx: bool = False
    """Whether Nsight Systems records the updates instead of torch's profiler."""


def profile_training_step(trainer: Trainer, updates: Updates) -> str:
    """Profile updates of a running trainer: old log-probs, gradients and optimizer.

    Returns:
        The time of an update and of its parts, and its kernels; empty with `updates.nvtx`.
    """
    answers: list[str] = trainer.call_all("apply", _profile_updates, updates)
    return next(filter(None, answers), "")


@contextmanager
def trainer_alone(config: RunConfig, settings: TrainerSettings | None = None) -> Iterator[Trainer]:
    """Start the trainer of a recipe without engines; None for `settings` takes the recipe's."""
    from megadapo.cluster.cluster import Cluster
    from megadapo.run.processes import trainer_settings
    from megadapo.trainer.trainer import Trainer

    cluster = Cluster.start(
        config.cluster,
        num_trainer_ranks=config.trainer.num_ranks,
        num_engines=0,
        engine_ranks=1,
    )
    try:
        with tempfile.TemporaryDirectory() as logs:
            own = settings or trainer_settings(config)
            trainer = Trainer.start(own, cluster, log_folder=Path(logs))
            try:
                yield trainer
            finally:
                trainer.shutdown()
    finally:
        cluster.shutdown()


def random_batch(config: RunConfig, num_sequences: int, *, vocab_size: int) -> PackedBatch:
    """Return one mini-batch of random tokens, with responses of 1/4 to 1 of the maximum length."""
    rng = np.random.default_rng(config.run.seed)
    longest = config.rollout.max_response_tokens
    lengths = rng.integers(max(1, longest // 4), longest + 1, num_sequences)
    prompt_length = max(1, config.data.max_prompt_tokens // 2)
    prompts: list[list[int]] = []
    responses: list[Response] = []
    for length in lengths:
        prompts.append(rng.integers(0, vocab_size, prompt_length).tolist())
        responses.append(
            Response(
                token_ids=rng.integers(0, vocab_size, length).astype(np.int32),
                logprobs=np.full(length, -np.log(vocab_size), dtype=np.float32),
                finish_reason="stop",
                policy_versions=np.zeros(length, dtype=np.int32),
                text="",
            )
        )
    num_tokens = int(lengths.sum())
    return pack_responses(
        prompts,
        responses,
        advantages=rng.normal(size=num_sequences),
        loss_weights=np.full(num_sequences, 1.0 / num_tokens),
        mini_batch_size=num_sequences,
    )


def _spread_experts(batch: PackedBatch, model: ModelDescription) -> tuple[np.ndarray, ...]:
    """Assign experts to tokens in turn, so that all experts have equally many."""
    assert model.routing is not None, "checked with the configuration"
    per_token, num_experts = model.routing.experts_per_token, model.shape.num_experts
    numbers = np.arange(len(batch.tokens) * per_token).reshape(-1, 1, per_token) % num_experts
    experts = np.repeat(numbers.astype(expert_dtype(num_experts)), model.shape.num_layers, axis=1)
    return tuple(np.split(experts, batch.cu_seqlens[1:-1]))


def _profile_updates(rank: TrainerRank, updates: Updates) -> str:
    """Run the collective updates on every rank.

    Only one rank returns a text: one of the last stage, which also has the head.
    """
    from megadapo.trainer.model.layer_ranges import layer_ranges
    from megadapo.trainer.types import UpdateRequest

    config, num_steps = updates.config, updates.num_steps
    batch = random_batch(config, updates.num_sequences, vocab_size=rank.layout.shape.vocab_size)
    if config.trainer.router_replay:
        batch = replace(batch, experts=_spread_experts(batch, rank.model))

    def update() -> float:
        started = time.perf_counter()
        # most steps check no first ratio
        request = UpdateRequest(batch=batch, policy_version=0, step=1, checks_first_ratio=False)
        rank.update(request)
        if rank.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    update()  # compiles kernels and allocates
    if updates.memory is not None:
        with memory_history(updates.memory / f"rank-{torch.distributed.get_rank()}.pickle"):
            update()
    if updates.nvtx:
        with layer_ranges(rank.chunks), nsight_ranges():
            for _ in range(num_steps):
                update()
        return ""
    seconds = min(update() for _ in range(num_steps))
    if not (rank.has_results and rank.data_parallel_rank == 0):
        for _ in range(1 + num_steps):
            update()
        return ""
    with layer_ranges(rank.chunks):
        profile, kernels = _profile_calls(
            update, num_steps, device=rank.device, dtype=rank.config.params_dtype
        )
    # on CUDA a part includes its waits: the clock is the host's
    phases = ", ".join(
        f"{name} {ms / num_steps:.1f}" for name, ms in phase_table(profile, "megadapo::").items()
    )
    num_tokens = len(batch.tokens)
    lengths = np.diff(batch.cu_seqlens).tolist()
    shares = rank.first_pass_is_old_policy(1, checks_ratio=False)
    flops = update_flops(rank.model, lengths, with_logprobs=not shares)
    rate = flops / seconds / config.trainer.num_ranks
    card = card_of(torch.cuda.get_device_name()) if rank.device.type == "cuda" else None
    share = f" (MFU {rate / card.flops:.1%} of {card.name})" if card else ""
    return (
        f"one update of {num_tokens} tokens on {config.trainer.num_ranks} ranks: {seconds:.3f} s, "
        f"{num_tokens / seconds:.0f} tokens/s, {rate * 1e-12:.3f} model TFLOP/s per rank{share}; "
        f"below, {num_steps} of them on rank "
        f"{torch.distributed.get_rank()}\nms per update: {phases}\n{kernels}"
    )


def _profile_calls(
    call: Callable[[], object], num_calls: int, *, device: torch.device, dtype: torch.dtype
) -> tuple[torch.profiler.profile, str]:
    """Return the profile of calls, and the table of their kernels."""
    roofline = measure_roofline(device, dtype)
    with bytes_moved() as moved:
        call()
    with torch.profiler.profile(with_flops=True, record_shapes=True) as profile:
        for _ in range(num_calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
    num_bytes = {name: count * num_calls for name, count in moved.items()}
    return profile, format_profile(profile_table(profile, roofline, num_bytes), roofline)


@contextmanager
def memory_history(file: Path) -> Iterator[None]:
    """Record CUDA's allocations in the block with their Python stacks.

    The file is torch's own pickle. https://pytorch.org/memory_viz shows its timeline in the browser
    with the peak and its tensors.
    """
    torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS)
    try:
        yield
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(file))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


@contextmanager
def nsight_ranges() -> Iterator[None]:
    """Let `nsys profile --capture-range=cudaProfilerApi` record the block, with NVTX ranges."""
    with torch.cuda.profiler.profile(), torch.autograd.profiler.emit_nvtx():
        yield


def profile_head(
    shape_text: str, *, device_name: str | None, num_steps: int, trace: Path | None
) -> None:
    """Profile our head's forward and backward pass at one shape, and print the time of its kernels.

    Args:
        shape_text: T,H,V,DTYPE[,TP], see `parse_shape`.
        device_name: "cpu" or "cuda"; None selects CUDA if available.
        trace: Chrome trace to write.
    """
    from megadapo.lab.profiling.head_inputs import (
        choose_device,
        make_inputs,
        parse_shape,
        step_of_ours,
    )

    device = choose_device(device_name)
    shape = parse_shape(shape_text, temperature=1.0)
    step = step_of_ours(make_inputs(shape, device))
    step()
    profile, kernels = _profile_calls(step, num_steps, device=device, dtype=shape.dtype)
    print(f"{num_steps} steps of {shape}\n{kernels}")
    if trace:
        write_trace(profile, trace)
