"""The experts that an engine chose for the tokens of a sequence, which a trainer can take over.

An array [m, layers, experts per token] holds the numbers of each layer's experts for the first m
tokens of prompt and response, one byte each up to 256 experts. The last token of a response is
sampled and never read, so that the engine has no experts for it.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

KINDS = {"uint8": "<u1", "uint16": "<u2"}
"""Names of the types that experts are numbered in, and how they are stored."""


def number_type(num_experts: int) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
    """The type that so many experts are numbered in."""
    return np.dtype(np.uint8) if num_experts <= 256 else np.dtype(np.uint16)


def encode_experts(experts: np.ndarray | None) -> dict[str, Any] | None:
    """Return the array as JSON can hold it."""
    if experts is None:
        return None
    stored = experts.astype(KINDS[experts.dtype.name])
    return {
        "shape": list(experts.shape),
        "dtype": experts.dtype.name,
        "data": base64.b64encode(stored.tobytes()).decode(),
    }


def decode_experts(entry: Mapping[str, Any] | None) -> np.ndarray | None:
    """Return the array that `encode_experts` was given.

    Raises:
        KeyError, TypeError, ValueError: the entry is no such array, or has a token that goes to
            one expert twice.
    """
    if entry is None:
        return None
    tokens, layers, per_token = (int(size) for size in entry["shape"])
    values = np.frombuffer(base64.b64decode(entry["data"], validate=True), KINDS[entry["dtype"]])
    if len(values) != math.prod((tokens, layers, per_token)):
        raise ValueError(f"{len(values)} experts are not of the shape {entry['shape']}")
    experts = values.reshape(tokens, layers, per_token).astype(entry["dtype"])
    ascending = np.sort(experts, axis=-1)
    if (ascending[..., 1:] == ascending[..., :-1]).any():
        raise ValueError("a token goes to one expert twice")
    return experts
