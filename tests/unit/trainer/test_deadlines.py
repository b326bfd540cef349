"""How long the driver waits for the trainer's ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megadapo.trainer.trainer import Trainer
from tests.support.batches import random_batch


class Remote:
    """A method of a rank that is never asked."""

    def remote(self, *args: object) -> None:
        return None


def test_each_update_of_a_step_has_time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a step of many updates that is ended as stuck though each of them was quick."""
    limits = []

    def gather(calls: list[object], *, timeout_s: float, **_: object) -> list[object]:
        limits.append(timeout_s)
        raise KeyboardInterrupt

    monkeypatch.setattr("megadapo.trainer.trainer.gather", gather)
    monkeypatch.setattr("megadapo.trainer.trainer._shared", lambda batch: batch)
    rank = SimpleNamespace(update=Remote(), logprobs=Remote(), ping=Remote())
    trainer = Trainer([rank], timeout_s=10.0)
    batch = random_batch([5] * 10, num_mini_batches=4)
    with pytest.raises(KeyboardInterrupt):
        trainer.update(batch, policy_version=0, step=1)
    with pytest.raises(KeyboardInterrupt):
        trainer.logprobs(batch)
    assert limits == [40.0, 10.0]
