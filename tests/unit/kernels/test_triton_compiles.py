"""Every Triton kernel compiles for each GPU generation, and row kernels keep to their registers."""

import dataclasses
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import compiled_kernels
import pytest
from compiled_kernels import (
    ARCHITECTURES,
    COMPILE_CASES,
    KernelResources,
    compile_kernel,
    format_compile_report,
)
from triton.runtime.jit import JITFunction

from megadapo.kernels import launch
from megadapo.kernels.policy_head.terms import GATES


def cases_to_compile() -> list[Any]:
    """Return every case and architecture; a gate changes a few numbers per row, so one will do."""
    return [
        pytest.param(case, architecture, id=f"{case.kernel.__name__}-{case.label}-{architecture}")
        for case in COMPILE_CASES
        for architecture in ((90,) if case.label.endswith(GATES[1:]) else ARCHITECTURES)
    ]


@pytest.mark.parametrize("case, architecture", cases_to_compile())
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


def test_report_goes_on_after_a_kernel_that_fails(monkeypatch, capsys):
    """A traceback at the first failure hid how all others compile."""
    first, second, *_ = COMPILE_CASES
    broken = dataclasses.replace(first, values=first.values | {"LOGITS": "fp32"})
    monkeypatch.setattr(compiled_kernels, "COMPILE_CASES", (broken, second))
    assert compiled_kernels.main(["--arch", "90"]) == 1
    printed = capsys.readouterr()
    assert "policy_rows" in printed.out and "row_stats" not in printed.out
    assert f"{first.kernel.__name__}, {first.label}, sm_90 does not compile: Comp" in printed.err


@pytest.mark.full
@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0"])
def test_every_case_compiles_with_older_tritons(version, tmp_path):
    """Triton 3.6, for one, takes no string field of a constexpr tuple as an argument."""
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--target", str(tmp_path / "site"), f"triton=={version}"], check=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path]),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [sys.executable, compiled_kernels.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sm_120") == len(COMPILE_CASES)
