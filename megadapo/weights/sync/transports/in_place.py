"""Buckets that engine ranks read where the trainer wrote them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megadapo.weights.sync.transports.parcels import NUM_BUCKETS, Offer, Parcel


class InPlaceInbox:
    """The buckets of the trainer ranks whose memory this process can open.

    Args:
        offers: Of every trainer rank; None: not to be opened.
        open_offer: Returns both buckets of an offer, [2, n] bytes.
    """

    def __init__(
        self, offers: Sequence[Offer | None], open_offer: Callable[[Offer], torch.Tensor]
    ) -> None:
        self._memory = [None if offer is None else open_offer(offer) for offer in offers]

    def fetch(self, round_number: int, parcels: Sequence[Parcel]) -> list[torch.Tensor]:
        """The bytes of each parcel."""
        half = round_number % NUM_BUCKETS
        views = []
        for parcel in parcels:
            memory = self._memory[parcel.feeder]
            assert memory is not None, "the plan sends from a rank that made no offer"
            views.append(memory[half].narrow(0, parcel.offset, parcel.num_bytes))
        return views

    def close(self) -> None:
        """Let go of the buckets."""
        self._memory = []
