"""The `[weights]` section: how weights travel from the trainer into the engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from megadapo.section import Section

NCCL_TIMEOUT_S = 1800.0
"""After this a process group of weight updates gives up by itself, and names no rank."""


class WeightsConfig(Section, title="weights"):
    """How weights travel from the trainer into the rollout engines."""

    bucket_mib: Annotated[float, Field(gt=0.0, le=16384.0)] = 64.0
    """Largest bucket in MiB. An update takes two of them on each trainer rank, what it relays to
    other nodes included, and one on an engine rank that cannot read them in place."""
    verify: PositiveInt | Literal["every", "first", "off"] = "first"
    """Which updates compare a checksum of every copied slice between trainer and engine; "first"
    is the first over a connection, and where updates send only what changed, each one in full. A
    number compares these too, and at least one update in so many."""
    mode: Literal["full", "delta", "auto"] = "auto"
    """"full" sends all weights at every update, "delta" the elements that changed since the one
    before, which takes main memory for what was sent last; "auto" does so where weights have 16
    bits and engines keep them, and "full" elsewhere."""
    max_delta: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.25
    """Share of a full update's bytes above which changes are sent as a full update."""
    full_every: Annotated[int, Field(gt=0)] = 50
    """Updates after which one is sent in full, where the others send only what changed."""
    deadline_s: Annotated[float, Field(ge=1.0, le=NCCL_TIMEOUT_S)] = 120.0
    """Seconds one bucket, or one phase of an update, may take before the run stops."""
    transport: Literal["auto", "shared_memory", "cuda_ipc", "nccl", "folder"] = "auto"
    """What carries the buckets; "auto" takes shared memory on the CPU, CUDA IPC where trainer and
    engines share GPUs, and NCCL (Gloo on the CPU) for engines on other nodes or GPUs than the
    trainer's. "folder" writes files."""
    folder: Annotated[Path, Field(strict=False)] | None = None
    """Folder for `transport = "folder"`, of one run at a time, under this path on all nodes."""

    def conflicts(self) -> Iterator[str]:
        if self.transport == "folder" and self.folder is None:
            yield 'weights.folder is missing: weights.transport = "folder" needs one'
        if self.transport != "folder" and self.folder is not None:
            yield f'weights.folder = {self.folder} is only for weights.transport = "folder"'
