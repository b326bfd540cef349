"""The `[weights]` section: how weights travel from the trainer into the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megadapo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """How weights travel from the trainer into the rollout engines."""

    bucket_mib: float = 64.0
    """Largest bucket in MiB. An update takes two of them on each trainer rank, what it relays to
    other nodes included, and one on an engine rank that cannot read them in place."""

    verify: Literal["every", "first", "off"] = "first"
    """Which updates compare a checksum of every copied slice between trainer and engine."""

    deadline_s: float = 120.0
    """Seconds one bucket, or one phase of an update, may take before the run stops."""

    transport: Literal["auto", "shared_memory", "cuda_ipc", "nccl"] = "auto"
    """What carries the buckets; "auto" takes shared memory on the CPU, CUDA IPC where trainer and
    engines share GPUs, and NCCL where they do not."""

    def __post_init__(self) -> None:
        if not 0 < self.bucket_mib <= 16384:
            raise ConfigError(
                f"weights.bucket_mib must be in (0, 16384], but it is {self.bucket_mib}."
            )
        if self.deadline_s <= 0:
            raise ConfigError(f"weights.deadline_s must be positive, but it is {self.deadline_s}.")
