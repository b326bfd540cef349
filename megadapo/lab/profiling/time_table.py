"""Time and bytes of a profiled call by kernel, compared with the machine's roofline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megadapo.kernels.launch import counting_bytes
from megadapo.lab.profiling.measure import time_once
from megadapo.observe.tables import TextTable
from megadapo.plan.cards import card_of

_LARGE_PRODUCT = {"cuda": 8192, "cpu": 1024}
_LARGE_COPY = {"cuda": 2**28, "cpu": 2**27}
"""Size in bytes, larger than any cache."""
_WRITE_ONLY = ("aten::copy_", "aten::zero_", "aten::fill_")
"""Operators that do not read their first tensor."""
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


def measure_roofline(
    device: torch.device, dtype: torch.dtype, *, size: int = 0, repeats: int = 5
) -> Roofline:
    """Time large products and copies, best of a few; `size` 0 selects it by device."""
    size = size or _LARGE_PRODUCT[device.type]
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    source = torch.zeros(_LARGE_COPY[device.type] // 4, device=device)
    copy = torch.empty_like(source)
    product_ms = min(time_once(lambda: torch.mm(a, b), device) for _ in range(repeats + 1))
    copy_ms = min(time_once(lambda: copy.copy_(source), device) for _ in range(repeats + 1))
    card = card_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return Roofline(
        tflops=2e-9 * size**3 / product_ms,
        gb_per_s=2e-6 * source.numel() * source.element_size() / copy_ms,
        sheet_tflops=card.flops * 1e-12 if card and dtype == torch.bfloat16 else None,
        sheet_gb_per_s=card.memory_bandwidth * 1e-9 if card else None,
    )


def profile_table(
    profile: torch.profiler.profile,
    roofline: Roofline,
    moved: Mapping[str, int] | None = None,
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
    moved = moved or {}
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


def format_profile(rows: Sequence[KernelTime], roofline: Roofline, *, limit: int = 25) -> str:
    """Return the slowest kernels as text, below the roofline."""
    tflops = _with_sheet(f"{roofline.tflops:.2f}", roofline.sheet_tflops)
    gb_per_s = _with_sheet(f"{roofline.gb_per_s:.1f}", roofline.sheet_gb_per_s)
    lines = []
    for row in rows[:limit]:
        rates = (
            (row.share, ".1%"),
            (row.tflops, ".3f"),
            (row.gb_per_s, ".1f"),
            (row.roofline_share, ".0%"),
        )
        cells = ["-" if value is None else format(value, form) for value, form in rates]
        lines.append([row.name[:43], str(row.calls), f"{row.total_ms:.2f}", *cells])
    if left := sum(row.total_ms for row in rows[limit:] if row.share is not None):
        lines.append(["everything else", "", f"{left:.2f}", *[""] * 4])
    return TextTable(
        title=f"roofline measured here: {tflops} TFLOP/s, {gb_per_s} GB/s",
        head=["kernel", "calls", "ms", "share", "TFLOP/s", "GB/s", "of roof"],
        rows=lines,
    ).text()


def _with_sheet(measured: str, sheet: float | None) -> str:
    return measured if sheet is None else f"{measured} of the data sheet's {sheet:.0f}"


def write_trace(profile: torch.profiler.profile, path: Path) -> None:
    """Write the profile for a trace viewer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(path))


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
