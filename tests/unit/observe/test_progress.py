"""Programs can read the log, and the display breaks no run."""

import io
import logging
import math
import re
import subprocess
import sys
import time

import pytest
from rich.console import Console

from megadapo.observe import progress
from megadapo.observe.metrics.names import METRIC_NAMES
from megadapo.observe.metrics.records import MetricRecord, read_evaluations, read_metrics
from megadapo.observe.progress import LINE_FIELDS, RunDisplay, curve_table, sparkline, step_line
from tests.support.runs.recorded_runs import record_run

HARM = ("\x1b]0;", "\x07", "\x9b", "\x1b[2J")
"""Sequences that set the title, ring the bell, begin a command and clear the screen."""


def record(**values: int | float | None) -> MetricRecord:
    base: MetricRecord = dict.fromkeys(METRIC_NAMES)
    return base | {"step": 3, "policy_version": 2} | values


def console(*, terminal: bool, width: int = 40) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=width), out


def test_step_line_has_the_same_fields_in_the_same_order_whatever_was_measured():
    full = record(**dict.fromkeys((name for _, name, _ in LINE_FIELDS), 1.5))
    lines = [
        step_line(r, num_steps=9, eta_s=eta)
        for r, eta in ((full, 61.4), (record(), None), (record(**{"policy/loss": math.nan}), 0.0))
    ]
    names = [[pair.split("=")[0] for pair in line.split(" ")] for line in lines]
    assert names[0] == names[1] == names[2]
    assert all(re.fullmatch(r"\S+=\S+( \S+=\S+)*", line) for line in lines)
    assert lines[0].startswith("step=3/9 policy_version=2 accuracy=1.5000 ")
    assert lines[0].endswith("eta=0:01:01") and lines[1].endswith("eta=-")
    assert "loss=nan" in lines[2]
    # a record of a run from before a metric was known lacks its name
    assert step_line({"step": 3, "policy_version": 2}, num_steps=9, eta_s=None) == lines[1]


def test_line_on_a_console_has_100_characters():
    """Wide lines of a run under nohup hid what a reader looks for."""
    wide = {"accuracy/mean": 0.5, "reward/mean": -0.1234, "response_length/mean": 20479.5}
    wide |= {"policy/entropy": 0.3456, "time/step_s": 1345.67, "policy/grad_norm": 1.0}
    of_rows = {"tokens/trained": 9, "policy/loss": -1.234e-5, "eval/loss": 1.2345}
    for one in (wide, of_rows):
        line = step_line(record(**one), num_steps=1000, eta_s=8e4, is_short=True)
        assert len(line) <= 100 and "grad_norm" not in line
        assert ("accuracy=0.5000" in line) == (one is wide) != ("loss=-1.2" in line)


def test_step_without_rollouts_shows_what_it_measured():
    """Twenty dashes hid the loss, the only number that a reader looks for."""
    trained = {"tokens/trained": 90, "policy/loss": 0.5, "eval/loss": 0.75, "policy/entropy": 1.0}
    line = step_line(record(**trained), num_steps=9, eta_s=None)
    fields = dict(pair.split("=") for pair in line.split(" "))
    assert list(fields) == ["step", "policy_version", "entropy", "loss", "held_out_loss", "eta"]
    assert float(fields["held_out_loss"]) == 0.75
    plain = str(list(curve_table([record(**trained)], []).columns[0].cells))
    assert "held-out loss" in plain and "reward" not in plain
    # a reward model counts pairs and no tokens
    pairs = {"pairs/accuracy": 0.75, "policy/loss": 0.5, "eval/pair_accuracy": 0.5}
    line = step_line(record(**pairs), num_steps=9, eta_s=None)
    assert "pairs_in_order=0.75" in line and "held_out_pairs_in_order=0.5" in line
    assert line.count("=-") == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_terminal_gets_no_escape_sequences(tmp_path, terminal):
    """An error of a reward function can quote a response, and a terminal obeys what it prints."""
    plain, out = console(terminal=terminal, width=200)
    harm = "ValueError: \x1b]0;title\x07\x1b[2J\r\x9b1m"
    with RunDisplay(tmp_path, num_steps=3, console=plain) as display:
        display.note(harm)
        logging.getLogger("megadapo.rewards").warning("failed: %s", harm)
    for text in (out.getvalue(), (tmp_path / "log.txt").read_text()):
        assert text.count(r"\x1b]0;title\x07\x1b[2J") == 2
        assert [one for one in HARM if one in text] == []


def test_without_a_terminal_lines_stay_whole_and_fast_steps_are_few(tmp_path):
    """Thirty lines of one second each pushed the summary's table off the screen."""
    run = record_run(tmp_path / "run", num_steps=3)
    plain, out = console(terminal=False)
    with RunDisplay(tmp_path, num_steps=3, console=plain) as display:
        # an evaluation that is begun and ended is one phase
        for _ in range(2):
            display.phase("evaluate")
        for r in read_metrics(run):
            display.step(r)
            display.phase("rollout")
        display.evaluation(read_evaluations(run)[-1])
        display.note("skipped [step-3]: damaged\nsecond line")
    printed = out.getvalue().splitlines()
    words = "starting: step=1/3 step=3/3 evaluation skipped second"
    assert [line.split(" ")[0] for line in printed] == words.split()
    assert printed[4] == "skipped [step-3]: damaged"
    log = (tmp_path / "log.txt").read_text().splitlines()
    logged = [line.split(" ", 1)[1] for line in log]
    assert [line for line in logged if "step=" not in line] == [
        line for line in printed if "step=" not in line
    ]
    assert logged[1].startswith("step=1/3 policy_version=1 ") and "grad_norm=" in logged[1]
    assert logged[2].startswith("step=2/3 ")
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d ", line) for line in log)


def test_a_slow_start_says_every_few_seconds_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "_START_LINE_S", 0.05)
    plain, out = console(terminal=False)
    with RunDisplay(tmp_path, num_steps=3, console=plain) as display:
        display.phase("start engines")
        deadline = time.monotonic() + 20
        while out.getvalue().count("start engines,") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert re.search(r"starting: start engines, \d+ s so far", out.getvalue())


def test_terminal_shows_phase_step_curves_and_eta(tmp_path):
    run = record_run(tmp_path / "run", num_steps=20)
    wide, out = console(terminal=True, width=110)
    with RunDisplay(tmp_path, num_steps=40, console=wide) as display:
        display.restore(read_metrics(run)[:-1], read_evaluations(run))
        display.phase("train")
        display.step(read_metrics(run)[-1])
        display.note("noted [red]")
    shown = out.getvalue()
    for text in ("step 20/40", "train", "500 tokens/s", "ETA 0:00:40", "± 0.020", "noted [red]"):
        assert text in shown
    assert "longest" in shown and "engines busy" in shown and "50%" in shown
    # The panel takes the place of the lines; log.txt has them all the same.
    assert "step=20/40" not in shown
    assert "step=20/40" in (tmp_path / "log.txt").read_text()


def test_terminal_display_survives_the_start_and_nothing_measured(tmp_path):
    narrow, out = console(terminal=True, width=20)
    with RunDisplay(tmp_path, num_steps=2, console=narrow) as display:
        assert display.eta_s() is None
        display.step(record(**{"policy/entropy": math.nan, "accuracy/mean": math.inf}))
    assert out.getvalue()


def test_log_is_appended_to_when_a_run_goes_on(tmp_path):
    for text in ("first", "second"):
        with RunDisplay(tmp_path, num_steps=1, console=console(terminal=False)[0]) as display:
            display.note(text)
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["first", "second"]


def test_what_the_rooms_log_reaches_the_log_and_warnings_the_console(tmp_path):
    """A warning on stderr would be painted over by the live panel, and is in no file."""
    plain, out = console(terminal=False)
    logger = logging.getLogger("megadapo.data.prompts")
    with RunDisplay(tmp_path, num_steps=1, console=plain):
        logger.info("%d prompts", 3)
        logger.warning("lost [2]")
    logger.warning("after the end")
    log = [line.split(" ", 1)[1] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert log == ["info: 3 prompts", "warning: lost [2]"]
    assert out.getvalue().splitlines() == ["warning: lost [2]"]


def test_time_to_go_follows_the_recent_steps(tmp_path):
    display = RunDisplay(tmp_path, num_steps=40, console=console(terminal=False)[0])
    for step in range(1, 31):
        display.step(record(**{"step": step, "time/step_s": 1.0 if step <= 20 else 9.0}))
    assert display.eta_s() == pytest.approx(90.0)


@pytest.mark.parametrize(
    ("values", "curve"),
    [
        ([], ""),
        ([math.nan, math.inf], ""),
        ([3.0], "▁"),
        ([1.0, 1.0], "▁▁"),
        ([0.0, math.nan, 1.0], "▁█"),
        ([-5, 5, 0], "▁█▅"),
    ],
)
def test_sparkline(values, curve):
    assert sparkline(values) == curve


def test_sparkline_of_a_long_run_fits_and_keeps_its_shape():
    curve = sparkline([float(i) for i in range(1001)], width=8)
    assert curve == "▁▂▃▄▅▆▇█"


PRINTS = """
import sys
from pathlib import Path
from megadapo.observe.progress import RunDisplay
with RunDisplay(Path(sys.argv[1]), num_steps=3) as display:
    display.note("one")
    display.note("two")
print("the table at the end")
print(*sys.argv[2:], file=sys.stderr, flush=True, end="")
"""


@pytest.mark.parametrize("output", ["full disk", "closed pipe"])
def test_lost_console_ends_nothing(tmp_path, output):
    """A closed laptop behind `| tee log` ended the run, with exit code 1 and nothing saved."""
    command = [sys.executable, "-c", PRINTS, str(tmp_path)]
    if output == "full disk":
        with open("/dev/full", "wb") as full:
            ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        code, errors = ended.returncode, ended.stderr
    else:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        process.stdout.close()
        errors = process.stderr.read()
        code = process.wait()
    assert (code, errors) == (0, "")
    log = (tmp_path / "log.txt").read_text()
    assert "one" in log and "two" in log and log.count("the console is lost") == 1


def test_lost_console_is_lost_for_stderr_too(tmp_path):
    """The terminal of both was gone, and a later line on stderr ended the driver."""
    command = [sys.executable, "-c", PRINTS, str(tmp_path), "a line on stderr"]
    with open("/dev/full", "wb") as full:
        assert subprocess.run(command, stdout=full, stderr=full).returncode == 0
