"""The tables of `megadapo plan`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megadapo.config import RunConfig
from megadapo.lab.plan import step_time
from megadapo.lab.plan.cards import GIB, Card
from megadapo.lab.plan.engine import EngineBytes
from megadapo.lab.plan.phases import GpuKind, longest_sequence
from megadapo.lab.plan.step_time import StepSeconds, UpdateTraffic


def memory_table(kind: GpuKind, card: Card) -> Table:
    """Bytes of one kind of GPU: a row for each purpose, a column for each phase."""
    title = f"{kind.name}: GiB on each of {kind.num_gpus} {card.name}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for phase in kind.phases:
        table.add_column(phase.name, justify="right")
    names = dict.fromkeys(name for phase in kind.phases for name in phase.items)
    for name in names:
        table.add_row(name, *(_gib(phase.items.get(name, 0)) for phase in kind.phases))
    totals = [phase.total for phase in kind.phases]
    table.add_section()
    table.add_row("total", *(f"{total / GIB:.1f}" for total in totals), style="bold")
    free = [card.memory_bytes - total for total in totals]
    table.add_row("free", *(f"{left / GIB:.1f}" for left in free))
    return table


def summary(
    config: RunConfig,
    engine: EngineBytes,
    largest: tuple[int, str],
    traffic: UpdateTraffic,
    main_memory: int,
    experts: int,
) -> list[str]:
    """What follows from the tables, a line each.

    Args:
        main_memory: pinned bytes of a node.
        experts: bytes of the experts that routers take over in a step, in the memory of each node.
    """
    longest = longest_sequence(config)
    num_tokens, bound = largest
    typical = step_time.mean_context(config)
    cache = engine.cache_tokens
    lines = [
        f"longest sequence: {longest:,} tokens in the recipe; up to {num_tokens:,} would fit, "
        f"bounded by {bound}",
        f"KV cache of an engine: {cache:,} tokens, {cache / longest:.1f} longest sequences, "
        f"or {cache / typical:.0f} half-way through a mean response "
        f"(rollout.max_num_seqs = {config.rollout.max_num_seqs})",
        f"weight update: {traffic.inside / GIB:.2f} GiB from the busiest trainer rank inside its "
        f"node, {traffic.between / GIB:.2f} GiB through each GPU's network card",
    ]
    if main_memory:
        lines.append(
            f"main memory of a node: {main_memory / GIB:.0f} GiB, pinned, for what leaves its GPUs"
        )
    if experts:
        lines.append(
            f"trainer.router_replay: up to {experts / GIB:.0f} GiB of main memory on each node, "
            "where all responses are as long as they can be"
        )
    return lines


def times(seconds: StepSeconds, config: RunConfig, card: Card) -> list[str]:
    """Seconds of a step, and what they assume."""
    slower = "rollout" if seconds.rollout >= seconds.longest else "longest"
    of_rollout = {
        "rollout": "by throughput",
        "longest": "by the longest response, which no engine more would shorten",
    }[slower]
    return [
        f"a step at this roofline: {seconds.total:,.0f} s = rollout "
        f"{max(seconds.rollout, seconds.longest):,.0f} ({of_rollout}) + train "
        f"{seconds.train:,.0f} + sync {seconds.sync:.2f}",
        f"  {step_time.READ_SHARE:.0%} of {card.memory_bandwidth / 1e12:.2f} TB/s while tokens are "
        f"sampled, {step_time.TRAIN_SHARE:.0%} of {card.flops / 1e12:.0f} TFLOP/s while they are "
        f"trained on, {step_time.LINK_SHARE:.0%} of {card.link_bandwidth / 1e9:.0f} and "
        f"{card.network_bandwidth / 1e9:.0f} GB/s a link;",
        f"  responses of {step_time.mean_response(config):,.0f} tokens on average"
        + (
            f", {step_time.KEPT_SHARE:.0%} of the groups with a signal"
            if config.sampling.selection == "signal"
            else ""
        )
        + "; no wait of one process for another is counted",
    ]


def page(tables: list[Table], lines: list[str]) -> RenderableType:
    """Everything one below the other."""
    parts: list[RenderableType] = []
    for table in tables:
        parts += [table, Text("")]
    return Group(*parts, *(Text(line) for line in lines))


def _gib(num_bytes: int) -> str:
    if num_bytes == 0:
        return ""
    return f"{num_bytes / GIB:.1f}" if num_bytes >= GIB / 20 else "0.0"
