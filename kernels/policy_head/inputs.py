"""Checks of the policy head's arguments, and the selection of the tokens that enter it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megadapo.kernels.policy_head.tiles import PolicyInputs

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class RowSelection:
    """The tokens that enter the head. `rows` None: all tokens, in place."""

    rows: Tensor | None
    num_rows: int
    counts: tuple[int, ...]
    """Number of rows in each tensor-parallel rank's part of the sequence."""


def check_operands(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, tp: int, sequence_parallel: bool
) -> int:
    """Return the number of tokens T; raise ValueError if shapes, dtypes or devices do not fit."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [T, H] and weight [V/p, H]; got {_shape(hidden)} and {_shape(weight)}"
        )
    if hidden.dtype != weight.dtype or hidden.dtype not in _FLOAT_DTYPES:
        raise ValueError(
            "hidden and weight must both be float32, bfloat16 or float16; "
            f"got {hidden.dtype} and {weight.dtype}"
        )
    num_tokens = hidden.shape[0] * (tp if sequence_parallel else 1)
    check_token_tensor("targets", targets, num_tokens, hidden.device)
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets must be integers, got {targets.dtype}")
    if weight.device != hidden.device:
        raise ValueError(f"weight is on {weight.device}, hidden on {hidden.device}")
    return num_tokens


def check_token_tensor(name: str, tensor: Tensor, num_tokens: int, device: torch.device) -> None:
    """Raise ValueError for a per-token tensor of another length or device."""
    if tensor.shape != (num_tokens,):
        raise ValueError(f"{name} must be [T] with T = {num_tokens}, got {_shape(tensor)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, hidden on {device}")


def select_rows(
    targets: Tensor,
    *,
    vocab_size: int,
    num_parts: int,
    rows: Tensor | None,
    inputs: PolicyInputs | None,
    check_inputs: bool,
) -> RowSelection:
    """Select `rows`, or else the tokens with a loss weight, and check their values.

    All counts reach the host in one copy. With `rows` given, one part and `check_inputs` off the
    host does not wait for the device.

    Raises:
        ValueError: targets are outside the vocabulary, or values are not finite.
    """
    num_tokens = targets.shape[0]
    if rows is not None and num_parts == 1 and not check_inputs:
        return RowSelection(rows=rows, num_rows=rows.shape[0], counts=(rows.shape[0],))
    chosen = _chosen(targets, rows, inputs)
    problems = _problems(chosen, targets, vocab_size, inputs) if check_inputs else {}
    totals = torch.cat(
        [chosen.view(num_parts, -1).sum(1), *(bad.sum()[None] for bad in problems.values())]
    ).tolist()
    for problem, count in zip(problems, totals[num_parts:], strict=True):
        if count:
            raise ValueError(problem.format(count))
    counts = tuple(totals[:num_parts])
    num_rows = sum(counts)
    if num_rows == num_tokens:
        return RowSelection(rows=None, num_rows=num_rows, counts=counts)
    if rows is None:
        rows = torch.nonzero_static(chosen, size=num_rows)[:, 0]
    return RowSelection(rows=rows, num_rows=num_rows, counts=counts)


def _chosen(targets: Tensor, rows: Tensor | None, inputs: PolicyInputs | None) -> Tensor:
    """Return whether each token enters the head, bool [T]."""
    if rows is not None:
        chosen = torch.zeros(targets.shape, dtype=torch.bool, device=targets.device)
        return chosen.index_fill_(0, rows, True)
    if inputs is None:
        return torch.ones(targets.shape, dtype=torch.bool, device=targets.device)
    return inputs.loss_weights != 0


def _problems(
    chosen: Tensor, targets: Tensor, vocab_size: int, inputs: PolicyInputs | None
) -> dict[str, Tensor]:
    """Return the error message of each check, with a slot for a count, and its tokens, bool [T]."""
    outside = (targets < 0) | (targets >= vocab_size)
    problems = {f"targets has {{}} values outside 0..{vocab_size - 1}": chosen & outside}
    if inputs is not None:
        left_out = (inputs.loss_weights != 0) & ~chosen
        problems["loss_weights has {} tokens that rows leaves out"] = left_out
        for name in ("advantages", "loss_weights"):
            bad = chosen & ~getattr(inputs, name).isfinite()
            problems[f"{name} has {{}} values that are not finite"] = bad
    return problems


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
