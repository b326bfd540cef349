"""Profiles of a recipe's training step on its real ranks.

Time and bytes of a profiled call are listed by kernel, and compared with the machine's roofline.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler import emit_nvtx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.benchmark import Timer

from megadapo.data.batch import PackedBatch, pack_responses
from megadapo.data.group import Response, expert_dtype
from megadapo.kernels.launch import counting_bytes
from megadapo.observe.tables import TextTable, formatted
from megadapo.plan.cards import card_of
from megadapo.plan.step_time import update_flops

if TYPE_CHECKING:
    from megadapo.config import RunConfig
    from megadapo.models.description import ModelDescription
    from megadapo.trainer.rank import TrainerRank
    from megadapo.trainer.trainer import Trainer
    from megadapo.trainer.types import TrainerSettings


_LARGE_PRODUCT = {"cuda": 8192, "cpu": 1024}
_LARGE_COPY = {"cuda": 2**28, "cpu": 2**27}
"""Size in bytes, larger than any cache."""
_WRITE_ONLY = ("aten::copy_", "aten::zero_", "aten::fill_")
"""Operators that do not read their first tensor."""
_NUM_SHOWN = 25
"""Number of kernels that a table lists by name."""
_LOOKUPS = ("aten::index_select", "aten::gather", "aten::embedding", "aten::index")
"""Operators that read only the returned part of their first tensor."""


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Rates of a large product and a large copy on this machine, measured in this process."""

    tflops: float
    gb_per_s: float
    sheet_tflops: float | None = None
    """Rate of bf16 products in the GPU's data sheet; None if unknown or for other types."""
    sheet_gb_per_s: float | None = None
    """Memory bandwidth in the GPU's data sheet; None if unknown or on a CPU."""


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """One kernel or operator of a profiled call."""

    name: str
    calls: int
    total_ms: float
    share: float | None
    """Share of all kernels' time; None for an operator whose kernels have rows of their own."""
    tflops: float | None
    """Rate, if the profiler knows the operator's FLOPs, as for matrix products."""
    gb_per_s: float | None
    """Rate, if the bytes are known: for torch's operators and our own kernels."""
    roofline_share: float | None
    """Larger share of the two rates' limits; above 1 if data stays in a cache."""


def measure_roofline(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Time large products and copies, best of a few."""
    size = _LARGE_PRODUCT[device.type]
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    source = torch.zeros(_LARGE_COPY[device.type] // 4, device=device)
    copy = torch.empty_like(source)
    tensors = {"a": a, "b": b, "source": source, "copy": copy}
    product_s, copy_s = (
        min(timer.timeit(1).mean for _ in range(6))
        for call in ("torch.mm(a, b)", "copy.copy_(source)")
        for timer in [Timer(call, globals=tensors, num_threads=torch.get_num_threads())]
    )
    card = card_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return Roofline(
        tflops=2e-12 * size**3 / product_s,
        gb_per_s=2e-9 * source.numel() * source.element_size() / copy_s,
        sheet_tflops=card.flops * 1e-12 if card and dtype == torch.bfloat16 else None,
        sheet_gb_per_s=card.memory_bandwidth * 1e-9 if card else None,
    )


def profile_table(
    profile: torch.profiler.profile, roofline: Roofline, moved: Mapping[str, int]
) -> list[KernelTime]:
    """Sum a finished profile (made with `with_flops=True`) by name, slowest first.

    On the CPU the rows are operators and our own C passes. On CUDA they are kernels, followed by
    the operators that launched products, whose FLOPs are known.

    Args:
        moved: bytes of each operator over all profiled calls.
    """
    events = profile.key_averages()
    on_cuda = [event for event in events if event.device_type == DeviceType.CUDA]
    # the kernels already contain the device time of a record_function
    kernels = [event for event in on_cuda if not event.is_user_annotation]
    operators = [event for event in events if event.device_type == DeviceType.CPU]
    if kernels:
        products = [event for event in operators if event.flops]
        times = [(event, event.self_device_time_total, True) for event in kernels]
        times += [(event, event.self_device_time_total, False) for event in products]
    else:
        times = [(event, event.self_cpu_time_total, True) for event in operators]
    total = sum(spent for _, spent, is_counted in times if is_counted) or 1.0
    return [
        _row(event, spent, spent / total if is_counted else None, roofline, moved.get(event.key))
        for event, spent, is_counted in sorted(times, key=lambda row: (not row[2], -row[1]))
        if spent > 0
    ]


def phase_table(profile: torch.profiler.profile, prefix: str) -> dict[str, float]:
    """Return the milliseconds of every `record_function` whose name has the prefix."""
    spans = [event for event in profile.key_averages() if event.key.startswith(prefix)]
    return {
        event.key.removeprefix(prefix): event.cpu_time_total * 1e-3
        for event in sorted(spans, key=lambda event: -event.cpu_time_total)
        if event.cpu_time_total > 0
    }


def _row(
    event: torch.autograd.profiler_util.FunctionEventAvg,
    microseconds: float,
    share: float | None,
    roofline: Roofline,
    num_bytes: int | None,
) -> KernelTime:
    tflops = event.flops / microseconds * 1e-6 if event.flops else None
    gb_per_s = num_bytes / microseconds * 1e-3 if num_bytes else None
    shares = [
        rate / limit
        for rate, limit in ((tflops, roofline.tflops), (gb_per_s, roofline.gb_per_s))
        if rate is not None
    ]
    assert event.key is not None, "averages are taken by key"
    return KernelTime(
        name=event.key,
        calls=event.count,
        total_ms=microseconds * 1e-3,
        share=share,
        tflops=tflops,
        gb_per_s=gb_per_s,
        roofline_share=max(shares, default=None),
    )


def format_profile(rows: Sequence[KernelTime], roofline: Roofline) -> str:
    """Return the slowest kernels as text, below the roofline."""
    tflops = _with_sheet(f"{roofline.tflops:.2f}", roofline.sheet_tflops)
    gb_per_s = _with_sheet(f"{roofline.gb_per_s:.1f}", roofline.sheet_gb_per_s)
    lines = []
    for row in rows[:_NUM_SHOWN]:
        rates = (
            (row.share, ".1%"),
            (row.tflops, ".3f"),
            (row.gb_per_s, ".1f"),
            (row.roofline_share, ".0%"),
        )
        cells = [formatted(*rate) for rate in rates]
        lines.append([row.name[:43], str(row.calls), f"{row.total_ms:.2f}", *cells])
    if left := sum(row.total_ms for row in rows[_NUM_SHOWN:] if row.share is not None):
        lines.append(["everything else", "", f"{left:.2f}", *[""] * 4])
    return TextTable(
        title=f"roofline measured here: {tflops} TFLOP/s, {gb_per_s} GB/s",
        head=["kernel", "calls", "ms", "share", "TFLOP/s", "GB/s", "of roof"],
        rows=lines,
    ).text()


def _with_sheet(measured: str, sheet: float | None) -> str:
    return measured if sheet is None else f"{measured} of the data sheet's {sheet:.0f}"


@contextmanager
def bytes_moved() -> Iterator[Counter[str]]:
    """Count the bytes of all calls in the block, by name in a profile.

    This is a lower bound that ignores caches: every input read once, every result written once.
    Views move nothing.
    """
    meter: Counter[str] = Counter()
    with counting_bytes(meter), _OperatorMeter(meter):
        yield meter


class _OperatorMeter(TorchDispatchMode):
    def __init__(self, meter: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation
        self._meter = meter

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        name = func._schema.name
        aliases = [result.alias_info for result in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        is_allocation = name.startswith(("aten::empty", "aten::new_empty"))
        if not (is_view or is_allocation):
            written = _bytes_of(results)
            inputs = [*args, *(value for key, value in (kwargs or {}).items() if key != "out")]
            if name in _LOOKUPS:
                read = written + _bytes_of(inputs[1:])
            else:
                read = _bytes_of(inputs[1:] if name in _WRITE_ONLY else inputs)
            self._meter[name] += read + written
        return results


def _bytes_of(values: Any) -> int:
    leaves = tree_leaves(values)
    return sum(tensor.nbytes for tensor in leaves if isinstance(tensor, torch.Tensor))


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

    cluster = Cluster(
        config.cluster, num_trainer_ranks=config.trainer.num_ranks, num_engines=0, engine_ranks=1
    )
    try:
        with tempfile.TemporaryDirectory() as logs:
            own = settings or trainer_settings(config)
            trainer = Trainer(own, cluster, log_folder=Path(logs))
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
        # nsys profile --capture-range=cudaProfilerApi records this block
        with layer_ranges(rank.chunks), torch.cuda.profiler.profile(), emit_nvtx():
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
    return (
        f"{_speed(rank, batch, seconds, config.trainer.num_ranks)}; below, {num_steps} of them on "
        f"rank {torch.distributed.get_rank()}\nms per update: {phases}\n{kernels}"
    )


def _speed(rank: TrainerRank, batch: PackedBatch, seconds: float, num_ranks: int) -> str:
    """Return the time of an update in words, with its tokens and model FLOPs per second."""
    num_tokens = len(batch.tokens)
    lengths = np.diff(batch.cu_seqlens).tolist()
    shares = rank.first_pass_is_old_policy(1, checks_ratio=False)
    flops = update_flops(rank.model, lengths, with_logprobs=not shares)
    rate = flops / seconds / num_ranks
    card = card_of(torch.cuda.get_device_name()) if rank.device.type == "cuda" else None
    share = f" (MFU {rate / card.flops:.1%} of {card.name})" if card else ""
    return (
        f"one update of {num_tokens} tokens on {num_ranks} ranks: {seconds:.3f} s, "
        f"{num_tokens / seconds:.0f} tokens/s, {rate * 1e-12:.3f} model TFLOP/s per rank{share}"
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
