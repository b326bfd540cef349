"""Turns of the trainer and the engines on the GPUs that they share; this file alone decides them.

The engines start first, since each measures the free memory of its GPU, and sleep before the
trainer starts (run/processes.py). They sleep during updates and are awake otherwise: a save loads
nothing to a GPU. While they are awake, ranks refuse to load anything (trainer/offload.py); while
the trainer has the GPUs, no engine starts (rollout/pool/engines.py). Without GPUs the turns are the
same, but engines free nothing. With GPUs of their own, engines never sleep.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megadapo.rollout.pool.engines import Engines
from megadapo.trainer.trainer import Trainer


class GpuSharing:
    """The order in which the trainer and the engines use shared memory.

    `reserved`: an engine for held-out problems on a GPU of its own, which never sleeps.
    `keeps_weights`: whether engines keep their weights in main memory during updates.
    """

    def __init__(
        self,
        trainer: Trainer,
        engines: Engines | None = None,
        reserved: Engines | None = None,
        *,
        keeps_weights: bool = False,
    ) -> None:
        self._trainer, self._engines, self._keeps_weights = trainer, engines, keeps_weights
        self._all = [one for one in (engines, reserved) if one is not None]
        self._shares = engines is not None and engines.shares_gpus

    def start_update(self) -> None:
        """Leave the weights and the GPU memory to the trainer until `publishing`."""
        for engines in self._all:
            engines.on_update_start()
        if self._engines is not None and self._shares:
            self._engines.sleep(keep_weights=self._keeps_weights)
            self._trainer.take_gpus()

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Wake the engines around a block that publishes the trainer's weights."""
        assert self._engines is not None, "a replay has no engines"
        self._engines.wake_weights()
        yield
        if self._shares:
            # the key-value cache takes the memory that the trainer frees
            self._trainer.leave_to_engines()
        self._engines.wake_cache()
        for engines in self._all:
            engines.on_update_done()
