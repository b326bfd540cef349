"""Our Triton kernels at the shapes of Qwen2.5-32B, ready to be compiled without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from triton.runtime.jit import JITFunction

from megadapo.kernels.launch import warps_for
from megadapo.kernels.policy_head.rows_triton import (
    logprob_rows_kernel,
    policy_rows_kernel,
    row_stats_kernel,
)
from megadapo.kernels.policy_head.terms import GATES, TermNumbers, TermSwitches
from megadapo.kernels.rmsnorm import rmsnorm_bwd_kernel, rmsnorm_fwd_kernel
from megadapo.kernels.rotary import rotary_kernel
from megadapo.kernels.swiglu import swiglu_bwd_kernel, swiglu_fwd_kernel

_VOCAB_SIZE = 152064
_TILE_ROWS = 2560


@dataclass(frozen=True, kw_only=True)
class CompileCase:
    """One specialisation of a kernel at a model's shapes, enough to compile it without a GPU."""

    kernel: JITFunction
    label: str
    """The shapes in words."""
    values: Mapping[str, str | int | TermNumbers]
    """Each run-time argument: a Triton type such as "*fp32" or "fp32", an integer's value, or the
    types of the objective's numbers."""
    constants: Mapping[str, int | bool | TermSwitches] = field(default_factory=dict)
    num_warps: int = 4

    def signature(self) -> dict[str, str | TermNumbers]:
        """Triton's signature: integers by width, constants named as such."""
        types = {
            name: ("i32" if value < 2**31 else "i64") if isinstance(value, int) else value
            for name, value in self.values.items()
        }
        types |= dict.fromkeys(self.constants, "constexpr")
        return {name: types[name] for name in self.kernel.arg_names}

    def attributes(self) -> dict[tuple[int, ...], list[list[str | int]]]:
        """What a launch would know: pointers and integers that 16 divides."""
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
    has_entropy=True,
)

POLICY_HEAD_CASES = (
    CompileCase(
        kernel=row_stats_kernel,
        label="[2560, 152064] in 8 shards",
        values={
            "LOGITS": "*fp32",
            "TARGETS": "*i64",
            "STATS": "*fp32",
            "logits_stride": _VOCAB_SIZE,
            "num_rows": _TILE_ROWS,
            "shard_size": _VOCAB_SIZE // 8,
            "vocab_start": 0,
            "vocab_size": _VOCAB_SIZE,
            "inv_temperature": "fp32",
        },
        constants={"BLOCK": 4096},
        num_warps=warps_for(4096),
    ),
    *(
        CompileCase(
            kernel=policy_rows_kernel,
            label=f"{dtype} gradient [2560, 152064], {words}",
            values={
                "LOGITS": "*fp32",
                "D_LOGITS": f"*{dtype}",
                "TARGETS": "*i64",
                "STATS": "*fp32",
                "LOGPROBS_OLD": "*fp32",
                "ADVANTAGES": "*fp32",
                "LOSS_WEIGHTS": "*fp32",
                "LOGPROBS_REF": "*fp32",
                "IMPORTANCE_WEIGHTS": "*fp32",
                "LOGPROBS": "*fp32",
                "ENTROPY": "*fp32",
                "LOSS": "*fp32",
                "RATIO": "*fp32",
                "KL": "*fp32",
                "FLAGS": "*u8",
                "logits_stride": _VOCAB_SIZE,
                "d_logits_stride": _VOCAB_SIZE,
                "num_rows": _TILE_ROWS,
                "num_shards": 8,
                "num_columns": _VOCAB_SIZE,
                "num_valid": _VOCAB_SIZE,
                "vocab_start": 0,
                "inv_temperature": "fp32",
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
            "LOGITS": "*fp32",
            "D_LOGITS": "*bf16",
            "TARGETS": "*i64",
            "STATS": "*fp32",
            "LOGPROBS": "*fp32",
            "ENTROPY": "*fp32",
            "D_LOGPROBS": "*fp32",
            "D_ENTROPY": "*fp32",
            "logits_stride": _VOCAB_SIZE,
            "d_logits_stride": _VOCAB_SIZE,
            "num_rows": _TILE_ROWS,
            "num_shards": 8,
            "num_columns": _VOCAB_SIZE,
            "num_valid": _VOCAB_SIZE,
            "vocab_start": 0,
            "inv_temperature": "fp32",
        },
        constants={
            "WRITES_OUTPUTS": False,
            "WRITES_GRAD": True,
            "HAS_ENTROPY_GRAD": True,
            "BLOCK": 4096,
        },
        num_warps=warps_for(4096),
    ),
)

LAYER_CASES = (
    CompileCase(
        kernel=rmsnorm_fwd_kernel,
        label="bf16 [T, 5120]",
        values={
            "X": "*bf16",
            "WEIGHT": "*bf16",
            "Y": "*bf16",
            "INVERSE_RMS": "*fp32",
            "num_columns": 5120,
            "eps": "fp32",
        },
        constants={"BLOCK": 8192},
        num_warps=warps_for(8192, largest=16),
    ),
    CompileCase(
        kernel=rmsnorm_bwd_kernel,
        label="bf16 [T, 5120]",
        values={
            "X": "*bf16",
            "WEIGHT": "*bf16",
            "D_Y": "*bf16",
            "INVERSE_RMS": "*fp32",
            "D_X": "*bf16",
            "PARTIAL": "*fp32",
            "num_rows": 20480,
            "num_columns": 5120,
        },
        constants={"BLOCK": 8192},
        num_warps=warps_for(8192, largest=16),
    ),
    CompileCase(
        kernel=swiglu_fwd_kernel,
        label="bf16 [T, 2 x 27648]",
        values={"GATE_UP": "*bf16", "Y": "*bf16", "size": 27648},
        constants={"BLOCK": 2048},
        num_warps=warps_for(2048),
    ),
    CompileCase(
        kernel=swiglu_bwd_kernel,
        label="bf16 [T, 2 x 27648]",
        values={"GATE_UP": "*bf16", "D_Y": "*bf16", "D_GATE_UP": "*bf16", "size": 27648},
        constants={"BLOCK": 2048},
        num_warps=warps_for(2048),
    ),
    CompileCase(
        kernel=rotary_kernel,
        label="bf16 [T, 40, 128]",
        values={
            "X": "*bf16",
            "COS": "*fp32",
            "SIN": "*fp32",
            "Y": "*bf16",
            "token_stride": 5120,
            "head_stride": 128,
            "num_heads": 40,
            "head_size": 128,
            "half": 64,
            "sign": "fp32",
        },
        constants={"BLOCK_HEADS": 8, "BLOCK_HALF": 64, "BLOCK_REST": 0},
    ),
)

COMPILE_CASES = (*POLICY_HEAD_CASES, *LAYER_CASES)
