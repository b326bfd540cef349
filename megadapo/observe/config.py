"""What a run writes for people to look at: the `[observe]` section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import NonNegativeInt

from megadapo.section import Section

SavedGroups = int | Literal["all"]
WriterName = Literal["tensorboard", "wandb", "mlflow"]


class ObserveConfig(Section, title="observe"):
    """What a run writes for people to look at: the `[observe]` section."""

    saved_groups: NonNegativeInt | Literal["all"] = 8
    """Groups of each step saved in rollouts/ with all of their responses: about half of them
    trained on, the rest shared out over those all wrong, all right, kept in the reserve and thrown
    away, these the first ones asked for, the others evenly over that order; "all" saves every group
    generated or trained on, 0 none."""
    writers: tuple[WriterName, ...] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl; wandb and mlflow need the package of that name, and
    take their own settings from where these programs look for them."""

    def conflicts(self) -> Iterator[str]:
        if len(set(self.writers)) < len(self.writers):
            yield f"observe.writers = {list(self.writers)} names one of them twice"
