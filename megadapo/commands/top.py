"""`megadapo top`: show a run while it works, from the files of its folder."""

from __future__ import annotations

import argparse
import shutil
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.commands.common import Commands, add_command
from megadapo.commands.status import TAIL_BYTES, observed_status

if TYPE_CHECKING:
    from rich.console import ConsoleRenderable, Group

    from megadapo.observe.metrics.records import MetricRecord

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
    parser = add_command(commands, "top", "show a run while it works")
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--once", action="store_true", help="print one frame, as without a terminal"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.live import Live

    view = _View(arguments.run_folder)
    console = Console(highlight=False)
    if arguments.once or not console.is_terminal:
        console.print(view.frame())
        return 0
    with (
        suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.update(view.frame(), refresh=True)
            time.sleep(EVERY_S)
    return 0


class _View:
    """The frames of one run; it remembers counters, which give the current speed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokens: deque[tuple[float, int]] = deque(maxlen=4)
        """Time and count of generated tokens, at each of the newest growths."""

    def frame(self) -> Group:
        """Read the folder, and return one frame."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        from megadapo.observe.metrics.records import read_evaluations, read_metrics
        from megadapo.observe.progress import curve_table
        from megadapo.observe.run_warnings import run_warnings
        from megadapo.observe.tables import printable

        status = observed_status(self._folder)
        records = read_metrics(self._folder, last_bytes=TAIL_BYTES)
        evaluations = read_evaluations(self._folder)
        table = Table.grid(padding=(0, 2))
        for label, text in self._rows(status, records):
            # every text is from a file, which a model may have had a part in
            table.add_row(label, Text(" ".join(printable(text).split())))
        for text in run_warnings(records, evaluations):
            table.add_row("warning", Text(printable(text), style="yellow"))
        parts: list[ConsoleRenderable] = [table, Text(), curve_table(records, evaluations)]
        if messages := list(_messages(self._folder)):
            parts += [Text(), Text("last messages of log.txt, without routine:", style="dim")]
            parts += (Text(printable(line), style="yellow") for line in messages)
        return Group(*parts)

    def _rows(
        self, status: dict[str, Any], records: list[MetricRecord]
    ) -> Iterator[tuple[str, str]]:
        from megadapo.observe.progress import clock, expected_s

        newest = records[-1] if records else {}
        reason = "" if status["reason"] is None else f": {status['reason']}"
        yield "run", f"{self._folder} (process {status['pid']} on {status['host']})"
        yield "state", f"{status['state']}{reason}"
        left = clock(expected_s(records, status["num_steps"]))
        ended = "" if status["step_ended"] is None else f", ended {_age(status['step_ended'])} ago"
        yield "step", f"{status['step']} of {status['num_steps']}{ended}; {left} left"
        yield "phase", f"{status['phase']} for {_age(status['updated'])}"
        yield "speed", f"{_value(newest, 'tokens_per_s', ',.0f')} tokens/s{self._speed(status)}"
        yield "engines", _engines(newest)
        if (slowest := _slowest_rank(newest)) is not None:
            yield "ranks", slowest
        # heartbeats of a dead driver say what its ranks did last
        if status["state"] in ("running", "stalled"):
            yield from (("ranks", text) for text in _current_ranks(self._folder))
        checkpoint = status["checkpoint_step"] or "none"
        yield "restarts", f"{status['restarts']}; newest checkpoint: {checkpoint}"
        disk = shutil.disk_usage(self._folder)
        yield "disk", f"{disk.free / GIB:.1f} of {disk.total / GIB:.1f} GiB free"

    def _speed(self, status: dict[str, Any]) -> str:
        """Return the speed between the frames, which a step of an hour does not show."""
        tokens, now = status["tokens"], time.monotonic()
        # another driver counts from 0
        if status["phase"] != "rollout" or (self._tokens and tokens < self._tokens[-1][1]):
            self._tokens.clear()
        if not self._tokens or tokens > self._tokens[-1][1]:
            self._tokens.append((now, tokens))
        (first_at, first), (last_at, last) = self._tokens[0], self._tokens[-1]
        if last == first or now - last_at > CURRENT_S:
            return ""
        return f"; now {(last - first) / (last_at - first_at):,.0f}"


def _engines(newest: MetricRecord) -> str:
    slowest, fastest = (
        _value(newest, f"rollout/tokens_per_s_{name}", ",.0f") for name in ("min", "max")
    )
    return (
        f"{slowest} to {fastest} tokens/s each, busy "
        f"{_value(newest, 'rollout/engine_busy_share', '.0%')}, key-value cache "
        f"{_value(newest, 'rollout/kv_use_max', '.0%')}, "
        f"lost {_value(newest, 'rollout/engines_lost', '.0f')}"
    )


def _slowest_rank(newest: MetricRecord) -> str | None:
    if newest.get("train/slowest_rank") is None:
        return None
    slowest, fastest = (
        _value(newest, f"time/rank_logprobs_{name}_s", ".2f") for name in ("max", "min")
    )
    return (
        f"slowest rank {newest['train/slowest_rank']}: {slowest} s for old log-probs, "
        f"fastest {fastest} s"
    )


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


def _messages(folder: Path) -> Iterator[str]:
    """Yield the newest lines of log.txt that are no routine, oldest first."""
    from megadapo.observe.files import complete_lines
    from megadapo.observe.progress import LOG_FILE

    lines = complete_lines(folder / LOG_FILE, last_bytes=TAIL_BYTES)
    texts = [line.decode(errors="replace") for line in lines]
    found = [text for text in texts if not text.partition(" ")[2].startswith(ROUTINE)]
    for text in found[-NUM_MESSAGES:]:
        yield text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."


def _value(record: MetricRecord, name: str, form: str) -> str:
    value = record.get(name)
    return "-" if value is None else format(value, form)


def _age(when: str) -> str:
    from megadapo.observe.progress import clock

    passed = datetime.now().astimezone() - datetime.fromisoformat(when)
    # the other machine's clock may be ahead
    return clock(max(0.0, passed.total_seconds()))
