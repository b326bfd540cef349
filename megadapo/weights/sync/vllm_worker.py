"""What vLLM's workers are extended by, to be asked which weights they have."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megadapo.weights.sync.vllm_plugin import MegadapoTransfer

EXTENSION = f"{__name__}.HeldVersion"


class HeldVersion:
    """Mixed into vLLM's worker; its methods are called on every rank by their names."""

    weight_transfer_engine: MegadapoTransfer

    def held_version(self) -> int | None:
        """Version of this rank's weights; None where they are not all of one update."""
        return self.weight_transfer_engine.held_version

    def open_update(self, version: int, patience_s: float) -> str | None:
        """Take up an update that is in files; why this rank cannot, if so."""
        return self.weight_transfer_engine.open_update(version, patience_s)
