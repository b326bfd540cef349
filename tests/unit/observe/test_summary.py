"""The table before and after has the run's numbers."""

import io
import math
from pathlib import Path

from rich.console import Console

from megadapo.observe.metrics.records import MetricsLog
from megadapo.observe.summary import print_report
from tests.support.runs.recorded_runs import forget, record_run


def report_of(folder: Path) -> str:
    out = io.StringIO()
    print_report(folder, console=Console(file=out, width=140))
    return out.getvalue()


def test_report_shows_before_after_artefacts_and_how_to_go_on(tmp_path):
    text = report_of(record_run(tmp_path, num_steps=4))
    for shown in (
        "avg@8, 64 problems",
        "0.000 ± 0.020 (step 0)",
        "0.800 ± 0.020 (step 4)",
        "40.0",
        "0:00:08",
        "4,000 generated, 200 of stopped responses, 2,800 trained on",
        "160 sampled, 128 kept",
        "0.0e+00 at most",
        "4.0e-06 nats at most",
        "step 1",
        "metrics.jsonl",
        f"megadapo train {tmp_path} --run.num_steps=",
        f"megadapo top {tmp_path}",
        f"megadapo export {tmp_path} DST",
        "95 % are within",
        "longest response",
        "slowest group (s)",
        "engines busy",
        "50% in use at most, 8 preemptions",
    ):
        assert shown in text, shown
    assert "checkpoints" not in text  # there are none


def test_report_without_evaluation(tmp_path):
    text = report_of(record_run(tmp_path, num_steps=1, evaluations=False))
    assert "held-out" not in text and "training accuracy" in text


def test_what_a_run_did_not_measure_has_no_row(tmp_path):
    run = record_run(tmp_path, num_steps=4)
    forget(run, "time/group_", "rollout/", "response_length/", "tokens/stopped")
    text = report_of(run)
    for row in ("response length", "longest", "slowest", "busy", "key-value", "stopped"):
        assert row not in text, row
    assert "4,000 generated, 2,800 trained on" in text


def test_worst_value_of_a_run_with_nan_is_nan(tmp_path):
    """max() passes over NaN where it does not come first."""
    with MetricsLog(tmp_path) as log:
        for step, gap in enumerate([1e-6, math.nan, 1e-5], start=1):
            log.record({"step": step, "parity/logprob_abs_max": gap})
    assert "nan nats at most" in report_of(tmp_path)
