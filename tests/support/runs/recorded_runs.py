"""A recorded run of a few steps, for the tests of what is made from one."""

import json
from pathlib import Path
from typing import Any

from megadapo.observe.metrics.names import METRIC_NAMES
from megadapo.observe.metrics.records import (
    METRICS_FILE,
    EvaluationRecord,
    MetricsLog,
    read_metrics,
)


def evaluation_record(step: int, accuracy: float = 0.5, **changes: float) -> EvaluationRecord:
    values: dict[str, Any] = {
        "policy_version": step,
        "standard_error": 0.02,
        "num_problems": 64,
        "samples_per_problem": 8,
        "response_length": 16.0,
    }
    return EvaluationRecord(step=step, accuracy=accuracy, **values | changes)


def record_run(folder: Path, *, num_steps: int, evaluations: bool = True) -> Path:
    """Write a run whose accuracy, length and costs follow simple rules of the step number."""
    with MetricsLog(folder) as log:
        for step in range(num_steps + 1):
            accuracy = step / (num_steps + 1)
            if evaluations:
                log.record_evaluation(
                    evaluation_record(step, accuracy, response_length=16.0 + step)
                )
            if step:
                values: dict[str, int | float | None] = dict.fromkeys(METRIC_NAMES, 0.5)
                log.record(
                    values
                    | {
                        "step": step,
                        "policy_version": step,
                        "accuracy/mean": accuracy,
                        "reward/mean": 2 * accuracy - 1,
                        "response_length/mean": 10.0 * step,
                        "time/step_s": 2.0,
                        "tokens/generated": 1000,
                        "tokens/stopped": 50,
                        "tokens/trained": 700,
                        "rollout/preemptions": 2,
                        "tokens_per_s": 500.0,
                        "groups/sampled": 40,
                        "groups/kept": 32,
                        "policy/ratio_first_max_error": 0.0,
                        "parity/logprob_abs_max": 1e-6 * step,
                        "parity/logprob_abs_mean": 0.0,
                        "parity/probe_abs_max": 1e-7 * step,
                        "parity/probe_abs_mean": 0.0,
                        "eval/accuracy": accuracy,
                    }
                )
    return folder


def forget(folder: Path, *prefixes: str) -> None:
    """Leave out of a run's records what begins in these ways, as if it had not been known of."""
    records = [
        {name: value for name, value in record.items() if not name.startswith(prefixes)}
        for record in read_metrics(folder)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / METRICS_FILE).write_text(lines, encoding="utf-8")
