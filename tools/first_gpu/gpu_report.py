"""The record and the Markdown report of the parts that have run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from baselines.head_inputs import OURS, PRODUCTS
from parts import Outcome, Part, Setting, config_of, phases_of

from megadapo.errors import MegadapoError
from megadapo.observe.metrics.records import MetricRecord, plain_numbers, read_metrics
from megadapo.observe.tables import TextTable
from megadapo.plan.phases import models_of
from megadapo.plan.responses import Responses, usual_lengths
from megadapo.plan.split import describe_step

MIB = 2**20
MEASURED = (
    *("policy/ratio_first_max_error", "parity/logprob_abs_mean", "parity/logprob_abs_max"),
    *("time/rollout_s", "time/train_s", "time/sync_s", "weights/bytes", "weights/density"),
)
MOST_OVER_PRODUCTS = 1.12
LEAST_OVER_VERL = 2.0
LOG_LINES = 60
"""Lines of a part's log in the report."""
FAULTS = (MegadapoError, OSError, ArithmeticError, LookupError, TypeError, ValueError)
"""Errors of odd measurements or of a full disk: they may not end the parts that follow."""


def as_record(outcomes: list[Outcome], setting: Setting) -> dict[str, Any]:
    """Return everything that was measured, as JSON values."""
    return {
        "rehearsed": setting.rehearses,
        "parts": [
            {
                "name": one.part.name,
                "result": one.result,
                "reason": one.reason,
                "seconds": round(one.seconds, 1),
                "command": shlex.join(one.part.command),
                **_measured(one, setting),
                "memory_curve": [(round(s, 1), at, round(mib)) for s, at, mib in one.memory],
            }
            for one in outcomes
        ],
    }


def _measured(one: Outcome, setting: Setting) -> dict[str, Any]:
    try:
        steps = [plain_numbers(step) for step in steps_of(one.part)]
        memory = memory_by_phase(one, setting)
        return {"steps": steps, "memory": memory, "results": results_of(one.part)}
    except FAULTS as error:
        return {"fault": described(error)}


def described(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def memory_by_phase(outcome: Outcome, setting: Setting) -> dict[str, dict[str, float | None]]:
    """Return the most MiB in each phase beside the plan's; empty without samples."""
    part = outcome.part
    alone = results_of(part).get("memory", {})
    if not (outcome.memory or alone):
        return {}
    phases = phases_of(part.overrides, setting.card)
    if alone:
        # no engine, and no buckets for one
        return {
            name: {
                "planned": round(sum(b for item, b in phase.items.items() if _is_own(item)) / MIB),
                "measured": alone[name],
            }
            for name, phase in phases.items()
            if name in alone
        }
    planned = {name: phase.total for name, phase in phases.items()}
    for name in ("sync", "checkpoint"):
        # engines wake at the end
        planned[name] = max(planned[name], planned["rollout"])
    return {
        name: {"planned": round(total / MIB), "measured": outcome.most_in(name)}
        for name, total in planned.items()
    }


def _is_own(item: str) -> bool:
    return "engine" not in item and item not in ("weight buckets", "KV cache")


def results_of(part: Part) -> dict[str, Any]:
    """Return what a part has measured; empty if it writes no file, or has not yet."""
    if part.results is None or not part.results.exists():
        return {}
    found: dict[str, Any] = json.loads(part.results.read_bytes())
    return found


def write_report(path: Path, outcomes: list[Outcome], setting: Setting, day: date) -> None:
    """Write the report of the parts so far."""
    lines = [f"# First GPU: {day}{', rehearsed on a CPU' if setting.rehearses else ''}", ""]
    lines += [*_machine(setting), "", "| part | result | seconds | note |"]
    lines += ["| --- | --- | ---: | --- |"]
    for one in outcomes:
        note = one.reason.replace("|", "\\|")
        lines.append(f"| {one.part.name} | {one.result} | {one.seconds:.0f} | {note} |")
    for one in outcomes:
        try:
            found = list(_details(one, setting))
        except FAULTS as error:
            found = [f"No details: {described(error)}"]
        if found:
            lines += ["", f"## {one.part.name}", "", *found]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _machine(setting: Setting) -> list[str]:
    """Return the GPU, the driver and the versions."""
    machine = setting.machine
    gpus = ", ".join(f"{gpu.name} ({gpu.memory_gib:.1f} GiB)" for gpu in machine.gpus)
    versions = {"Python": machine.python, "CUDA of torch": machine.torch_cuda, **machine.packages}
    known = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    return [
        f"- GPU: {gpus or 'none'}, driver {machine.driver or 'none'}",
        f"- {machine.num_cores} cores, {machine.memory_gib:.0f} GiB of memory, {machine.system}",
        f"- {known}",
    ]


def _details(one: Outcome, setting: Setting) -> Iterator[str]:
    if one.result == "skipped":
        return
    log = setting.folder / "logs" / f"{one.part.slug}.log"
    yield f"`{shlex.join(one.part.command)}`"
    if one.result == "failed" or one.part.run is None:
        text = log.read_text(encoding="utf-8", errors="replace").splitlines()
        yield from ("", "```", *text[-LOG_LINES:], "```")
    if one.part.name.startswith("head ") and (found := results_of(one.part)):
        yield from ("", *(f"- {line}" for line in goals(found["results"])))
    yield from _run(one, setting)


def goals(results: list[dict[str, Any]]) -> list[str]:
    """Return the head's goals beside what was measured at one shape."""
    times = {one["name"]: one["best_ms"] for one in results if one["best_ms"] is not None}
    own = times[OURS]
    over = own / times[PRODUCTS]
    lines = [
        f"{over:.2f} x its three products; goal: at most {MOST_OVER_PRODUCTS} "
        f"({_met(over <= MOST_OVER_PRODUCTS)})"
    ]
    for words, least in (("verl Triton", LEAST_OVER_VERL), ("Liger", 1.0)):
        rivals = {name: ms for name, ms in times.items() if name.startswith(words)}
        if not rivals:
            absent = [one for one in results if one["name"].startswith(words)]
            lines += [f"{one['name']} did not run: {one['absent']}" for one in absent]
            continue
        name = min(rivals, key=lambda one: rivals[one])
        faster = rivals[name] / own
        lines.append(
            f"{faster:.2f} x the speed of {name}; goal: at least {least:.0f} "
            f"({_met(faster >= least)})"
        )
    return lines


def _met(is_met: bool) -> str:
    return "met" if is_met else "not met"


def steps_of(part: Part) -> list[MetricRecord]:
    """Return the metrics of a run's steps."""
    return [] if part.run is None else read_metrics(part.run)


def _run(one: Outcome, setting: Setting) -> Iterator[str]:
    """Yield the steps of a run, and its memory and speed beside the plan's."""
    steps = steps_of(one.part)
    if steps:
        head = ["step", *MEASURED]
        rows = [[str(s["step"]), *(_cell(s.get(name)) for name in MEASURED)] for s in steps]
        title = f"{one.part.name}: steps"
        yield from (TextTable(title=title, head=head, rows=rows).markdown(), "")
        for name, *metrics in (
            ("rollout", "tokens/generated", "time/rollout_s"),
            ("update", "tokens/trained", "time/train_s"),
        ):
            tokens, seconds = (steps[-1].get(metric) for metric in metrics)
            if tokens and seconds:
                yield f"- {name}: {tokens / seconds:,.0f} tokens/s in the last step"
        for line in _forecast(one.part, steps, setting):
            yield f"- plan: {line.strip()}"
    if memory := memory_by_phase(one, setting):
        rows = [
            [name, *(_cell(found[kind]) for kind in ("planned", "measured"))]
            for name, found in memory.items()
        ]
        where = "processes" if setting.rehearses else "GPU"
        head = ["phase", "MiB planned on a GPU", f"most MiB measured ({where})"]
        title = f"{one.part.name}: memory"
        yield TextTable(title=title, head=head, rows=rows).markdown()


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _forecast(part: Part, steps: list[MetricRecord], setting: Setting) -> list[str]:
    """Return the plan's times for responses as long as the run's; [] without steps."""
    config = config_of(part.overrides)
    lengths = [mean for step in steps if (mean := step.get("response_length/mean")) is not None]
    if not lengths:
        return []
    responses = Responses.of(
        config,
        usual_lengths(sum(lengths) / len(lengths)),
        prompt_tokens=config.data.max_prompt_tokens,
    )
    return describe_step(config, models_of(config), setting.card, responses)
