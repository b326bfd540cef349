"""All panels under their headings, and the phases of a step."""

from __future__ import annotations

from collections.abc import Collection

from megadapo.observe.panels.panel import HELD_OUT, Panel, Section
from megadapo.observe.panels.running import RUNNING
from megadapo.observe.panels.training import TRAINING

SECTIONS = (*TRAINING, *RUNNING)
"""Headings and their panels, in reading order."""

PHASES = {
    "in_step": {
        "time/rollout_s": "rollout",
        "time/train_s": "train",
        "time/sync_s": "publish weights",
    },
    "between": {
        "time/evaluate_s": "evaluate",
        "time/checkpoint_s": "checkpoint of the step before",
    },
    "beside": {"time/reward_s": "scoring, beside the rollout"},
}
"""Phases that the report draws on top of each other: of a step, between steps, in parallel."""

NOT_CURVES = ("step", "policy_version", HELD_OUT, "eval/policy_version")
"""Names in a record that no panel shows."""


def sections_with_values(names: Collection[str]) -> list[Section]:
    """Return the headings and panels that have values.

    A metric that no panel names, such as one of another version, gets its own panel at the end.

    Args:
        names: the metrics that have values; `HELD_OUT` if there are evaluations.
    """
    found = []
    for heading, panels in SECTIONS:
        shown = tuple(one for panel in panels if (one := panel.with_values(names)) is not None)
        if shown:
            found.append((heading, shown))
    drawn = {name for _, panels in found for panel in panels for name in panel.lines}
    drawn |= {"time/step_s", *NOT_CURVES, *(name for part in PHASES.values() for name in part)}
    others = tuple(Panel(name, "", {name: name}) for name in names if name not in drawn)
    return [*found, ("Other metrics", others)] if others else found
