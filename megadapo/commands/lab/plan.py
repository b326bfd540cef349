"""`megadapo plan`: what a run takes of its GPUs, and how long a step would be, before it starts."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from megadapo.commands.common import Commands, add_command
from megadapo.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megadapo.config import RunConfig
    from megadapo.lab.plan.cards import Card
    from megadapo.lab.plan.step_time import UpdateTraffic
    from megadapo.models.description import ModelDescription

DEFAULT_GPU = "H100-80G"


def add(commands: Commands) -> None:
    summary = "memory of every kind of GPU by phase, time of a step, bytes of a weight update"
    parser = add_command(commands, "plan", summary, takes_overrides=True)
    parser.add_argument("config", help="recipe (TOML), or the folder of a run")
    add_gpu(parser, purpose="GPU to plan for")
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="that the GPUs are in (default: eight in each)"
    )
    parser.set_defaults(run=run)


def add_gpu(parser: argparse.ArgumentParser, *, purpose: str) -> None:
    """Declare the GPU that memory is planned for."""
    parser.add_argument(
        "--gpu",
        default=DEFAULT_GPU,
        metavar="H100-80G|H200|A100-80G",
        help=f"{purpose} (default {DEFAULT_GPU})",
    )


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from megadapo.config import load_config
    from megadapo.lab.plan.engine import engine_bytes
    from megadapo.lab.plan.fit import largest_sequence, problems
    from megadapo.lab.plan.phases import (
        gpu_kinds,
        host_bytes,
        itemsize_of,
        models_of,
        replayed_bytes,
    )
    from megadapo.lab.plan.report import memory_table, page, summary, times
    from megadapo.lab.plan.step_time import step_seconds

    config, card = load_config(arguments.config, arguments.overrides), card_of(arguments.gpu)
    models = models_of(config)
    check_layouts(models.policy, config)
    kinds = gpu_kinds(config, models, card)
    num_gpus = sum(kind.num_gpus for kind in kinds)
    gpus_per_node = _gpus_per_node(num_gpus, arguments)
    traffic = _traffic(config, models.policy, gpus_per_node=gpus_per_node)
    engine = engine_bytes(models.policy, config.rollout, card, itemsize=itemsize_of(config))
    lines = summary(
        config,
        engine,
        largest_sequence(config, models, card),
        traffic,
        host_bytes(config, models, engine, gpus_per_node),
        replayed_bytes(config, models.policy),
    )
    lines += times(step_seconds(config, models.policy, card, traffic), config, card)
    Console(width=max(100, Console().width)).print(
        page([memory_table(kind, card) for kind in kinds], lines)
    )
    found = problems(config, models, card)
    for problem in found:
        print(f"megadapo: {problem}", file=sys.stderr)
    return ConfigError.exit_code if found else 0


def refuse_what_cannot_fit(config: RunConfig, gpu: str) -> str:
    """Plan a run that is to use GPUs; return what was found of it.

    Raises:
        ConfigError: some phase does not fit; it says which, and what to change.
    """
    from megadapo.lab.plan.fit import problems
    from megadapo.lab.plan.phases import fullest, gpu_kinds, models_of

    card = card_of(gpu)
    try:
        models = models_of(config)
    except DataError as error:
        return f"the GPUs' memory is not checked: {error}"
    if found := problems(config, models, card):
        raise ConfigError("\n".join([*found, f"(--gpu names another card than {card.name})"]))
    return f"on {card.name}, a {fullest(gpu_kinds(config, models, card))} (megadapo plan)"


def card_of(name: str) -> Card:
    """The card of a name, in any case.

    Raises:
        ConfigError: it is none of those that can be planned for.
    """
    from megadapo.lab.plan.cards import CARDS

    if name.upper() not in CARDS:
        raise ConfigError(f"--gpu {name}: choose one of {', '.join(CARDS)}")
    return CARDS[name.upper()]


def check_layouts(model: ModelDescription, config: RunConfig) -> None:
    """Trainer and engines must be able to split the model before there is anything to plan.

    Raises:
        ConfigError: one of them is not; it names the keys.
    """
    from megadapo.rollout.engine.model_layout import validate_engine_layout
    from megadapo.trainer.model.model_layout import validate_model_layout

    validate_model_layout(model, config.trainer)
    validate_engine_layout(model.shape, config.rollout)


def _gpus_per_node(num_gpus: int, arguments: argparse.Namespace) -> int:
    from megadapo.lab.plan.cards import GPUS_PER_NODE

    if arguments.nodes is None:
        return min(num_gpus, GPUS_PER_NODE)
    if not 0 < num_gpus <= arguments.nodes * GPUS_PER_NODE:
        raise ConfigError(
            f"--nodes {arguments.nodes}: the recipe's {num_gpus} GPUs are "
            f"{-(-num_gpus // GPUS_PER_NODE)} nodes of {GPUS_PER_NODE}"
        )
    return int(-(-num_gpus // arguments.nodes))


def _traffic(config: RunConfig, model: ModelDescription, *, gpus_per_node: int) -> UpdateTraffic:
    """Of the very plan that the run's updates will repeat."""
    from collections import Counter

    from megadapo.commands.lab.weights import plan_for
    from megadapo.lab.plan.step_time import UpdateTraffic
    from megadapo.weights.layout.layout import ModelLayout
    from megadapo.weights.sync.plan_report import crosses_nodes

    layout = ModelLayout(model.family, model.shape)
    plan, hosts = plan_for(config, layout, gpus_per_node=gpus_per_node)
    sent: Counter[int] = Counter()
    between = 0
    for transfer in plan.transfers:
        size = plan.bundle(transfer).num_bytes
        sent[transfer.feeder] += size
        between += size if crosses_nodes(transfer, hosts) else 0
    is_shared = config.cluster.placement == "colocated"
    busiest = max(sent.values())
    return UpdateTraffic(
        inside=busiest if is_shared else 0,
        # engines with GPUs of their own get everything over the network
        between=between / plan.num_sources if is_shared else busiest,
    )
