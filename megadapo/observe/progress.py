"""Progress of a run on the console, and the same as plain lines in `log.txt`.

A terminal shows a live panel: phase, progress bar, curves. Otherwise there are short lines, of fast
steps one in LINE_S seconds. In `log.txt` each step has a line with all fields, always in the same
order, so that programs can read it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megadapo.errors import InfraError
from megadapo.observe.files import append_line
from megadapo.observe.metrics.records import EvaluationRecord, MetricRecord, has_rollouts, mean_of
from megadapo.observe.run_records import LOG_FILE
from megadapo.observe.tables import discard_output, formatted, new_console, printable, stretches

LINE_FIELDS = (
    ("accuracy", "accuracy/mean", ".4f"),
    ("reward", "reward/mean", ".4f"),
    ("length", "response_length/mean", ".1f"),
    ("length_p50", "response_length/p50", ".0f"),
    ("length_p95", "response_length/p95", ".0f"),
    ("length_max", "response_length/max", ".0f"),
    ("truncated", "response_length/truncated_fraction", ".4f"),
    ("entropy", "policy/entropy", ".4f"),
    ("loss", "policy/loss", ".3e"),
    ("grad_norm", "policy/grad_norm", ".4f"),
    ("clip_low", "policy/clip_low_fraction", ".5f"),
    ("clip_high", "policy/clip_high_fraction", ".5f"),
    ("ratio_error", "policy/ratio_first_max_error", ".1e"),
    ("parity", "parity/logprob_abs_max", ".1e"),
    ("kept", "groups/kept", ".0f"),
    ("sampled", "groups/sampled", ".0f"),
    ("stopped", "groups/stopped", ".0f"),
    ("group_max_s", "time/group_max_s", ".2f"),
    ("busy", "rollout/engine_busy_share", ".3f"),
    ("preemptions", "rollout/preemptions", ".0f"),
    ("kv_use", "rollout/kv_use_max", ".3f"),
    ("tokens_per_s", "tokens_per_s", ".0f"),
    ("step_s", "time/step_s", ".2f"),
)
"""Label, metric and format of each field of a step's line; a missing value is "-"."""
OF_ROWS = (
    ("pairs_in_order", "pairs/accuracy", ".4f"),
    ("held_out_loss", "eval/loss", ".4f"),
    ("held_out_pairs_in_order", "eval/pair_accuracy", ".4f"),
)
"""A further field of steps that train on rows of data; they leave out missing values."""
CONSOLE_LABELS = ("accuracy", "reward", "length", "entropy", "step_s")
CONSOLE_LABELS_OF_ROWS = ("loss", *(label for label, _, _ in OF_ROWS), "step_s")
"""The fields on a console: a line has 100 characters at most."""

_CURVES = (
    ("accuracy", "accuracy/mean", ".3f"),
    ("length", "response_length/mean", ".1f"),
    ("longest", "response_length/max", ".0f"),
    ("entropy", "policy/entropy", ".3f"),
    ("reward", "reward/mean", "+.3f"),
    ("engines busy", "rollout/engine_busy_share", ".0%"),
)
_CURVES_WITHOUT_ROLLOUTS = (
    ("loss", "policy/loss", ".4f"),
    ("held-out loss", "eval/loss", ".4f"),
    ("entropy", "policy/entropy", ".3f"),
)
_BARS = " ▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 32
# The estimate follows the last steps, because responses get longer while a run learns.
_RECENT_STEPS = 10
LINE_S = 15.0
"""Shortest time between two lines of steps on a console that is no terminal."""
_START_LINE_S = 5.0
"""Longest time without a line there while a run starts."""


def step_line(
    record: MetricRecord, *, num_steps: int, eta_s: float | None, is_short: bool = False
) -> str:
    """Return one step as `step=3/60 accuracy=0.5000 ... eta=0:01:02`.

    `is_short`: as on a console.
    """
    parts = [f"step={record['step']}/{num_steps}"]
    fields: Sequence[tuple[str, str, str]] = LINE_FIELDS
    if not has_rollouts(record):
        fields = [one for one in (*LINE_FIELDS, *OF_ROWS) if record.get(one[1]) is not None]
    if is_short:
        labels = CONSOLE_LABELS if has_rollouts(record) else CONSOLE_LABELS_OF_ROWS
        fields = [one for one in fields if one[0] in labels]
    else:
        parts.append(f"policy_version={record['policy_version']}")
    for label, name, form in fields:
        parts.append(f"{label}={formatted(record.get(name), form)}")
    parts.append(f"eta={clock(eta_s)}")
    return " ".join(parts)


def evaluation_line(evaluation: EvaluationRecord) -> str:
    """Return one evaluation as a line with fixed fields."""
    return (
        f"evaluation step={evaluation.step} policy_version={evaluation.policy_version} "
        f"{evaluation.measure}={evaluation.mean:.4f} "
        f"standard_error={evaluation.standard_error:.4f} "
        f"length={evaluation.response_length:.1f} problems={evaluation.num_problems} "
        f"samples={evaluation.samples_per_problem}"
        + "".join(f" pass_at_{k}={value:.4f}" for k, value in evaluation.pass_at.items())
        + (f" consensus={evaluation.consensus:.4f}" if evaluation.consensus is not None else "")
        + "".join(f" held_out/{name}={mean_of(own):.4f}" for name, own in evaluation.sets.items())
    )


_LOGGER = logging.getLogger("megadapo")


class RunDisplay(logging.Handler):
    """A run's display on the console and in `log.txt`. Use as a context manager.

    While it is open, the package's log records go to `log.txt`, warnings also to the console.
    """

    def __init__(self, folder: Path, *, num_steps: int, console: Console | None = None) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self._console = console or new_console()
        self._num_steps = num_steps
        self._log = folder / LOG_FILE
        self._records: list[MetricRecord] = []
        self._evaluations: list[EvaluationRecord] = []
        self._phase = "start"
        self._under_way = False
        self._phase_since = time.monotonic()
        self._step_line_at = -math.inf
        self._closed = threading.Event()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        _LOGGER.addHandler(self)
        _LOGGER.setLevel(logging.INFO)
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self._render, refresh_per_second=4
            )
            self._live.start()
        else:
            threading.Thread(target=self._repeat_phase, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        if self._live is not None:
            try:
                self._live.stop()
            except (OSError, SystemExit) as lost:
                self._lose_console(lost)
            self._live = None
        _LOGGER.removeHandler(self)

    def restore(
        self, records: Iterable[MetricRecord], evaluations: Iterable[EvaluationRecord]
    ) -> None:
        """Load the steps before a resume, so that the curves include them."""
        self._records = list(records)
        self._evaluations = list(evaluations)

    def phase(self, name: str) -> None:
        """Show the current phase. Before the first result, each phase is a line in the log."""
        is_new, self._phase = name != self._phase, name
        self._phase_since = time.monotonic()
        if is_new and not self._under_way:
            self.write(f"starting: {name}", console=not self._console.is_terminal)

    def _repeat_phase(self) -> None:
        """Say every few seconds how long a part of the start takes."""
        while not self._closed.wait(_START_LINE_S) and not self._under_way:
            seconds = time.monotonic() - self._phase_since
            if seconds >= _START_LINE_S:
                self._print(f"starting: {self._phase}, {seconds:.0f} s so far")

    def step(self, record: MetricRecord) -> None:
        """Show a finished step."""
        self._under_way = True
        self._records.append(record)
        line = partial(step_line, record, num_steps=self._num_steps, eta_s=self.eta_s())
        self.write(line(), console=False)
        now, is_last = time.monotonic(), record["step"] == self._num_steps
        if not self._console.is_terminal and (is_last or now >= self._step_line_at + LINE_S):
            self._step_line_at = now
            self._print(line(is_short=True))

    def evaluation(self, evaluation: EvaluationRecord) -> None:
        """Show a finished evaluation."""
        self._under_way = True
        self._evaluations = [e for e in self._evaluations if e.step != evaluation.step]
        self._evaluations.append(evaluation)
        self.write(evaluation_line(evaluation), console=not self._console.is_terminal)

    def note(self, text: str) -> None:
        """Show a message that must not be missed: a resume, a shortfall, a warning."""
        for line in text.splitlines():
            self.write(line, console=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log record of the package."""
        for line in f"{record.levelname.lower()}: {record.getMessage()}".splitlines():
            self.write(line, console=record.levelno >= logging.WARNING)

    def write(self, line: str, *, console: bool) -> None:
        """Write a line to `log.txt` and, if requested, to the console.

        If the disk refuses a line, the console shows it. Messages can quote what a model wrote.
        """
        line = printable(line)
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        try:
            append_line(self._log, f"{now} {line}\n", sync=False)
        except InfraError as error:
            self._print(str(error))
            console = True
        if console:
            self._print(line)

    def _print(self, line: str) -> None:
        try:
            # Keep one line as one line at any width, and print [brackets] as they are.
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        except (OSError, SystemExit) as error:
            self._lose_console(error)

    def _lose_console(self, error: BaseException) -> None:
        """Continue without a console: its terminal is gone, its pipe closed or its disk full.

        rich ends the program if a pipe is closed.
        """
        file, self._console = self._console.file, Console(quiet=True)
        discard_output(file)
        cause = "a closed pipe" if isinstance(error, SystemExit) else str(error)
        self.write(f"the console is lost ({cause}): only log.txt continues", console=False)

    def eta_s(self) -> float | None:
        """Return the expected seconds to the end of the run, or None before the first step."""
        return expected_s(self._records, self._num_steps)

    def _render(self) -> Panel:
        newest = self._records[-1] if self._records else {"step": 0, "tokens_per_s": None}
        done = newest["step"] or 0
        tokens = f"{formatted(newest['tokens_per_s'], ',.0f')} tokens/s"
        bar = Table.grid(expand=True, padding=(0, 2))
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        since = time.monotonic() - self._phase_since
        bar.add_row(
            Text(f"step {done}/{self._num_steps}", style="bold"),
            ProgressBar(total=self._num_steps, completed=done),
            Text(f"{self._phase} {since:.0f} s   {tokens}   ETA {clock(self.eta_s())}"),
        )
        curves = curve_table(self._records, self._evaluations)
        return Panel(Group(bar, curves), title="megadapo", border_style="cyan")


def expected_s(records: Sequence[MetricRecord], num_steps: int) -> float | None:
    """Return the expected seconds to the end of a run, or None before its first step."""
    recent = [record.get("time/step_s") for record in records[-_RECENT_STEPS:]]
    times = [seconds for seconds in recent if seconds is not None]
    if not times:
        return None
    return sum(times) / len(times) * (num_steps - (records[-1]["step"] or 0))


def curve_table(records: Sequence[MetricRecord], evaluations: Sequence[EvaluationRecord]) -> Table:
    """Return the curves of a run, one a row: label, curve, newest value, oldest value."""
    table = Table.grid(padding=(0, 2))
    is_supervised = bool(records) and not has_rollouts(records[-1])
    rows = [
        (label, [v for r in records if (v := r.get(name)) is not None], form)
        for label, name, form in (_CURVES_WITHOUT_ROLLOUTS if is_supervised else _CURVES)
    ]
    if not is_supervised:
        rows.append(("held-out", [e.mean for e in evaluations], ".3f"))
    for label, values, form in rows:
        now = formatted(values[-1] if values else None, form)
        if label == "held-out" and evaluations:
            now = f"{now} ± {evaluations[-1].standard_error:.3f}"
        change = f"from {values[0]:{form}}" if len(values) > 1 else ""
        table.add_row(label, sparkline(values), now, change)
    return table


def sparkline(values: list[int | float], width: int = _CURVE_WIDTH) -> str:
    """Return the values as block characters from their lowest to their highest, oldest first."""
    finite = [v for v in values if v == v and abs(v) != float("inf")]
    if not finite:
        return ""
    finite = [sum(piece) / len(piece) for piece in stretches(finite, width)]
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    return "".join(_BARS[1 + round((v - low) / span * (len(_BARS) - 2))] for v in finite)


def clock(seconds: float | None) -> str:
    """Return a duration as 0:01:02, "-" for None."""
    return "-" if seconds is None else str(timedelta(seconds=round(seconds)))


class Spinner:
    """A spinner with the name of the part that starts; a line for it without a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self._console.is_terminal:
            self._console.print(f"starting: {name}")
        with self._console.status(name):
            yield
