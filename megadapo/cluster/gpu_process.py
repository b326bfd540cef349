"""Environment of processes that compute on a GPU."""

from __future__ import annotations


def full_precision(dtype: str) -> dict[str, str]:
    """Environment variables that let "float32" mean float32.

    Transformer Engine and cuBLAS would multiply such matrices with ten bits of mantissa (TF32),
    and trainer and engine each in their own way.
    """
    return {"NVIDIA_TF32_OVERRIDE": "0"} if dtype == "float32" else {}
