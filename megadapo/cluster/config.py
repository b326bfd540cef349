"""The `[cluster]` section: where the processes of a run are."""

from __future__ import annotations

from typing import Literal

from megadapo.section import Section, Timeout

START_TIMEOUT_S = 1800.0
"""Default of `cluster.start_timeout_s`."""


class ClusterConfig(Section, title="cluster"):
    """Settings of the Ray cluster and the placement of processes on it."""

    placement: Literal["colocated", "separate"] = "colocated"
    """Whether engines share the trainer's GPUs (and sleep while it works) or have their own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to run on; auto takes CUDA if this machine has a GPU."""
    address: str | None = None
    """Address of a running Ray cluster; none starts Ray on this machine, on loopback."""
    allow_unauthenticated: bool = False
    """Whether to join a Ray cluster without a token: anyone who reaches one of its nodes can run
    code on all of them."""
    start_timeout_s: Timeout = START_TIMEOUT_S
    """Seconds that each of these may take: the cluster has the GPUs that the layout needs; an
    engine has loaded and answered a request; ranks have started and read the weights."""

    check_nodes: bool = True
    """Whether each start on a joined cluster checks the GPUs of all nodes, as `megadapo doctor
    --node` does, and leaves out nodes that fail."""

    @property
    def uses_cuda(self) -> bool:
        """Whether processes get GPUs; loads torch only if `device` is auto."""
        if self.device != "auto":
            return self.device == "cuda"
        import torch

        return torch.cuda.is_available()

    @property
    def engines_sleep(self) -> bool:
        """Whether engines release GPU memory while the trainer works."""
        return self.uses_cuda and self.placement == "colocated"
