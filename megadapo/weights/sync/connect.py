"""Connecting trainer and engines for weight updates: one plan, and buckets that are open."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from megadapo.weights.config import WeightsConfig
from megadapo.weights.sync.buckets import Room, Schedule, pack, piece_bytes, room_of
from megadapo.weights.sync.peers import Parties, UpdatableEngines
from megadapo.weights.sync.plan import EngineShape, Plan
from megadapo.weights.sync.planning import make_plan
from megadapo.weights.sync.sender import SenderInfo
from megadapo.weights.sync.transports.places import Places, find_places

MIB = 1 << 20


@dataclass(frozen=True)
class Connected:
    """What every update over a connection repeats."""

    plan: Plan
    schedule: Schedule
    room: Room


def connect(
    parties: Parties,
    engines: UpdatableEngines,
    config: WeightsConfig,
    shape: EngineShape,
    *,
    dtype: torch.dtype,
    deltas: bool,
    folder: Path | None = None,
) -> Connected:
    """Plan the update of the parties' targets, and let trainer ranks and engines open buckets.

    Args:
        shape: How the engines are cut; where they are is found out here.
        dtype: Type of the engines' weights.
        deltas: Whether updates may send only what changed.
        folder: Where files go, if `config.transport` writes such.
    """
    import ray

    infos: list[SenderInfo] = parties.call("describe")
    places = _find(parties, engines, config, infos)
    parties.transport = places.transport
    bucket_bytes = int(config.bucket_mib * MIB)
    plan = make_plan(
        infos[0].layout,
        [info.position for info in infos],
        replace(shape, nodes=tuple(places.receivers), copies=places.copies),
        itemsize=dtype.itemsize,
        max_bundle_bytes=piece_bytes(bucket_bytes),
        source_nodes=places.sources,
        hosts=places.hosts,
    )
    offers = parties.call(
        "prepare",
        ray.put(plan),
        bucket_bytes=bucket_bytes,
        dtype=dtype,
        transport=places.transport,
        deltas=deltas,
        folder=folder,
    )
    common = {
        "plan": plan.to_json(),
        "shape": asdict(infos[0].layout.shape),
        "bucket_bytes": bucket_bytes,
        "transport": places.transport,
        "offers": offers,
        "deltas": deltas,
    }
    connecting = parties.submit("connect", offers)
    own = zip(parties.targets, places.numbers, places.copy_of_each, strict=True)
    opening = engines.call(
        "init_weight_transfer",
        {index: (common | {"engine": number, "copy": copy},) for index, number, copy in own},
    )
    parties.gather(opening, "connect", forgive=False)
    parties.wait(connecting, "connect")
    parties.call("opened")
    schedule = pack(plan, bucket_bytes)
    return Connected(plan, schedule, room_of(plan, schedule))


def _find(
    parties: Parties, engines: UpdatableEngines, config: WeightsConfig, infos: list[SenderInfo]
) -> Places:
    """Who reads where."""
    nodes = parties.gather(parties.call_engines("node"), "find engines")
    return find_places(
        config.transport,
        [(info.node, info.gpu) for info in infos],
        [nodes[index] for index in parties.targets],
        [engines.gpus(index) for index in parties.targets],
    )
