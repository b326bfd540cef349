"""The order in which trainer and engines use the memory that they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megadapo.run.workers import Workers


class Calls:
    """Writes down, in one list with others, which of its methods are called."""

    policy_version = 7

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        def call(*_: object, policy_version: int | None = None) -> None:
            self._seen.append(name if policy_version is None else f"{name} {policy_version}")

        return call


@pytest.mark.parametrize("engines_sleep", [True, False])
def test_engines_sleep_while_a_checkpoint_is_made(engines_sleep: bool) -> None:
    """Catches a save that needs the memory which engines on the same GPUs hold."""
    seen: list[str] = []
    workers: Any = Workers(
        trainer=Calls(seen),  # type: ignore[arg-type]
        rollouts=Calls(seen),  # type: ignore[arg-type]
        tokenizer=None,  # type: ignore[arg-type]
        kl_controller=None,  # type: ignore[arg-type]
        engines_sleep=engines_sleep,
    )
    workers.save(Path("state"))
    assert seen == (["sleep", "save", "publish 7"] if engines_sleep else ["save"])
