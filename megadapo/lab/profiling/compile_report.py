"""What is known of our Triton kernels without running them.

`compile_report` compiles every kernel for GPUs that need not be here and reads registers, stack
and shared memory from the binary.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megadapo.lab.profiling.compile_cases import COMPILE_CASES, CompileCase

ARCHITECTURES = (80, 90, 100)
"""A100, H100 and H200, B200."""

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


def compile_kernel(case: CompileCase, architecture: int) -> KernelResources:
    """Compile one kernel to a binary for sm_<architecture>; no GPU is needed."""
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
    cases: Iterable[CompileCase] = COMPILE_CASES,
) -> list[KernelResources]:
    """Compile every case for every architecture."""
    return [compile_kernel(case, architecture) for case in cases for architecture in architectures]


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
