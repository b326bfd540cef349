"""The `[observe]` section: saved rollouts and metric writers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from megadapo.observe.metrics.reflection import ANY_PHRASE, AREA, metric_name
from megadapo.section import Section

SavedGroups = int | Literal["all"]
WriterName = Literal["tensorboard", "wandb"]


class ObserveConfig(Section, title="observe"):
    """Saved rollouts, metric writers, and words that are counted in responses."""

    saved_groups: NonNegativeInt | Literal["all"] = 8
    """Groups of each step saved in rollouts/ with all their responses. About half were trained on;
    the rest are all incorrect, all correct, in the reserve or rejected. "all" saves every group
    that was generated or trained on, 0 none."""
    writers: tuple[WriterName, ...] = ("tensorboard",)
    """Destinations of metrics besides metrics.jsonl. wandb needs the package of that name and
    reads its own settings."""
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on the driver's loopback where Prometheus finds the run's state and the metrics of its
    last step, at /metrics. If the port is taken, the run continues without it."""

    reflection_phrases: tuple[str, ...] = (
        *("wait", "however", "alternatively", "on second thought"),
        *("let me check", "let me verify", "double-check", "recheck"),
    )
    """Phrases of a model that checks itself: the metric reflection/NAME is the share of responses
    with the phrase. Case is ignored; only whole words count."""

    def conflicts(self) -> Iterator[str]:
        names = [metric_name(phrase) for phrase in self.reflection_phrases]
        for phrase, name in zip(self.reflection_phrases, names, strict=True):
            if name == AREA:
                yield "observe.reflection_phrases has a phrase without a word; leave it out"
            elif names.count(name) > 1 or name == ANY_PHRASE:
                yield f"observe.reflection_phrases: {phrase!r} would share {name} with another"
        if len(set(self.writers)) < len(self.writers):
            yield f"observe.writers = {list(self.writers)} names one of them twice"
