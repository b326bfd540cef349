"""No metric is lost, torn, doubled or silently changed."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megadapo.errors import DataError
from megadapo.observe.metrics.names import METRIC_NAMES
from megadapo.observe.metrics.records import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    MetricsLog,
    read_evaluations,
    read_metrics,
)
from tests.support.runs.recorded_runs import evaluation_record


def steps_of(folder: Path) -> list[int | float | None]:
    return [record["step"] for record in read_metrics(folder)]


def test_every_line_has_every_name_in_order(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.record({"step": 1, "policy/loss": 0.25})
        log.record({"eval/accuracy": 0.5, "step": 2})
    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert [list(json.loads(line)) for line in lines] == [list(METRIC_NAMES)] * 2
    first, second = read_metrics(tmp_path)
    assert first["policy/loss"] == 0.25 and first["eval/accuracy"] is None
    assert second["policy/loss"] is None and second["eval/accuracy"] == 0.5


def test_unknown_name_and_backward_step_are_refused(tmp_path):
    log = MetricsLog(tmp_path)
    with pytest.raises(AssertionError, match="policy/los"):
        log.record({"step": 1, "policy/los": 1.0})
    log.record({"step": 2})
    for step in (1, 2):
        with pytest.raises(AssertionError, match="after step 2"):
            log.record({"step": step})
    with pytest.raises(AssertionError, match="after step 2"):
        MetricsLog(tmp_path).record({"step": 2})


def test_numpy_scalars_are_written_as_numbers(tmp_path):
    log = MetricsLog(tmp_path)
    log.record({"step": np.int64(1), "policy/loss": np.float32(0.5)})
    record = read_metrics(tmp_path)[0]
    assert (type(record["step"]), record["policy/loss"]) == (int, 0.5)


def test_numbers_that_are_not_finite_stay_visible_and_the_file_stays_json(tmp_path):
    log = MetricsLog(tmp_path)
    log.record(
        {"step": 1, "policy/loss": math.nan, "policy/grad_norm": math.inf, "reward/mean": -math.inf}
    )

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    json.loads((tmp_path / METRICS_FILE).read_text(), parse_constant=refuse)
    record = read_metrics(tmp_path)[0]
    assert math.isnan(record["policy/loss"] or 0)
    assert (record["policy/grad_norm"], record["reward/mean"]) == (math.inf, -math.inf)


@pytest.mark.parametrize("torn", ['{"step": 3, "pol', '{"step": 3}', "{", "\x00\x00\x00", "é"])
def test_torn_last_line_is_dropped_and_overwritten(tmp_path, torn):
    """Even a line that parses was cut off where its line break is missing."""
    log = MetricsLog(tmp_path)
    log.record({"step": 1})
    log.record({"step": 2})
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(torn.encode()[:-1] if torn == "é" else torn.encode())
    assert steps_of(tmp_path) == [1, 2]
    again = MetricsLog(tmp_path)
    again.record({"step": 3, "policy/loss": 7.0})
    assert steps_of(tmp_path) == [1, 2, 3]
    assert read_metrics(tmp_path)[-1]["policy/loss"] == 7.0


@pytest.mark.parametrize("line", ["garbage", "[1]", '{"no": 1}', '{"step": "1"}', "\x00"])
def test_damage_inside_the_file_is_an_error_that_names_the_line(tmp_path, line):
    (tmp_path / METRICS_FILE).write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2"):
        read_metrics(tmp_path)


@pytest.mark.parametrize(("to", "left"), [(2, [1, 2]), (0, []), (9, [1, 2, 3, 4]), (-1, [])])
def test_rewind_keeps_the_steps_up_to_the_resume_point(tmp_path, to, left):
    log = MetricsLog(tmp_path)
    for step in range(1, 5):
        log.record({"step": step, "policy/loss": 1 / 3, "policy/grad_norm": math.nan})
        log.record_evaluation(evaluation_record(step))
    before = (tmp_path / METRICS_FILE).read_text().splitlines(keepends=True)
    log.rewind(to)
    assert steps_of(tmp_path) == left
    assert [e.step for e in read_evaluations(tmp_path)] == left
    # What is kept is kept to the bit.
    assert (tmp_path / METRICS_FILE).read_text() == "".join(before[: len(left)])
    log.record({"step": len(left) + 1})
    assert steps_of(tmp_path) == [*left, len(left) + 1]


def test_rewind_leaves_only_the_redone_steps_on_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLog(tmp_path, writers=["tensorboard"]) as log:
        log.open_writers()
        for step in range(1, 6):
            log.record({"step": step, "policy/loss": float(step)})
    time.sleep(1.1)  # event files are ordered by the second in their names
    with MetricsLog(tmp_path, writers=["tensorboard"]) as log:
        log.rewind(3)
        log.open_writers()
        for step in range(4, 7):
            log.record({"step": step, "policy/loss": 10.0 * step})
    expected = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0)]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("policy/loss")] == expected


def test_evaluation_done_again_replaces_the_first(tmp_path):
    log = MetricsLog(tmp_path)
    for step, accuracy in ((0, 0.1), (5, 0.2), (5, 0.3)):
        log.record_evaluation(evaluation_record(step, accuracy))
    assert [(e.step, e.accuracy) for e in read_evaluations(tmp_path)] == [(0, 0.1), (5, 0.3)]


def test_foreign_evaluation_is_a_clear_error(tmp_path):
    (tmp_path / EVALUATIONS_FILE).write_text('{"step": 1, "score": 2}\n')
    with pytest.raises(DataError, match="evaluations"):
        read_evaluations(tmp_path)


@pytest.mark.fault
def test_kill_at_any_instant_loses_at_most_the_step_in_progress(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from megadapo.observe.metrics.records import MetricsLog\n"
        "log = MetricsLog(Path(sys.argv[1]))\n"
        "for step in range(1, 10**6):\n"
        "    log.record({'step': step, 'policy/loss': 0.1 * step})\n"
        "    print(step, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(25):
        process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    reported = [int(line) for line in process.stdout.read().split("\n")[:-1]]
    process.wait()
    last = max([25, *reported])
    steps = steps_of(tmp_path)
    assert steps[:last] == list(range(1, last + 1)) and len(steps) <= last + 1
    MetricsLog(tmp_path).record({"step": len(steps) + 1})
