"""`megadapo weights plan`: what a weight update of a run would move, before anything is started."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megadapo.commands.common import Commands, add_command
from megadapo.errors import DataError

if TYPE_CHECKING:
    from megadapo.config import RunConfig
    from megadapo.weights.layout.layout import ModelLayout
    from megadapo.weights.sync.plan import Plan
    from megadapo.weights.sync.planning import Hosts
    from megadapo.weights.sync.transports.places import Places

MIB = 1 << 20


def add(commands: Commands) -> None:
    parser = add_command(commands, "weights", "what a weight update moves")
    reports = parser.add_subparsers(metavar="REPORT", required=True)
    plan = add_command(
        reports, "plan", "bytes per link and buffers of a run's update", takes_overrides=True
    )
    plan.add_argument("config", type=Path, help="recipe (TOML), or the folder of a run")
    plan.add_argument(
        "--model-config",
        type=Path,
        help="config.json to plan for, where model.path is not at hand",
    )
    plan.add_argument(
        "--gpus-per-node", type=int, default=8, help="ranks of a node, colocated (default 8)"
    )
    plan.add_argument("--links", type=int, default=8, help="how many links to list (default 8)")
    plan.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from megadapo.config import load_config
    from megadapo.weights.sync.plan_report import report

    config = load_config(arguments.config, arguments.overrides)
    layout = model_layout(config, arguments.model_config)
    started = time.perf_counter()
    plan, hosts = plan_for(config, layout, gpus_per_node=arguments.gpus_per_node)
    seconds = time.perf_counter() - started
    bucket_bytes = int(config.weights.bucket_mib * MIB)
    lines = report(plan, layout, hosts, bucket_bytes=bucket_bytes, num_links=arguments.links)
    print("\n".join([*lines, f"planned in {seconds:.2f} s"]))
    return 0


def plan_for(config: RunConfig, layout: ModelLayout, *, gpus_per_node: int) -> tuple[Plan, Hosts]:
    """The plan of a run's updates, and the nodes of ranks and receivers."""
    from megadapo.weights.layout.placement import replica_positions, stage_layers
    from megadapo.weights.sync.buckets import piece_bytes
    from megadapo.weights.sync.plan import EngineShape
    from megadapo.weights.sync.planning import make_plan

    trainer, rollout = config.trainer, config.rollout
    positions = replica_positions(
        layout,
        tp_size=trainer.tensor_parallel,
        pp_size=trainer.pipeline_parallel,
        stages=stage_layers(
            layout.shape.num_layers,
            pp_size=trainer.pipeline_parallel,
            vpp_size=trainer.virtual_pipeline,
            first=trainer.first_stage_layers,
            last=trainer.last_stage_layers,
        ),
        ep_size=trainer.expert_parallel,
        etp_size=trainer.expert_tensor_parallel,
        num_dp=trainer.num_replicas,
    )
    places = _places(config, len(positions), gpus_per_node)
    plan = make_plan(
        layout,
        positions,
        EngineShape(
            tp_size=rollout.tensor_parallel,
            pp_size=rollout.pipeline_parallel,
            expert_parallel=rollout.expert_parallel,
            nodes=tuple(places.receivers),
            copies=places.copies,
        ),
        itemsize=4 if config.model.dtype == "float32" else 2,
        max_bundle_bytes=piece_bytes(int(config.weights.bucket_mib * MIB)),
        source_nodes=places.sources,
        hosts=places.hosts,
    )
    return plan, places.hosts


def _places(config: RunConfig, num_ranks: int, gpus_per_node: int) -> Places:
    """Where trainer ranks and engines meet on nodes with so many GPUs."""
    from megadapo.weights.sync.transports.places import find_places

    has_gpus = config.cluster.device != "cpu"

    def device(gpu: int) -> tuple[str, str | None]:
        return f"node {gpu // gpus_per_node}", str(gpu % gpus_per_node) if has_gpus else None

    first = 0 if config.cluster.placement == "colocated" else num_ranks
    engines = [
        [device(first + engine * config.rollout.ranks_per_engine + rank)
         for rank in range(config.rollout.ranks_per_engine)]
        for engine in range(config.rollout.num_engines)
    ]  # fmt: skip
    return find_places(
        config.weights.transport,
        [device(rank) for rank in range(num_ranks)],
        [gpus[0][0] for gpus in engines],
        [[gpu for _, gpu in gpus if gpu is not None] for gpus in engines],
    )


def model_layout(config: RunConfig, model_config: Path | None) -> ModelLayout:
    """The layout of the run's model, or of the `config.json` given in its place."""
    from megadapo.weights.disk.sources import read_json
    from megadapo.weights.layout.layout import layout_for

    path = model_config or Path(config.model.path) / "config.json"
    if not path.is_file():
        raise DataError(
            f"{path} is not there: name the model's config.json with --model-config "
            "(`hf download MODEL config.json` fetches it)."
        )
    return layout_for(read_json(path))
