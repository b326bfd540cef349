"""The `[weights]` section: how weights travel from the trainer into the engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megadapo.section import Section

NCCL_TIMEOUT_S = 1800.0
"""After this a process group of weight updates gives up by itself, and names no rank."""


class WeightsConfig(Section, title="weights"):
    """How weights travel from the trainer into the rollout engines."""

    bucket_mib: Annotated[float, Field(gt=0.0, le=16384.0)] = 64.0
    """Largest bucket in MiB. An update takes two of them on each trainer rank, what it relays to
    other nodes included, and one on an engine rank that cannot read them in place."""
    verify: Literal["every", "first", "off"] = "first"
    """Which updates compare a checksum of every copied slice between trainer and engine."""
    deadline_s: Annotated[float, Field(ge=1.0, le=NCCL_TIMEOUT_S)] = 120.0
    """Seconds one bucket, or one phase of an update, may take before the run stops."""
    transport: Literal["auto", "shared_memory", "cuda_ipc", "nccl"] = "auto"
    """What carries the buckets; "auto" takes shared memory on the CPU, CUDA IPC where trainer and
    engines share GPUs, and NCCL where they do not."""
