"""The `[weights]` section: buckets and content of weight updates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from megadapo.section import Section

NCCL_TIMEOUT_S = 1800.0
"""Timeout of the process group of weight updates. Its error names no rank, so
`weights.deadline_s` may not exceed it."""
SenderName = Literal["live", "pinned", "published"]
"""Senders of a trainer rank. "pinned" ones keep a copy of the weights of each update. "published"
ones send, beside training, the weights that were copied into main memory after the last update."""
PUBLISHED_GROUP = "published"
"""Ray's concurrency group of the calls of "published" senders."""


class WeightsConfig(Section, title="weights"):
    """Weight updates from the trainer into the rollout engines."""

    bucket_mib: Annotated[float, Field(gt=0.0, le=16384.0)] = 64.0
    """Largest bucket in MiB. An update takes two buckets on each trainer rank, and one on an engine
    rank that cannot read them in place."""
    verify: PositiveInt | Literal["every", "first", "off"] = "first"
    """Updates that compare a checksum of every copied slice between trainer and engine. "first" is
    the first update over a connection, and with deltas also each full update. A number N means
    these, and at least every N-th update."""
    mode: Literal["full", "delta", "auto"] = "auto"
    """"full" sends all weights at every update. "delta" sends the elements that changed since the
    last update, and keeps a copy of the sent weights in main memory; engines that sleep on the
    trainer's GPUs keep theirs there too. "auto" is "delta" for 16-bit weights of engines that never
    sleep, else "full"."""
    deadline_s: Annotated[float, Field(ge=1.0, le=NCCL_TIMEOUT_S)] = 120.0
    """Seconds that 80 buckets, or one phase of an update, may take before the run stops. An engine
    that does not read a bucket is lost after half of this time."""
