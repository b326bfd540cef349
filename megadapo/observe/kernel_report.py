"""What is known of our Triton kernels without running them, and what a profile says of a run.

`compile_report` compiles every kernel for GPUs that need not be here and reads registers, stack
and shared memory from the binary. `profile_table` sums a torch profiler's kernels by name.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from megadapo.kernels.launch import CompileCase

ARCHITECTURES = (80, 90, 100)
"""A100, H100 and H200, B200."""

KERNEL_FILES = ("vocab_rows_triton", "rmsnorm", "swiglu", "rotary")
"""Modules of megadapo.kernels with COMPILE_CASES."""

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True, kw_only=True)
class KernelResources:
    """What one compiled kernel takes of a streaming multiprocessor."""

    kernel: str
    shapes: str
    architecture: int
    registers: int
    """Per thread."""
    stack_bytes: int
    """Per thread; anything here is spilled registers or an array in local memory."""
    shared_bytes: int
    """Per program."""
    num_warps: int


def compile_cases() -> list[CompileCase]:
    """Every kernel of ours at the shapes of Qwen2.5-32B."""
    cases: list[CompileCase] = []
    for name in KERNEL_FILES:
        cases += importlib.import_module(f"megadapo.kernels.{name}").COMPILE_CASES
    return cases


def compile_kernel(case: CompileCase, architecture: int) -> KernelResources:
    """Compile one kernel to a binary for sm_<architecture>; no GPU is needed."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=case.kernel,
        signature=case.signature(),
        constexprs=dict(case.constants),
        attrs=case.attributes(),
    )
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": case.num_warps})
    registers, stack, _, local = _resource_usage(compiled.asm["cubin"])
    return KernelResources(
        kernel=case.kernel.__name__,
        shapes=case.label,
        architecture=architecture,
        registers=registers,
        stack_bytes=stack + local,
        shared_bytes=compiled.metadata.shared,
        num_warps=case.num_warps,
    )


def _resource_usage(cubin: bytes) -> tuple[int, int, int, int]:
    """(registers, stack, shared, local) of a binary with one kernel, by Triton's own cuobjdump."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = _USAGE.search(text)
    if match is None:
        raise ValueError(f"cuobjdump printed no resource usage: {text.strip()}")
    registers, stack, shared, local = (int(number) for number in match.groups())
    return registers, stack, shared, local


def compile_report(
    architectures: Sequence[int] = ARCHITECTURES,
    cases: Iterable[CompileCase] | None = None,
) -> list[KernelResources]:
    """Compile every case for every architecture."""
    return [
        compile_kernel(case, architecture)
        for case in (compile_cases() if cases is None else cases)
        for architecture in architectures
    ]


def format_compile_report(results: Sequence[KernelResources]) -> str:
    """One line per kernel, shapes and architecture."""
    lines = [
        f"{'kernel':22}{'shapes':44}{'arch':>6}{'regs':>6}{'stack B':>9}"
        f"{'shared B':>10}{'warps':>7}"
    ]
    for result in results:
        lines.append(
            f"{result.kernel.strip('_').removesuffix('_kernel'):22}{result.shapes:44}"
            f"{'sm_' + str(result.architecture):>6}{result.registers:6}{result.stack_bytes:9}"
            f"{result.shared_bytes:10}{result.num_warps:7}"
        )
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """What this machine reached on a large product and a large copy, measured in this process."""

    tflops: float
    gb_per_s: float


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """One kernel or operator of a profiled call."""

    name: str
    calls: int
    total_ms: float
    share: float
    """Of all kernels' time."""
    tflops: float | None
    """Where the profiler knows the operator's flops, as for matrix products."""
    roofline_share: float | None


def measure_roofline(
    device: torch.device, dtype: torch.dtype, *, size: int = 0, repeats: int = 5
) -> Roofline:
    """Multiply and copy large tensors; the best of a few repeats. `size` 0 chooses by device."""
    import torch

    from megadapo.bench.measure import time_once

    size = size or (8192 if device.type == "cuda" else 1024)
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    # a copy larger than the caches
    source = torch.zeros((2**30 if device.type == "cuda" else 2**27) // 4, device=device)
    copy = torch.empty_like(source)
    product_ms = min(time_once(lambda: torch.mm(a, b), device) for _ in range(repeats + 1))
    copy_ms = min(time_once(lambda: copy.copy_(source), device) for _ in range(repeats + 1))
    return Roofline(
        tflops=2e-9 * size**3 / product_ms,
        gb_per_s=2e-6 * source.numel() * source.element_size() / copy_ms,
    )


def profile_table(profile: torch.profiler.profile, roofline: Roofline) -> list[KernelTime]:
    """Sum a finished profile (made with `with_flops=True`) by kernel or operator, slowest first.

    On CUDA the rows are kernels and the operators that launched products; on the CPU operators.
    """
    events = profile.key_averages()
    on_cuda = any(event.self_device_time_total > 0 for event in events)

    def microseconds(event: object) -> float:
        return event.self_device_time_total if on_cuda else event.self_cpu_time_total

    total = sum(microseconds(event) for event in events) or 1.0
    rows = []
    for event in sorted(events, key=microseconds, reverse=True):
        spent = microseconds(event)
        if spent == 0:
            continue
        tflops = event.flops / spent * 1e-6 if event.flops else None
        rows.append(
            KernelTime(
                name=event.key,
                calls=event.count,
                total_ms=spent * 1e-3,
                share=spent / total,
                tflops=tflops,
                roofline_share=None if tflops is None else tflops / roofline.tflops,
            )
        )
    return rows


def format_profile(rows: Sequence[KernelTime], roofline: Roofline, *, limit: int = 25) -> str:
    """The slowest kernels as text, below the roofline they are held against."""
    lines = [
        f"roofline measured here: {roofline.tflops:.2f} TFLOP/s, {roofline.gb_per_s:.1f} GB/s",
        f"{'kernel':48}{'calls':>7}{'ms':>10}{'share':>8}{'TFLOP/s':>9}{'of roof':>9}",
    ]
    for row in rows[:limit]:
        rate = "-" if row.tflops is None else f"{row.tflops:.3f}"
        share = "-" if row.roofline_share is None else f"{row.roofline_share:.0%}"
        lines.append(
            f"{row.name[:47]:48}{row.calls:7}{row.total_ms:10.2f}{row.share:8.1%}{rate:>9}{share:>9}"
        )
    return "\n".join(lines)


def write_trace(profile: torch.profiler.profile, path: Path) -> None:
    """Save the profile for a trace viewer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(path))
