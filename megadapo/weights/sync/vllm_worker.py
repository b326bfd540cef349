"""The extension of vLLM's workers that reports the version of their weights.

It must not import vLLM: the driver needs its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megadapo.weights.sync.vllm_plugin import MegadapoTransfer

EXTENSION = f"{__name__}.UpdateExtension"


class UpdateExtension:
    """A mix-in of vLLM's worker; engines call its methods by name on every rank."""

    weight_transfer_engine: MegadapoTransfer

    def weight_version(self) -> int | None:
        """Return the version of this rank's weights; None after an incomplete update."""
        return self.weight_transfer_engine.weight_version

    def open_update(self, version: int, wait_s: float) -> str | None:
        """Open an update that is in files; return the problem of a rank that cannot."""
        return self.weight_transfer_engine.open_update(version, wait_s)
