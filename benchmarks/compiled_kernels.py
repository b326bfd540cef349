"""Registers, stack and shared memory of our Triton kernels, compiled without a GPU.

The shapes are those of Qwen2.5-32B, and the numbers are read from the binaries. The exit code is 1
if a kernel does not compile.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import triton
from shared import script_parser, write_results
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.errors import TritonError
from triton.runtime.jit import JITFunction

from megadapo.cli import parse, report_errors
from megadapo.kernels.launch import warps_for
from megadapo.kernels.policy_head.rows_triton import (
    logprob_rows_kernel,
    policy_rows_kernel,
    row_stats_kernel,
)
from megadapo.kernels.policy_head.terms import GATES, TermNumbers, TermSwitches
from megadapo.observe.tables import TextTable, print_error

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
"""A100, RTX 30, RTX 40 and L40S, H100 and H200, B200, RTX 50."""

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
_VOCAB_SIZE = 152064
_TILE_ROWS = 2560


@dataclass(frozen=True, kw_only=True)
class CompileCase:
    """One specialisation of a kernel at a model's shapes, for compilation without a GPU."""

    kernel: JITFunction
    label: str
    """Description of the shapes."""
    values: Mapping[str, str | int | TermNumbers]
    """Run-time arguments: a Triton type such as "*fp32", an integer's value, or the types of the
    objective's numbers."""
    constants: Mapping[str, int | bool | TermSwitches] = field(default_factory=dict)
    num_warps: int = 4

    def signature(self) -> dict[str, str | TermNumbers]:
        """Return Triton's signature: integers by width, constants as "constexpr"."""
        types = {
            name: ("i32" if value < 2**31 else "i64") if isinstance(value, int) else value
            for name, value in self.values.items()
        }
        types |= dict.fromkeys(self.constants, "constexpr")
        return {name: types[name] for name in self.kernel.arg_names}

    def attributes(self) -> dict[tuple[int, ...], list[list[str | int]]]:
        """Return a launch's attributes: pointers and integers divisible by 16."""
        names = self.kernel.arg_names
        aligned = [
            name
            for name, value in self.values.items()
            if (isinstance(value, str) and value.startswith("*"))
            or (isinstance(value, int) and value % 16 == 0)
        ]
        return {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}


_EVERY_OPTION = TermSwitches(
    has_dual_clip=True,
    kl_value="k3",
    kl_gradient="corrected-k3",
    has_importance_weights=True,
    has_penalties=True,
    has_entropy=True,
    has_old_kl=True,
)


def _pointers(**names: str) -> dict[str, str | int | TermNumbers]:
    """Return pointer types by argument name, from names by element type."""
    return {name: f"*{dtype}" for dtype, words in names.items() for name in words.split()}


_TILE: dict[str, str | int | TermNumbers] = {
    "logits_stride": _VOCAB_SIZE,
    "num_rows": _TILE_ROWS,
    "vocab_start": 0,
    "inv_temperature": "fp32",
}
_GRAD_TILE: dict[str, str | int | TermNumbers] = {
    **_TILE,
    "d_logits_stride": _VOCAB_SIZE,
    "num_shards": 8,
    "num_columns": _VOCAB_SIZE,
    "num_valid": _VOCAB_SIZE,
}

COMPILE_CASES = (
    CompileCase(
        kernel=row_stats_kernel,
        label="[2560, 152064] in 8 shards",
        values={
            **_pointers(fp32="LOGITS STATS", i64="TARGETS"),
            **_TILE,
            "shard_size": _VOCAB_SIZE // 8,
            "vocab_size": _VOCAB_SIZE,
        },
        constants={"BLOCK": 4096},
        num_warps=warps_for(4096),
    ),
    *(
        CompileCase(
            kernel=policy_rows_kernel,
            label=f"{dtype} gradient [2560, 152064], {words}",
            values={
                **_pointers(
                    fp32="LOGITS STATS LOGPROBS_OLD ADVANTAGES LOSS_WEIGHTS LOGPROBS_REF "
                    "IMPORTANCE_WEIGHTS PENALTIES LOGPROBS ENTROPY DISTANCE LOSS D_POLICY RATIO",
                    i64="TARGETS",
                    u8="FLAGS",
                ),
                "D_LOGITS": f"*{dtype}",
                **_GRAD_TILE,
                "numbers": TermNumbers._make(["fp32"] * len(TermNumbers._fields)),
            },
            constants={"SWITCHES": switches, "WRITES_GRAD": True, "BLOCK": 4096},
            num_warps=warps_for(4096),
        )
        for dtype, words, switches in (
            ("bf16", "DAPO", TermSwitches()),
            ("fp32", "DAPO", TermSwitches()),
            ("bf16", "every option", _EVERY_OPTION),
            ("fp32", "every option", _EVERY_OPTION),
            *(("bf16", gate, TermSwitches(gate=gate)) for gate in GATES if gate != "clip"),
        )
    ),
    CompileCase(
        kernel=logprob_rows_kernel,
        label="bf16 gradient [2560, 152064]",
        values={
            **_pointers(
                fp32="LOGITS STATS LOGPROBS ENTROPY DISTANCE D_LOGPROBS D_ENTROPY",
                bf16="D_LOGITS",
                i64="TARGETS",
            ),
            **_GRAD_TILE,
        },
        constants={
            "WRITES_GRAD": True,
            "HAS_ENTROPY_GRAD": True,
            "BLOCK": 4096,
        },
        num_warps=warps_for(4096),
    ),
)


@dataclass(frozen=True, kw_only=True)
class KernelResources:
    """Resources of one compiled kernel on a streaming multiprocessor."""

    kernel: str
    shapes: str
    architecture: int
    registers: int
    """Registers per thread."""
    stack_bytes: int
    """Bytes per thread of spilled registers or arrays in local memory."""
    shared_bytes: int
    """Bytes per program."""
    num_warps: int


def compile_kernel(case: CompileCase, architecture: int) -> KernelResources:
    """Compile one kernel to a binary for sm_<architecture>, without a GPU."""
    source = ASTSource(
        fn=case.kernel,
        signature=case.signature(),
        constexprs=dict(case.constants),
        attrs=case.attributes(),
    )
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": case.num_warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = _USAGE.search(text)
    if match is None:
        raise ValueError(f"cuobjdump printed no resource usage: {text.strip()}")
    registers, stack, local = map(int, match.groups())
    return KernelResources(
        kernel=case.kernel.__name__,
        shapes=case.label,
        architecture=architecture,
        registers=registers,
        stack_bytes=stack + local,
        shared_bytes=compiled.metadata.shared,
        num_warps=case.num_warps,
    )


def compile_all(architectures: Sequence[int]) -> tuple[list[KernelResources], list[str]]:
    """Compile every case; return the resources, and the error of each case that failed."""
    results, failures = [], []
    for case in COMPILE_CASES:
        for architecture in architectures:
            try:
                results.append(compile_kernel(case, architecture))
            except (TritonError, RuntimeError) as error:  # RuntimeError: of LLVM's passes
                name = f"{case.kernel.__name__}, {case.label}, sm_{architecture}"
                failures.append(f"{name} does not compile: {type(error).__name__}: {error}")
    return results, failures


def format_compile_report(results: Sequence[KernelResources]) -> str:
    """Format one line per kernel, shapes and architecture."""
    rows = [
        [
            result.kernel.strip("_").removesuffix("_kernel"),
            result.shapes,
            f"sm_{result.architecture}",
            *map(str, (result.registers, result.stack_bytes, result.shared_bytes)),
            str(result.num_warps),
        ]
        for result in results
    ]
    head = ["kernel", "shapes", "arch", "regs", "stack B", "shared B", "warps"]
    return TextTable(head=head, rows=rows).text()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = script_parser(__doc__)
    parser.add_argument(
        "--arch", type=int, action="append", help="architecture, such as 90 (default: all)"
    )
    arguments = parse(parser, argv)
    results, failures = compile_all(arguments.arch or ARCHITECTURES)
    print(format_compile_report(results))
    write_results(arguments.json, {"kernels": [asdict(result) for result in results]})
    for failure in failures:
        print_error(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(report_errors(main))
