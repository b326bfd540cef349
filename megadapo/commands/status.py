"""`megadapo status` and `megadapo top`: show a run while it works, from the files of its folder."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from megadapo.commands.common import Commands, add_command, whole_number
from megadapo.errors import ConfigError, DataError
from megadapo.observe.tables import formatted, print_error, printable

if TYPE_CHECKING:
    from rich.console import ConsoleRenderable, Group

    from megadapo.observe.run_records import RunRecords
    from megadapo.run.state.status import Status

TAIL_BYTES = 1 << 20
"""Size of the end of metrics.jsonl and log.txt that is read: some 200 steps."""
EVERY_S = 2.0
"""Seconds between two frames."""
ROUTINE = ("step=", "evaluation step=", "starting: ", "info: ", "end: ")
"""Beginnings of lines in log.txt that no frame shows."""
NUM_MESSAGES = 5
MAX_MESSAGE = 300
"""Most characters of one message of log.txt."""
SILENT_S = 10.0
"""Seconds without a heartbeat, while other ranks send some, after which a rank is shown."""
CURRENT_S = 60.0
"""Seconds after which a speed without new tokens is no current one."""
GIB = 1 << 30


def add(commands: Commands) -> None:
    status = add_command(commands, "status", "print the progress of a run")
    status.description = (
        "Print a run's status.json, and warnings about what it learns. Exit code: 0 if the run is "
        "running or finished, 1 if its supervisor waits to start it again, it was stopped, it "
        "failed, it makes no progress, or its driver is gone."
    )
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(run=run_status)
    top = add_command(commands, "top", "show a run while it works")
    ways = top.add_mutually_exclusive_group()
    ways.add_argument("--once", action="store_true", help="print one frame, as without a terminal")
    ways.add_argument("--web", action="store_true", help="serve the report's page on loopback")
    top.add_argument("--port", type=whole_number, metavar="N", help="port of --web; default: 3276")
    top.set_defaults(run=run_top)
    for parser in (status, top):
        parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run")


def run_status(arguments: argparse.Namespace) -> int:
    from megadapo.observe.run_records import RunRecords

    folder: Path = arguments.run_folder
    status = asdict(observed_status(folder))
    try:
        warnings = RunRecords(folder, last_bytes=TAIL_BYTES).warnings
    except (DataError, OSError) as error:
        # the state does not depend on them
        warnings = [str(error)]
    text = json.dumps({**status, "warnings": warnings}, indent=2)
    if not arguments.json:
        engines = status.pop("engines")
        status["engines"] = None if engines is None else len(engines["engines"])
        text = "\n".join(
            f"{name.replace('_', ' '):17}{'-' if value is None else printable(str(value))}"
            for name, value in (*status.items(), *(("warning", one) for one in warnings))
        )
    # a reader of the first line alone does not change the exit code
    with suppress(BrokenPipeError):
        print(text)
    return 0 if status["state"] in ("running", "finished") else 1


def observed_status(folder: Path) -> Status:
    """Return a run's status, corrected for processes that died without writing it."""
    from megadapo.run.state.lease import STALE_S, age_s, holder_of
    from megadapo.run.state.status import STATUS_FILE, read_status

    status = read_status(folder)
    changes: dict[str, Any] = {}
    # the file is written at each progress
    still_s = age_s(folder / STATUS_FILE)
    if status.state == "running" and holder_of(folder) is None:
        changes = {"state": "gone", "reason": "the driver is dead, perhaps killed"}
    elif status.state == "running" and still_s > status.stall_limit_s():
        reason = f"no progress for {timedelta(seconds=round(still_s))}"
        changes = {"state": "stalled", "reason": reason}
    elif status.state == "waiting" and status.waits_until is not None:
        # both times are of the supervisor's clock
        until, updated = map(datetime.fromisoformat, (status.waits_until, status.updated))
        late_s = still_s - (until - updated).total_seconds()
        if late_s > STALE_S and holder_of(folder) is None:
            reason = f"the supervisor is dead, perhaps killed. Last driver: {status.reason}"
            changes = {"state": "gone", "reason": reason}
    return replace(status, **changes)


def run_top(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.live import Live

    folder: Path = arguments.run_folder
    if arguments.web:
        return _serve(folder, arguments.port)
    growths: Growths = deque(maxlen=4)
    console = Console(highlight=False)
    if arguments.once or not console.is_terminal:
        console.print(frame(folder, growths))
        return 0
    with (
        suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.update(frame(folder, growths), refresh=True)
            time.sleep(EVERY_S)
    return 0


def _serve(folder: Path, port: int | None) -> int:
    """Serve the report's page of a run until Ctrl-C."""
    from megadapo.observe.report.live import DEFAULT_PORT, LiveReport

    def state() -> str:
        return observed_status(folder).state

    state()
    try:
        server = LiveReport(folder, DEFAULT_PORT if port is None else port, state)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", error)
        if port is not None:
            raise ConfigError(f"--port={port}: {reason}; choose another port") from error
        print_error(f"port {DEFAULT_PORT}: {reason}; using a free one, --port chooses one")
        server = LiveReport(folder, 0, state)
    with server, suppress(KeyboardInterrupt):
        print(f"http://127.0.0.1:{server.server_port} shows {folder}; Ctrl-C ends", flush=True)
        server.serve_forever()
    return 0


Growths: TypeAlias = deque[tuple[float, int]]
"""Time and count of generated tokens, at each of the newest growths between frames."""


def frame(folder: Path, growths: Growths) -> Group:
    """Read the folder of a run, and return one frame."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from megadapo.observe.progress import curve_table
    from megadapo.observe.run_records import RunRecords

    run = RunRecords(folder, last_bytes=TAIL_BYTES)
    table = Table.grid(padding=(0, 2))
    for label, text in _rows(run, growths):
        # every text is from a file, which a model may have had a part in
        table.add_row(label, Text(" ".join(printable(text).split())))
    for text in run.warnings:
        table.add_row("warning", Text(printable(text), style="yellow"))
    curves = curve_table(run.steps, run.evaluations)
    parts: list[ConsoleRenderable] = [table, Text(), curves]
    messages = [line for line in run.log_lines if not line.partition(" ")[2].startswith(ROUTINE)]
    if messages:
        parts += [Text(), Text("last messages of log.txt, without routine:", style="dim")]
    for text in messages[-NUM_MESSAGES:]:
        text = text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."
        parts.append(Text(printable(text), style="yellow"))
    return Group(*parts)


def _rows(run: RunRecords, growths: Growths) -> Iterator[tuple[str, str]]:
    from megadapo.observe.progress import clock, expected_s

    status, newest = observed_status(run.folder), run.steps[-1] if run.steps else {}
    reason = "" if status.reason is None else f": {status.reason}"
    yield "run", f"{run.folder} (process {status.pid} on {status.host})"
    yield "state", f"{status.state}{reason}"
    left = clock(expected_s(run.steps, status.num_steps))
    ended = "" if status.step_ended is None else f", ended {_age(status.step_ended)} ago"
    yield "step", f"{status.step} of {status.num_steps}{ended}; {left} left"
    yield "phase", f"{status.phase} for {_age(status.updated)}"
    speed = formatted(newest.get("tokens_per_s"), ",.0f")
    yield "speed", f"{speed} tokens/s{current_speed(status, growths)}"
    slowest, fastest = (
        formatted(newest.get(f"rollout/tokens_per_s_{name}"), ",.0f") for name in ("min", "max")
    )
    yield (
        "engines",
        f"{slowest} to {fastest} tokens/s each, busy "
        f"{formatted(newest.get('rollout/engine_busy_share'), '.0%')}, key-value cache "
        f"{formatted(newest.get('rollout/kv_use_max'), '.0%')}, "
        f"lost {formatted(newest.get('rollout/engines_lost'), '.0f')}",
    )
    if newest.get("train/slowest_rank") is not None:
        slowest, fastest = (
            formatted(newest.get(f"time/rank_logprobs_{name}_s"), ".2f") for name in ("max", "min")
        )
        yield (
            "ranks",
            f"slowest rank {newest['train/slowest_rank']}: {slowest} s for old log-probs, "
            f"fastest {fastest} s",
        )
    # heartbeats of a dead driver say what its ranks did last
    if status.state in ("running", "stalled"):
        yield from (("ranks", text) for text in _current_ranks(run.folder))
    checkpoint = status.checkpoint_step or "none"
    yield "restarts", f"{status.restarts}; newest checkpoint: {checkpoint}"
    disk = shutil.disk_usage(run.folder)
    yield "disk", f"{disk.free / GIB:.1f} of {disk.total / GIB:.1f} GiB free"


def current_speed(status: Status, growths: Growths) -> str:
    """Return the speed between the frames, which a step of an hour does not show."""
    tokens, now = status.tokens, time.monotonic()
    # another driver counts from 0
    if status.phase != "rollout" or (growths and tokens < growths[-1][1]):
        growths.clear()
    if not growths or tokens > growths[-1][1]:
        growths.append((now, tokens))
    (first_at, first), (last_at, last) = growths[0], growths[-1]
    if last == first or now - last_at > CURRENT_S:
        return ""
    return f"; now {(last - first) / (last_at - first_at):,.0f}"


def _current_ranks(folder: Path) -> Iterator[str]:
    """Yield the slowest rank of the running call, and silent ranks, by their heartbeats."""
    from megadapo.cluster.process_log import LOGS_FOLDER, trainer_log
    from megadapo.cluster.watch.heartbeat import heartbeat_file, read_heartbeat
    from megadapo.observe.run_records import RESOLVED_FILE

    times, beats = {}, {}
    resolved = folder / RESOLVED_FILE
    started = resolved.stat().st_mtime if resolved.exists() else 0.0
    for rank in count():
        path = heartbeat_file(trainer_log(folder / LOGS_FOLDER, rank))
        if not path.exists():
            break
        beat = read_heartbeat(path)
        written = path.stat().st_mtime
        # an older file belongs to an earlier driver, which may have had more ranks
        if beat is not None and written >= started:
            times[rank], beats[rank] = written, beat
    working = {rank: beat for rank, beat in beats.items() if beat.doing}
    if working:
        calls = Counter(beat.doing for beat in working.values()).most_common()
        now = ", ".join(f"{doing} on {num} of {len(beats)}" for doing, num in calls)
        rank = max(working, key=lambda rank: working[rank].slowest_s)
        yield f"now {now}; slowest piece of work: {working[rank].slowest_s:.1f} s on rank {rank}"
    for rank, written in times.items():
        # both times are of the folder's clock
        if (silent_s := max(times.values()) - written) > SILENT_S:
            yield f"rank {rank} has sent no heartbeat for {silent_s:.0f} s"


def _age(when: str) -> str:
    from megadapo.observe.progress import clock

    passed = datetime.now().astimezone() - datetime.fromisoformat(when)
    # the other machine's clock may be ahead
    return clock(max(0.0, passed.total_seconds()))
