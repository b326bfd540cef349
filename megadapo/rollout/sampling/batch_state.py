"""A whole step's batch as JSON values, for a run that stops while the batch waits to be trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, fields
from typing import Any

from megadapo.errors import CheckpointError
from megadapo.rollout.engine.activity import EngineActivity
from megadapo.rollout.sampling.reserve import decode_group, encode_group
from megadapo.rollout.sampling.sampled_batch import SampledBatch
from megadapo.rollout.sampling.selection import SampledGroup

_WITH_GROUPS = ("groups", "saved", "engines")


def encode_batch(batch: SampledBatch) -> dict[str, Any]:
    """Return a batch as JSON values; its numbers stay exact."""
    plain = {
        field.name: getattr(batch, field.name)
        for field in fields(SampledBatch)
        if field.name not in _WITH_GROUPS
    }
    return {
        **plain,
        "groups": [encode_group(group) for group in batch.groups],
        "engines": [asdict(activity) for activity in batch.engines],
        "saved": [
            {"group": encode_group(s.group), "fate": s.fate, "from_reserve": s.from_reserve}
            for s in batch.saved
        ],
    }


def decode_batch(entry: Mapping[str, Any]) -> SampledBatch:
    """Return the batch that `encode_batch` was given.

    Raises:
        CheckpointError: the state is damaged.
    """
    try:
        plain = {
            field.name: entry[field.name]
            for field in fields(SampledBatch)
            # a state of a run that knew no parts has none
            if field.name not in _WITH_GROUPS and (field.name in entry or _is_required(field))
        }
        lists = {name: tuple(value) for name, value in plain.items() if isinstance(value, list)}
        return SampledBatch(
            **{**plain, **lists},
            groups=tuple(decode_group(group) for group in entry["groups"]),
            engines=tuple(EngineActivity(**activity) for activity in entry["engines"]),
            saved=tuple(
                SampledGroup(
                    group=decode_group(s["group"]), fate=s["fate"], from_reserve=s["from_reserve"]
                )
                for s in entry["saved"]
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the saved batch of the next step is damaged: {error!r}") from error


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING
