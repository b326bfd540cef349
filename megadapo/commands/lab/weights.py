"""`megadapo weights plan`: the bytes that each weight update of a run would move."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megadapo.commands.common import Commands, add_command
from megadapo.commands.plan import add_gpu, card_of

if TYPE_CHECKING:
    from megadapo.config import RunConfig
    from megadapo.plan.cards import Card
    from megadapo.weights.layout.layout import ModelLayout
    from megadapo.weights.sync.plan import UpdatePlan
    from megadapo.weights.sync.planning import Hosts

MIB = 1 << 20


def add(commands: Commands) -> None:
    parser = add_command(commands, "weights", "describe the weight updates of a run")
    reports = parser.add_subparsers(metavar="REPORT", required=True)
    plan = add_command(
        reports, "plan", "bytes per link and buffers of an update", takes_overrides=True
    )
    plan.add_argument("config", type=Path, help="recipe (TOML), or the folder of a run")
    plan.add_argument("--gpus-per-node", type=int, default=8, help="GPUs of a node (default 8)")
    add_gpu(plan, purpose="GPU of the forecast")
    plan.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from megadapo.config import load_config
    from megadapo.models.description import describe_model
    from megadapo.models.folder import find_hf_config
    from megadapo.plan.refit import plan_for
    from megadapo.weights.layout.layout import ModelLayout

    config = load_config(arguments.config, arguments.overrides)
    policy = describe_model(find_hf_config(config.model.path))
    layout = ModelLayout(policy.family, policy.shape)
    started = time.perf_counter()
    plan, hosts = plan_for(config, layout, gpus_per_node=arguments.gpus_per_node)
    seconds = time.perf_counter() - started
    bucket_bytes = int(config.weights.bucket_mib * MIB)
    lines = report(plan, layout, hosts, bucket_bytes=bucket_bytes)
    print("\n".join([*lines, f"planned in {seconds:.2f} s", ""]))
    print(work_table(config, plan, hosts, card_of(arguments.gpu)))
    return 0


def report(plan: UpdatePlan, layout: ModelLayout, hosts: Hosts, *, bucket_bytes: int) -> list[str]:
    """Return bytes per rank, buckets and rounds of a plan, as lines of text."""
    from megadapo.weights.sync.buckets import pack

    sent: Counter[int] = Counter()
    received: Counter[tuple[int, int]] = Counter()
    between = in_node = 0
    for transfer in plan.transfers:
        size = plan.bundle(transfer).num_bytes
        target = (transfer.receiver, transfer.engine_rank)
        sent[transfer.sender] += size
        received[target] += size
        if hosts.crosses_nodes(transfer):
            between += size
        elif transfer.sender != transfer.owner:
            in_node += size
        in_node += size * (plan.num_members(transfer.receiver) - 1)
    schedule = pack(plan, bucket_bytes)
    bucket = max(schedule.capacity.buckets)
    wave = max(schedule.capacity.waves.values())
    moved = sum(sent.values())
    shape, nodes = plan.engine, len(plan.engine.nodes)
    return [
        f"{layout.family.architecture}, {layout.shape.num_layers} layers: "
        f"{plan.num_sources} trainer ranks to {nodes} receiver(s) of TP {shape.tp_size}"
        + (f" x PP {shape.pp_size}" if shape.pp_size > 1 else "")
        + (" with expert parallelism" if shape.expert_parallel else ""),
        f"transfers             {len(plan.transfers)} in {schedule.num_rounds} rounds",
        f"bytes moved           {_size(moved)}, {_size(between)} of them between nodes",
        f"forwarded in a node   {_size(in_node)}",
        _spread("trainer rank sends", [sent[rank] for rank in range(plan.num_sources)]),
        _spread("engine rank receives", list(received.values())),
        f"memory, trainer rank  {_size(2 * bucket)} at most: two buckets of {_size(bucket)}, with "
        "slices relayed to other nodes",
        f"memory, engine rank   {_size(wave)} at most, if buckets are not read in place",
    ]


def work_table(config: RunConfig, plan: UpdatePlan, hosts: Hosts, card: Card) -> str:
    """Return the work of the busiest process of each kind, and forecast seconds."""
    from megadapo.observe.tables import TextTable
    from megadapo.plan.refit import DELTA_SHARE, refit_of

    both = [refit_of(config, plan, hosts, delta=delta) for delta in (False, True)]
    texts = {
        "driver: calls, waits": lambda one: f"{one.calls:,}, {one.trips}",
        "rounds": lambda one: f"{one.num_rounds}",
        "trainer rank: from and to main memory": lambda one: _size(one.compared),
        "trainer rank: copied, operations": lambda one: f"{_size(one.filled)}, {one.fills:,}",
        "network card: sent": lambda one: _size(one.sent),
        "network card: received": lambda one: _size(one.received),
        "GPU: to others of its node": lambda one: _size(one.linked),
        "engine rank: copied, operations": lambda one: f"{_size(one.read)}, {one.reads:,}",
    }
    rows = [[name, *map(text, both)] for name, text in texts.items()]
    parts = [one.seconds(card) for one in both]
    rows += [[f"s {name}", *(f"{one[name]:.3f}" for one in parts)] for name in parts[0]]
    rows.append(["s, if nothing overlaps", *(f"{sum(one.values()):.2f}" for one in parts)])
    rows.append(["most of it", *(max(one, key=lambda name: one[name]) for one in parts)])
    title = f"An update on {card.name}: the busiest of each kind, without checksums"
    head = ["", "all weights", f"changes, {DELTA_SHARE:.0%} of the bytes"]
    return TextTable(title=title, head=head, rows=rows).text()


def _spread(what: str, sizes: Sequence[int]) -> str:
    mean = sum(sizes) / len(sizes)
    return (
        f"{what:<22}{_size(mean)} on average, {_size(min(sizes))} to {_size(max(sizes))} "
        f"({max(sizes) / mean:.3f} x)"
    )


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"
