"""One trace of a run's step, merged from the traces of the driver, trainer ranks and engines.

The format is for Chrome's trace viewer, which Perfetto also reads: times in microseconds.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.cluster.this_node import ClockReading, clock_offset, read_clock
from megadapo.errors import InfraError
from megadapo.observe.files import replaced

if TYPE_CHECKING:
    import torch

    from megadapo.rollout.pool.engines import Engines
    from megadapo.trainer.rank import TrainerRank
    from megadapo.trainer.trainer import Trainer

PROFILER_TIMEOUT_S = 900.0
"""Time until all ranks of an engine must have started the profiler or written their traces."""

_ENGINE_RANK = re.compile(r"rank(\d+)\.\d+\.pt\.trace\.json$")
"""End of the name of vLLM's trace file of a rank."""
_ABOUT_PROFILER = ("Spans", "Traces")
"""Names of the pseudo-processes with which torch's profiler shows itself."""
_FLOW = ("s", "t", "f")
"""Phases of events that share an `id`."""

Event = dict[str, Any]


@contextmanager
def traced(trainer: Trainer, engines: Engines, folder: Path, target: Path) -> Iterator[None]:
    """Trace all processes during the block and merge the traces into `target`.

    Args:
        folder: the run's folder, on storage that all nodes share.

    Raises:
        InfraError: a process died, or its trace is missing.
    """
    import torch

    driver_file = folder / "driver-trace.json"
    files = [folder / f"trainer-{rank}-trace.json" for rank in range(len(trainer.ranks))]
    with torch.profiler.profile() as profile:
        trainer.call_all("apply", _begin)
        engines.call_all("start_profile", PROFILER_TIMEOUT_S)
        yield
        engines.call_all("stop_profile", PROFILER_TIMEOUT_S)
        trainer.call_all("apply", _end, files)
    profile.export_chrome_trace(str(driver_file))
    parts = [TracePart(name="driver", file=driver_file)]
    parts += _trainer_parts(trainer, files)
    parts += _engine_parts(engines)
    missing = [str(part.file) for part in parts if not part.file.exists()]
    if missing:
        raise InfraError(f"{missing[0]} is missing: do all nodes share the folder of --trace?")
    merge_traces(parts, target)


def _trainer_parts(trainer: Trainer, files: Sequence[Path]) -> list[TracePart]:
    import ray

    def ask(rank: int) -> ClockReading:
        call: Any = trainer.ranks[rank].apply.remote(lambda _: read_clock())
        reading: ClockReading = ray.get(call)
        return reading

    return [
        TracePart(
            name=f"trainer rank {rank}",
            file=file,
            ahead_ns=clock_offset(partial(ask, rank)).ahead_ns,
        )
        for rank, file in enumerate(files)
    ]


def _engine_parts(engines: Engines) -> list[TracePart]:
    """Return vLLM's traces, one file per rank of an engine, beside the engine's log."""

    def ask(index: int) -> ClockReading:
        refs = engines.call("clock", {index: ()})
        answers: dict[int, ClockReading] = engines.gather(
            refs, doing="clock", timeout_s=PROFILER_TIMEOUT_S
        )
        return answers[index]

    parts = []
    for index in engines.updatable():
        ahead_ns = clock_offset(partial(ask, index)).ahead_ns
        folder = engines.handles[index].spec.profile_folder
        found = sorted(folder.glob("*.pt.trace.json"))
        ranks = {int(match[1]): file for file in found if (match := _ENGINE_RANK.search(file.name))}
        for rank in sorted(ranks):
            name = f"engine {index}, rank {rank}" if len(ranks) > 1 else f"engine {index}"
            parts.append(TracePart(name=name, file=ranks[rank], ahead_ns=ahead_ns))
        if not ranks:
            raise InfraError(
                f"{folder}: no trace of engine {index}: do all nodes share the folder of --trace?"
            )
    return parts


_running: list[tuple[ExitStack, torch.profiler.profile]] = []
"""Profilers of this process and what they opened: one during a trace."""


def _begin(rank: TrainerRank) -> None:
    import torch

    from megadapo.trainer.model.layer_ranges import layer_ranges

    opened = ExitStack()
    opened.enter_context(layer_ranges(rank.chunks))
    _running.append((opened, opened.enter_context(torch.profiler.profile())))


def _end(rank: TrainerRank, files: Sequence[Path]) -> None:
    import torch

    opened, profile = _running.pop()
    opened.close()
    profile.export_chrome_trace(str(files[torch.distributed.get_rank()]))


@dataclass(frozen=True, kw_only=True)
class TracePart:
    """The trace of one process."""

    name: str
    file: Path
    ahead_ns: int = 0
    """Lead of its clock over the first part's."""


def merge_traces(parts: Sequence[TracePart], target: Path) -> None:
    """Write all parts into one file, each as one process with its own threads.

    GPU streams become threads of their process. Time 0 is the first event of the first part, which
    must start before the others. Only one part at a time is in memory.

    Args:
        target: file that ends in .json, or in .json.gz for compression.
    """
    origin_ns = 0
    opener = gzip.open if target.suffix == ".gz" else open
    with replaced(target, with_folder=True) as fresh, opener(fresh, "wt", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        separator = "\n"
        for number, part in enumerate(parts):
            trace = json.loads(part.file.read_bytes())
            base_ns = int(trace.get("baseTimeNanoseconds", 0)) - part.ahead_ns
            if number == 0:
                times = [event["ts"] for event in trace["traceEvents"] if event["ph"] != "M"]
                origin_ns = base_ns + int(min(times, default=0.0) * 1e3)
            shift_us = (base_ns - origin_ns) * 1e-3
            for event in _events(trace["traceEvents"], part.name, number, shift_us):
                file.write(separator + json.dumps(event))
                separator = ",\n"
        file.write("\n]}\n")


def _events(events: list[Event], name: str, number: int, shift_us: float) -> Iterator[Event]:
    """Yield the part's events as process `number`, with threads numbered from 0."""
    yield _label("process_name", number, 0, name=name)
    yield _label("process_sort_index", number, 0, sort_index=number)
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    threads: dict[tuple[int | str, int | str], int] = {}
    for event in events:
        if event["ph"] == "M" or event["pid"] in _ABOUT_PROFILER:
            continue
        place = (event["pid"], event["tid"])
        if place not in threads:
            threads[place] = len(threads)
            thread_name = names.get(place, f"thread {event['tid']}")
            yield _label("thread_name", number, threads[place], name=thread_name)
        event |= {"pid": number, "tid": threads[place], "ts": event["ts"] + shift_us}
        if event["ph"] in _FLOW:
            event["id"] = f"{number}.{event['id']}"
        yield event


def _label(kind: str, process: int, thread: int, **values: str | int) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": values}
