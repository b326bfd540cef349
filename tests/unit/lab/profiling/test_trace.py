"""A merged trace keeps rows, arrows and clocks of its processes apart."""

import gzip
import json
from pathlib import Path
from typing import Any

from megadapo.cluster import this_node
from megadapo.cluster.this_node import ClockReading, clock_offset
from megadapo.lab.profiling.trace import TracePart, merge_traces

SECOND_NS = 1_000_000_000


def write(path: Path, base_ns: int, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"baseTimeNanoseconds": base_ns, "traceEvents": events}))
    return path


def span(name: str, pid: int | str, tid: int | str, ts: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": 1.5}


def merged(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes()
    is_packed = path.suffix == ".gz"
    return json.loads(gzip.decompress(content) if is_packed else content)["traceEvents"]


def test_processes_keep_their_rows_and_share_one_clock(tmp_path):
    """Both processes have pid 7 and use GPU 0, on different nodes."""
    name = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 21, "ts": 0}
    stream = {**name, "args": {"name": "stream 21"}}
    arrow = {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 3, "pid": 7, "tid": 7, "ts": 2.0}
    profiler = span("PyTorch Profiler (0)", "Spans", "PyTorch Profiler", 0.5)
    first = [span("begin", 7, 7, 1.0), profiler, stream, span("kernel", 0, 21, 3.0), arrow]
    second = [span("other", 7, 8, 4.0), {**arrow, "ph": "f"}]
    one = write(tmp_path / "a", 100 * SECOND_NS, first)
    other = write(tmp_path / "b", 102 * SECOND_NS, second)
    parts = [
        TracePart(name="driver", file=one),
        TracePart(name="rank 0", file=other, ahead_ns=2 * SECOND_NS),
    ]
    target = tmp_path / "traces" / "all.json.gz"
    merge_traces(parts, target)
    events = merged(target)
    labels = [(e["pid"], e["args"]) for e in events if e["name"] == "process_name"]
    assert labels == [(0, {"name": "driver"}), (1, {"name": "rank 0"})]
    by_name = {e["name"]: e for e in events if e["ph"] == "X"}
    assert set(by_name) == {"begin", "kernel", "other"}
    assert by_name["begin"]["ts"] == 0.5 and by_name["kernel"]["ts"] == 2.5
    assert by_name["other"]["ts"] == 3.5, "its clock is two seconds ahead"
    assert by_name["kernel"]["pid"] == 0 and by_name["other"]["pid"] == 1
    threads = {(e["pid"], e["tid"]): e["args"] for e in events if e["name"] == "thread_name"}
    assert threads[0, by_name["kernel"]["tid"]] == {"name": "stream 21"}
    arrows = {e["id"] for e in events if e["name"] == "ac2g"}
    assert len(arrows) == 2, "an arrow would go from one process to the other"


def test_empty_trace_is_merged(tmp_path):
    empty = write(tmp_path / "empty", 0, [])
    merge_traces([TracePart(name="driver", file=empty)], tmp_path / "all.json")
    assert [e["ph"] for e in merged(tmp_path / "all.json")] == ["M", "M"]


def test_clock_offset_uses_the_quickest_answer_and_is_zero_on_one_machine(monkeypatch):
    assert clock_offset(this_node.read_clock).ahead_ns == 0
    now = [0]
    delays = iter([50, 10, 200, *[80] * this_node.CLOCK_READINGS])
    monkeypatch.setattr(this_node.time, "time_ns", lambda: now[0])

    def ask() -> ClockReading:
        now[0] += next(delays)
        return "elsewhere", now[0] + 1_000

    offset = clock_offset(ask)
    assert offset.error_ns == 5 and offset.ahead_ns == 1_005
