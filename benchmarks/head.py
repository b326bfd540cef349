"""Time, memory and errors of the policy head, its baselines and its three matrix products."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from baselines.head_inputs import (
    OURS,
    PRODUCTS,
    HeadInputs,
    HeadShape,
    Loss,
    choose_device,
    loss_step,
    make_inputs,
    parse_shape,
)
from baselines.heads import BASELINES, OTHER_LOSSES, AbsentError
from baselines.measure import Clock
from shared import add_numbers, peak_extra_mib, script_parser, time_together, write_results
from torch import Tensor

from megadapo.cli import parse, report_errors
from megadapo.kernels.policy_head.head import policy_head_loss_definition
from megadapo.observe.tables import TextTable

EXACT_ROWS = 512
"""Tokens that the exact result takes at a time."""
CPU_SHAPES = (
    HeadShape(num_tokens=1024, hidden_size=512, vocab_size=16384, dtype=torch.float32),
    HeadShape(num_tokens=2048, hidden_size=896, vocab_size=15193, dtype=torch.float32),
    HeadShape(num_tokens=1024, hidden_size=512, vocab_size=16000, dtype=torch.bfloat16),
)
GPU_SHAPES = tuple(
    HeadShape(
        num_tokens=tokens,
        hidden_size=hidden,
        vocab_size=vocab // tp,
        dtype=torch.bfloat16,
        tensor_parallel=tp,
    )
    for tokens, hidden, vocab, tp in (
        (4096, 5120, 152064, 1),
        (20480, 5120, 152064, 1),
        (20480, 5120, 152064, 8),
        (65536, 5120, 152064, 1),
        (65536, 5120, 152064, 8),
        (20480, 3584, 152064, 1),
        (20480, 2048, 151936, 1),
        (20480, 2048, 151669, 1),
    )
)
"""Qwen2.5-32B whole and one of its 8 tensor-parallel slices, 7B, 1.5B and a ragged vocabulary."""


@dataclass(frozen=True, kw_only=True)
class HeadResult:
    """One baseline at one shape. Errors are relative norms against fp64 of the same inputs."""

    name: str
    shape: str
    best_ms: float | None = None
    median_ms: float | None = None
    ratio_to_products: float | None = None
    """Best time over the best time of the three products."""
    useful_tflops: float | None = None
    peak_extra_mib: float | None = None
    """Peak memory beyond the inputs, with loss and gradients."""
    loss_error: float | None = None
    d_hidden_error: float | None = None
    d_weight_error: float | None = None
    absent: str | None = None
    """Reason if it did not run."""


def bench_head(
    shape: HeadShape,
    device: torch.device,
    *,
    only: Sequence[str] = (),
    warmup: int = 2,
    repeats: int = 20,
    clock: Clock = "wall",
) -> list[HeadResult]:
    """Run every installed baseline at one shape, all on the same inputs in the same rounds.

    Args:
        only: texts that select baselines by name; ours and the three products always run.
    """
    inputs = make_inputs(shape, device)
    exact = _exact(inputs)
    absent: list[HeadResult] = []
    calls: dict[str, Callable[[], object]] = {PRODUCTS: lambda: _products(inputs)}
    errors: dict[str, dict[str, Any]] = {PRODUCTS: {}}
    for name, loss in BASELINES.items():
        if name != OURS and only and not any(text in name for text in only):
            continue
        try:
            errors[name] = {} if name in OTHER_LOSSES else _errors(loss, inputs, exact)
            loss_step(loss, inputs)
        except Exception as error:  # a boundary: the others run if one does not work here
            if name == OURS:
                raise
            absent.append(HeadResult(name=name, shape=str(shape), absent=_reason(error)))
        else:
            calls[name] = partial(loss_step, loss, inputs)
    del exact
    samples = time_together(calls, device, warmup=warmup, repeats=repeats, clock=clock)
    floor = min(samples[PRODUCTS])
    # three products, which every exact head computes
    useful_tflop = 6e-12 * shape.num_tokens * shape.hidden_size * shape.vocab_size
    # the smaller of two peaks: the first call of a size also fills caches
    peaks = {
        name: [mib for _ in range(2) if (mib := peak_extra_mib(call, device)) is not None]
        for name, call in calls.items()
    }
    return [
        HeadResult(
            name=name,
            shape=str(shape),
            best_ms=min(ms),
            median_ms=statistics.median(ms),
            ratio_to_products=min(ms) / floor,
            useful_tflops=useful_tflop / min(ms) * 1e3,
            peak_extra_mib=min(peaks[name], default=None),
            **errors[name],
        )
        for name, ms in samples.items()
    ] + absent


def _reason(error: Exception) -> str:
    """Return why a baseline did not run, in one line."""
    if isinstance(error, AbsentError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _exact(inputs: HeadInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, d_hidden and d_weight in fp64, computed a few rows at a time."""
    weight = inputs.weight.detach().double().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64, device=weight.device)
    d_hidden = []
    for start in range(0, inputs.shape.num_tokens, EXACT_ROWS):
        rows = slice(start, start + EXACT_ROWS)
        hidden = inputs.hidden.detach()[rows].double().requires_grad_()
        part = policy_head_loss_definition(
            hidden,
            weight,
            inputs.targets[rows],
            logprobs_old=inputs.logprobs_old[rows].double(),
            advantages=inputs.advantages[rows].double(),
            loss_weights=inputs.loss_weights[rows].double(),
            objective=inputs.objective,
            temperature=inputs.shape.temperature,
        )
        part.backward()
        loss += part.detach()
        assert hidden.grad is not None
        d_hidden.append(hidden.grad)
    assert weight.grad is not None
    return loss, torch.cat(d_hidden), weight.grad


def _products(inputs: HeadInputs) -> tuple[Tensor, Tensor]:
    """Compute products of the sizes of logits, d_hidden and d_weight: the roofline."""
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach()
    logits = torch.mm(hidden, weight.t())
    return torch.mm(logits, weight), torch.mm(logits.t(), hidden)


def _errors(loss: Loss, inputs: HeadInputs, exact: tuple[Tensor, ...]) -> dict[str, float]:
    value = loss(inputs)
    d_hidden, d_weight = torch.autograd.grad(value, (inputs.hidden, inputs.weight))
    scale = (inputs.loss_weights * inputs.advantages).abs().sum()
    return {
        "loss_error": ((value.detach().double() - exact[0]).abs() / scale).item(),
        "d_hidden_error": _relative(d_hidden, exact[1]),
        "d_weight_error": _relative(d_weight, exact[2]),
    }


def _relative(got: Tensor, expected: Tensor) -> float:
    error = torch.zeros((), dtype=torch.float64, device=got.device)
    for part, truth in zip(got.split(4096), expected.split(4096), strict=True):
        error += (part.double() - truth).square().sum()
    relative: float = (error.sqrt() / expected.norm()).item()
    return relative


def format_table(results: Sequence[HeadResult]) -> str:
    """Format the results of one shape."""
    columns = {
        "best ms": ("best_ms", ".2f"),
        "median": ("median_ms", ".2f"),
        "x products": ("ratio_to_products", ".3f"),
        "TFLOP/s": ("useful_tflops", ".3f"),
        "MiB": ("peak_extra_mib", ".0f"),
        "loss err": ("loss_error", ".1e"),
        "dH err": ("d_hidden_error", ".1e"),
        "dW err": ("d_weight_error", ".1e"),
    }
    rows = []
    for result in results:
        if result.absent is None:
            values = [(getattr(result, field), form) for field, form in columns.values()]
            cells = ["-" if value is None else format(value, form) for value, form in values]
            rows.append([result.name, *cells])
    absent = [f"{result.name}: {result.absent}" for result in results if result.absent is not None]
    return TextTable(
        title=results[0].shape, note="\n".join(absent), head=["", *columns], rows=rows
    ).text()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each shape, print its table, and write JSON if requested."""
    parser = script_parser(__doc__)
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="T,H,V,DTYPE[,TP]",
        help="a shape such as 20480,5120,152064,bfloat16, with TP one rank's part of a split "
        "vocabulary; repeatable",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there")
    add_numbers(parser, [("threads", 2, "threads on the CPU"), ("repeats", 20, "timed rounds")])
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu counts CPU time only: for a busy machine, with --threads 1",
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="only baselines with TEXT in their name",
    )
    arguments = parse(parser, argv)
    device = choose_device(arguments.device)
    torch.set_num_threads(arguments.threads)
    shapes = tuple(parse_shape(text, arguments.temperature) for text in arguments.shape)
    every = []
    for shape in shapes or (GPU_SHAPES if device.type == "cuda" else CPU_SHAPES):
        results = bench_head(
            shape, device, only=arguments.only, repeats=arguments.repeats, clock=arguments.clock
        )
        print(format_table(results), flush=True)
        every += [asdict(result) for result in results]
        report = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "clock": arguments.clock,
            "results": every,
        }
        # after each shape: a fault of the next one may end the process
        write_results(arguments.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(main))
