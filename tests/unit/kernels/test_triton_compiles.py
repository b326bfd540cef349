"""Every Triton kernel compiles for each GPU generation, and row kernels keep to their registers."""

import importlib
from pathlib import Path

import pytest
from triton.runtime.jit import JITFunction

from megadapo.kernels import launch
from megadapo.lab.profiling.compile_report import (
    ARCHITECTURES,
    COMPILE_CASES,
    KernelResources,
    compile_kernel,
    format_compile_report,
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("case", COMPILE_CASES, ids=lambda c: f"{c.kernel.__name__}-{c.label}")
def test_compiles_without_spilling(case, architecture):
    """At Qwen2.5-32B's shapes; spilled registers would cost more than the kernel's own traffic."""
    resources = compile_kernel(case, architecture)
    assert resources.stack_bytes == 0, resources
    assert 0 < resources.registers <= 128
    assert resources.shared_bytes <= 48 * 1024


def test_every_kernel_has_a_case():
    """A kernel without a case would first fail on a user's GPU."""
    compiled = {case.kernel.__name__ for case in COMPILE_CASES}
    folder = Path(launch.__file__).parent
    for file in folder.rglob("*.py"):
        name = ".".join(file.relative_to(folder).with_suffix("").parts)
        module = importlib.import_module(f"megadapo.kernels.{name}")
        for value in vars(module).values():
            if isinstance(value, JITFunction) and value.__name__.endswith("_kernel"):
                assert value.__name__ in compiled


def test_report_names_kernel_and_architecture():
    result = KernelResources(
        kernel="_rows_kernel",
        shapes="[T, V]",
        architecture=90,
        registers=40,
        stack_bytes=0,
        shared_bytes=64,
        num_warps=4,
    )
    line = format_compile_report([result]).splitlines()[1].split()
    assert line == ["rows", "[T,", "V]", "sm_90", "40", "0", "64", "4"]
