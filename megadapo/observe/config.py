"""What a run writes for people to look at: the `[observe]` section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import NonNegativeInt

from megadapo.observe.metrics.reflection import ANY_PHRASE, AREA, metric_name
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

    reflection_phrases: tuple[str, ...] = (
        *("wait", "however", "alternatively", "on second thought"),
        *("let me check", "let me verify", "double-check", "recheck"),
    )
    """Words of a model that looks back: the share of responses with each of them is a metric,
    reflection/NAME. Upper and lower case are the same; only whole words count."""

    def conflicts(self) -> Iterator[str]:
        names = [metric_name(phrase) for phrase in self.reflection_phrases]
        for phrase, name in zip(self.reflection_phrases, names, strict=True):
            if name == AREA:
                yield "observe.reflection_phrases: a phrase without a word; leave it out"
            elif names.count(name) > 1 or name == ANY_PHRASE:
                yield f"observe.reflection_phrases: {phrase!r} would share {name} with another"
        if len(set(self.writers)) < len(self.writers):
            yield f"observe.writers = {list(self.writers)} names one of them twice"
