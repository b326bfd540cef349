"""`megadapo plan`: GPU memory, step time and weight traffic of a run before its start."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megadapo.commands.common import Commands, add_command
from megadapo.errors import ConfigError, DataError
from megadapo.observe.tables import print_error

if TYPE_CHECKING:
    from megadapo.config import RunConfig
    from megadapo.plan.cards import Card
    from megadapo.plan.phases import GpuKind, Models
    from megadapo.plan.refit import Refit

DEFAULT_GPU = "H100-80G"


def add(commands: Commands) -> None:
    summary = "memory of every kind of GPU by phase, time of a step, bytes of a weight update"
    parser = add_command(commands, "plan", summary, takes_overrides=True)
    parser.add_argument("config", help="recipe (TOML), or the folder of a run")
    add_gpu(parser, purpose="GPU of the memory plan")
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="nodes with the GPUs (default: eight GPUs a node)"
    )
    parser.add_argument(
        "--main-memory",
        type=int,
        metavar="GIB",
        help="main memory of a trainer's node (default 2048); a warning says if it may not suffice",
    )
    parser.add_argument(
        "--fit",
        action="store_true",
        help="instead: the longest sequence of each published model on one GPU of each kind",
    )
    parser.set_defaults(run=run)


def add_gpu(parser: argparse.ArgumentParser, *, purpose: str) -> None:
    """Declare the option for the GPU of the memory plan."""
    parser.add_argument(
        "--gpu",
        default=DEFAULT_GPU,
        metavar="CARD",
        help=f"{purpose}, such as H200 or RTX-4090 (default {DEFAULT_GPU})",
    )


def run(arguments: argparse.Namespace) -> int:
    from megadapo.config import load_config
    from megadapo.plan.fit import main_memory_warnings, problems, warnings
    from megadapo.plan.phases import gpu_kinds, models_of
    from megadapo.plan.refit import plan_for, refit_of
    from megadapo.plan.responses import Responses
    from megadapo.plan.split import describe_step
    from megadapo.rollout.engine.spec import validate_engine_layout
    from megadapo.trainer.model.model_layout import validate_model_layout
    from megadapo.weights.layout.layout import ModelLayout

    if arguments.fit:
        print(_fit_table(arguments.config, arguments.overrides))
        return 0
    config, card = load_config(arguments.config, arguments.overrides), card_of(arguments.gpu)
    models = models_of(config)
    # these name the keys if trainer or engines cannot split the model
    validate_model_layout(models.policy, config.trainer)
    validate_engine_layout(models.policy.shape, config.rollout)
    kinds = gpu_kinds(config, models, card)
    gpus_per_node = _gpus_per_node(sum(kind.num_gpus for kind in kinds), arguments.nodes)
    layout = ModelLayout(models.policy.family, models.policy.shape)
    refit = refit_of(config, *plan_for(config, layout, gpus_per_node=gpus_per_node))
    lines = _summary(config, models, card, refit, gpus_per_node)
    lines += describe_step(config, models, card, Responses.of(config))
    for kind in kinds:
        print(_memory_table(kind, card), end="\n\n")
    print("\n".join(lines))
    warned = warnings(config, models, card)
    warned += main_memory_warnings(config, models, card, gpus_per_node, arguments.main_memory)
    for warning in warned:
        print_error(f"warning: {warning}")
    found = problems(config, models, card)
    for problem in found:
        print_error(problem)
    return ConfigError.exit_code if found else 0


def check_memory(config: RunConfig, gpu: str) -> list[str]:
    """Check the memory plan of a run on GPUs; return lines for the user.

    Raises:
        ConfigError: a phase does not fit; the error names it and the keys to change.
    """
    from megadapo.plan.fit import main_memory_warnings, problems, warnings
    from megadapo.plan.phases import fullest, gpu_kinds, models_of

    card = card_of(gpu)
    try:
        models = models_of(config)
    except DataError as error:
        return [f"GPU memory is not checked: {error}"]
    if found := problems(config, models, card):
        raise ConfigError("\n".join([*found, f"(--gpu selects another card than {card.name})"]))
    kinds = gpu_kinds(config, models, card)
    gpus_per_node = _gpus_per_node(sum(kind.num_gpus for kind in kinds), None)
    warned = warnings(config, models, card)
    warned += main_memory_warnings(config, models, card, gpus_per_node)
    fits = f"on {card.name}, {fullest(kinds)} (megadapo plan)"
    return [fits, *(f"warning: {warning}" for warning in warned)]


def card_of(name: str) -> Card:
    """Return the card with this name, in any case; ConfigError for an unknown one."""
    from megadapo.plan.cards import CARDS

    if name.upper() not in CARDS:
        raise ConfigError(f"--gpu {name}: choose one of {', '.join(CARDS)}")
    return CARDS[name.upper()]


def _fit_table(recipe: str, overrides: Sequence[str]) -> str:
    """Return the longest sequences with a recipe's keys: a row per card, a column per model."""
    from megadapo.config import load_config
    from megadapo.models.folder import published_models
    from megadapo.observe.tables import TextTable
    from megadapo.plan.cards import CARDS
    from megadapo.plan.fit import ON_ONE, longest_on_one
    from megadapo.plan.phases import models_of
    from megadapo.plan.ranks import engine_bytes

    found = []
    for name in published_models():
        config = load_config(recipe, [*overrides, *ON_ONE, f"model.path={name}"])
        models = models_of(config)
        weights = engine_bytes(config, models.policy, card_of(DEFAULT_GPU)).weights
        found.append((weights, name, config, models))
    found.sort(key=lambda one: one[0])
    rows = []
    for card in CARDS.values():
        longest = [longest_on_one(config, models, card) for *_, config, models in found]
        rows.append([card.name, *(f"{tokens:,}" if tokens else "-" for tokens in longest)])
    title = "longest sequence in tokens on one GPU, with the optimizer in main memory"
    return TextTable(title=title, head=["", *(name for _, name, *_ in found)], rows=rows).text()


def _gpus_per_node(num_gpus: int, num_nodes: int | None) -> int:
    from megadapo.plan.cards import GPUS_PER_NODE

    if num_nodes is None:
        return min(num_gpus, GPUS_PER_NODE)
    if not 0 < num_gpus <= num_nodes * GPUS_PER_NODE:
        raise ConfigError(
            f"--nodes {num_nodes}: the recipe's {num_gpus} GPUs are "
            f"{-(-num_gpus // GPUS_PER_NODE)} nodes of {GPUS_PER_NODE}"
        )
    return -(-num_gpus // num_nodes)


def _memory_table(kind: GpuKind, card: Card) -> str:
    """Return the memory of one kind of GPU: a row per purpose, a column per phase."""
    from megadapo.observe.tables import TextTable
    from megadapo.plan.cards import GIB

    names = dict.fromkeys(name for phase in kind.phases for name in phase.items)
    rows = [
        [name, *(f"{size / GIB:.1f}" if size else "" for size in sizes)]
        for name in names
        for sizes in [[phase.items.get(name, 0) for phase in kind.phases]]
    ]
    totals = [phase.total for phase in kind.phases]
    rows.append(["total", *(f"{total / GIB:.1f}" for total in totals)])
    rows.append(["free", *(f"{(card.memory_bytes - total) / GIB:.1f}" for total in totals)])
    rows.append(["share of the card", *(f"{total / card.memory_bytes:.1%}" for total in totals)])
    title = f"{kind.name}: GiB on each of {kind.num_gpus} {card.name}"
    return TextTable(
        title=title, head=["", *(phase.name for phase in kind.phases)], rows=rows
    ).text()


def _summary(
    config: RunConfig, models: Models, card: Card, refit: Refit, gpus_per_node: int
) -> list[str]:
    """Describe sequences, caches, weight traffic and main memory, one line each."""
    from megadapo.plan.cards import GIB
    from megadapo.plan.fit import CROWDED, largest_sequence, overflows
    from megadapo.plan.phases import (
        fullest,
        gpu_kinds,
        host_items,
        longest_sequence,
        replayed_bytes,
    )
    from megadapo.plan.ranks import engine_bytes
    from megadapo.plan.responses import PROMPT_TOKENS, mean_response

    engine = engine_bytes(config, models.policy, card)
    longest, cache = longest_sequence(config), engine.cache_tokens
    half = PROMPT_TOKENS + mean_response(config) / 2
    num_tokens, limit = largest_sequence(config, models, card)
    lines = [
        f"longest sequence: {longest:,} tokens in the recipe; up to {num_tokens:,} would fit, "
        f"limited by {limit}",
        f"KV cache of an engine: {cache:,} tokens, {cache / longest:.1f} longest sequences, "
        f"or {cache / half:.0f} half-way through a mean response "
        f"(rollout.max_num_seqs = {config.rollout.max_num_seqs})",
        f"weight update: {refit.linked / GIB:.2f} GiB from the busiest GPU to others of its node, "
        f"{max(refit.sent, refit.received) / GIB:.2f} GiB through the busiest network card "
        "(megadapo weights plan)",
    ]
    host = host_items(config, models, card, gpus_per_node)
    parts = " + ".join(f"{size / GIB:.0f} {name}" for name, size in host.items() if size)
    lines.append(f"main memory of a node: {sum(host.values()) / GIB:.0f} GiB = {parts}")
    kinds = gpu_kinds(config, models, card)
    if not overflows(kinds, card, CROWDED):
        limit = f"{CROWDED:.0%} of a {card.name}, {CROWDED * card.memory_bytes / GIB:.1f} GiB"
        lines.append(f"every phase is below {limit}: {fullest(kinds)}")
    if replayed := replayed_bytes(config, models.policy):
        lines.append(
            f"trainer.router_replay: up to {replayed / GIB:.0f} GiB of main memory on each node, "
            "for responses of the maximum length"
        )
    return lines
