"""One trace of many processes, from the traces that torch's profiler wrote of each.

The format is that of Chrome's trace viewer, which Perfetto reads: times in microseconds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_ABOUT_PROFILER = ("Spans", "Traces")
"""What torch's profiler calls the processes that only show the profiler itself."""
_FLOW = ("s", "t", "f")
"""Phases of events that are tied together by their `id`."""

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TracePart:
    """The trace of one process."""

    name: str
    """Of its row."""
    file: Path
    ahead_ns: int = 0
    """How far its clock is ahead of the first part's."""


def merge_traces(parts: Sequence[TracePart], target: Path) -> None:
    """Write all parts into one file, in their order, each as one process with its own threads.

    Streams of a GPU become threads of the process that uses it. Time 0 is the first event of the
    first part, which must have begun before the others. One part at a time is in memory.

    Args:
        target: ends in .json, or in .json.gz to be compressed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    origin_ns = 0
    with _open(target) as file:
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


def _open(target: Path) -> IO[str]:
    if target.suffix == ".gz":
        return gzip.open(target, "wt", encoding="utf-8")
    return target.open("w", encoding="utf-8")


def _events(events: list[Event], name: str, number: int, shift_us: float) -> Iterator[Event]:
    """The part's events as those of process `number`, its threads numbered from 0."""
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
