"""Weights for engines that join or restart while the trainer changes its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megadapo.errors import InfraError
from megadapo.weights.config import WeightsConfig
from megadapo.weights.sync.peers import UpdatableEngines
from megadapo.weights.sync.publish import Publisher, PublishReport
from megadapo.weights.sync.topology import Device, Topology, topology_beside_training

if TYPE_CHECKING:
    from ray.actor import ActorHandle


class Republisher(Publisher):
    """A connection that sends the weights published last from main memory, beside training.

    Another publisher's `publish` calls `pin`. The trainer ranks need the method `published_sender`
    and Ray's concurrency group `peers.PUBLISHED_GROUP`. The arguments are those of a publisher.
    """

    def __init__(
        self,
        trainer_ranks: Sequence[ActorHandle[Any]],
        engines: UpdatableEngines,
        config: WeightsConfig,
        **options: Any,
    ) -> None:
        super().__init__(trainer_ranks, engines, config, sender="published_sender", **options)

    def pin(self) -> None:
        """Copy the trainer's weights into the main memory of its nodes."""
        self._peers.call_ranks("pin")

    def republish(self, index: int) -> PublishReport:
        """Send the weights published last to one engine while the others generate.

        An engine that fails meanwhile, which breaks the connection for the trainer's ranks too, is
        started again.
        """
        try:
            return super().republish(index)
        except InfraError as error:
            self._schedule = None
            self._engines.fail(index, str(error))
            return PublishReport(policy_version=self._engines.policy_version, seconds=0.0)

    def _topology(
        self,
        ranks: Sequence[Device],
        engine_nodes: Sequence[str],
        engine_gpus: Sequence[Sequence[str]],
    ) -> Topology:
        return topology_beside_training(len(ranks), len(engine_nodes))
