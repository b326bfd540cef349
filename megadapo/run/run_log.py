"""The record of a run: metrics, phases and their times, saved rollouts, status and display."""

from __future__ import annotations

import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megadapo.cluster.processes import MIB, private_bytes
from megadapo.cluster.this_node import LOOPBACK
from megadapo.config import RunConfig, to_dict
from megadapo.kernels.torch_internals import profiled_range
from megadapo.observe.metrics.names import METRICS
from megadapo.observe.metrics.records import (
    EvaluationRecord,
    MetricRecord,
    MetricsLog,
    mean_of,
    measure_of,
)
from megadapo.observe.progress import RunDisplay
from megadapo.observe.rollouts.files import (
    HELD_OUT_FOLDER,
    RolloutLog,
    step_file,
    write_rollouts,
)
from megadapo.observe.rollouts.saved_group import SavedGroup
from megadapo.observe.run_records import RunRecords
from megadapo.rollout.journal.journal import EVALUATION, journal_path
from megadapo.run.state.events import Event, EventHook, is_supervised
from megadapo.run.state.status import Status, StatusFile

_LOGGER = logging.getLogger("megadapo.run")

Look = Callable[[], tuple[Status, Mapping[str, int | float | None]]]
"""Returns the run's status, and the metrics of its last step."""


@contextmanager
def serving_metrics(port: int | None, look: Look) -> Iterator[None]:
    """Serve `look` on loopback within this block, unless the port is None or taken."""
    if port is None:
        yield
        return
    registry = CollectorRegistry()
    registry.register(_RunCollector(look))
    try:
        server, thread = start_http_server(port, addr=LOOPBACK, registry=registry)
    except OSError as error:
        _LOGGER.warning(
            "Prometheus gets no metrics: observe.prometheus_port = %d on %s: %s. Another run may "
            "use it; choose another port for each run of a machine",
            *(port, LOOPBACK, error.strerror or error),
        )
        yield
        return
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _RunCollector(Collector):
    """Reads the run at each request, in the server's thread."""

    def __init__(self, look: Look) -> None:
        self._look = look

    def collect(self) -> Iterator[Metric]:
        status, record = self._look()
        yield from _run_metrics(status)
        seen = set()
        # own names of the run may differ only in characters that Prometheus does not have
        for metric in (*METRICS, *(name for name in record if name not in METRICS)):
            name, factor = prometheus_name(metric)
            value = record.get(metric)
            if value is not None and name not in seen:
                seen.add(name)
                meaning = METRICS.get(metric, f"Metric {metric} of this run's configuration.")
                yield GaugeMetricFamily(name, meaning, value=factor * value)


def _run_metrics(status: Status) -> Iterator[Metric]:
    """Yield the state of the run."""
    phase = GaugeMetricFamily("megadapo_run_phase", "1 for the current phase.", labels=["phase"])
    phase.add_metric([status.phase], 1)
    yield phase
    for name, meaning, value in (
        ("step", "Last completed step.", status.step),
        ("num_steps", "Steps of the run.", status.num_steps),
        ("checkpoint_step", "Step of the newest checkpoint.", status.checkpoint_step),
    ):
        yield GaugeMetricFamily(f"megadapo_run_{name}", meaning, value=value)
    yield CounterMetricFamily(
        "megadapo_run_restarts", "Drivers of the run before this one.", value=status.restarts
    )
    if status.step_ended is not None:
        yield GaugeMetricFamily(
            "megadapo_run_step_end_timestamp_seconds",
            "Time at which the last step ended, in seconds since the epoch.",
            value=datetime.fromisoformat(status.step_ended).timestamp(),
        )


def prometheus_name(metric: str) -> tuple[str, int]:
    """Return a metric's name for Prometheus, and the factor to its unit: seconds or bytes."""
    name, factor = metric, 1
    if metric in METRICS:
        name = re.sub(r"(?<=_per)_s(?=_|$)", "_second", name)
        name = re.sub(r"_s$", "_seconds", name)
        if name.endswith("_mib"):
            name, factor = name.removesuffix("_mib") + "_bytes", MIB
    return re.sub(r"\W", "_", f"megadapo_{name}", flags=re.ASCII), factor


NUM_RECENT = 5
"""Number of recent steps from which a phase's duration is predicted."""


class RunLog:
    """Metrics, status, saved rollouts and the display of one run."""

    def __init__(self, config: RunConfig) -> None:
        self.records: list[MetricRecord] = []
        self.evaluated_steps: set[int] = set()
        self._config = config
        self._folder = config.run.folder
        self.status = StatusFile(self._folder, num_steps=config.run.num_steps)
        self.metrics = MetricsLog(
            self._folder, writers=config.observe.writers, config=to_dict(config)
        )
        self._hook = EventHook(config.run.on_event, self._folder, warn=_LOGGER.warning)
        self._rollouts = RolloutLog(self._folder)
        self._display = RunDisplay(self._folder, num_steps=config.run.num_steps)
        self._seconds: dict[str, float] = defaultdict(float)
        self._evaluated: EvaluationRecord | None = None
        """Newest evaluation that is in no step's record yet."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Show the run within this block, and finish all writes on exit."""
        port = self._config.observe.prometheus_port
        with (
            self.metrics,
            self._display,
            closing(self._rollouts),
            serving_metrics(port, self._last_step),
        ):
            self.send_event("start")
            yield

    def _last_step(self) -> tuple[Status, MetricRecord]:
        """Return the status and the newest record; may be called from any thread."""
        records = self.records
        return self.status.current, records[-1] if records else {}

    def rewind(self, step: int) -> None:
        """Set aside records and saved rollouts of steps after `step`, which the run will repeat."""
        self.metrics.rewind(step)
        self._rollouts.rewind(step)
        run = RunRecords(self._folder)
        self.records = run.steps
        self.evaluated_steps = {evaluation.step for evaluation in run.evaluations}
        self._display.restore(run.steps, run.evaluations)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show and time a phase; a nested phase does not count in the outer one."""
        self._display.phase(name)
        self.status.update(phase=name)
        start, counted = time.perf_counter(), sum(self._seconds.values())
        with profiled_range(f"megadapo::{name}"):
            yield
        within = sum(self._seconds.values()) - counted
        self._seconds[name] += time.perf_counter() - start - within

    def expected_s(self, name: str) -> float:
        """Return the longest time of a phase in recent steps; 0 if it is not known."""
        times = (record.get(f"time/{name}_s") for record in self.records[-NUM_RECENT:])
        return max((float(seconds) for seconds in times if seconds), default=0.0)

    def record(self, values: Mapping[str, int | float | None]) -> MetricRecord:
        """Write and show one step's metrics; add times, the driver's memory and an evaluation.

        The step's saved rollouts are on the disk before its record.
        """
        self._rollouts.wait()
        seconds = self._seconds
        step_s = sum(seconds[name] for name in ("rollout", "train", "sync"))
        times: dict[str, float | None] = {
            f"time/{name}_s": seconds[name]
            for name in ("rollout", "train", "sync", "evaluate", "checkpoint")
        }
        generated, speed = values.get("tokens/generated"), None
        if generated is None:
            # a replay has no engines to send weights to
            times["time/sync_s"] = None
        else:
            speed = generated / step_s
        evaluated: dict[str, int | float | None] = {}
        if self._evaluated is not None:
            evaluated = {
                f"held_out/{name}/{measure_of(one)}": mean_of(one)
                for name, one in self._evaluated.sets.items()
            }
            evaluated |= {
                "eval/accuracy": self._evaluated.accuracy,
                "eval/score": self._evaluated.score,
                "eval/pass_at_k": self._evaluated.best_of_all,
                "eval/cons_at_k": self._evaluated.consensus,
                "eval/response_length": self._evaluated.response_length,
                "eval/policy_version": self._evaluated.policy_version,
            }
        record = self.metrics.record(
            {
                **{**values, **times, "time/step_s": step_s, "tokens_per_s": speed},
                "memory/driver_mib": private_bytes(os.getpid()) / MIB,
                **evaluated,
            }
        )
        self._seconds, self._evaluated = defaultdict(float), None
        self.records.append(record)
        self._display.step(record)
        return record

    def save_rollouts(self, step: int, groups: Iterable[SavedGroup]) -> None:
        """Begin to write a step's saved groups; the step's record waits for them."""
        if self._config.observe.saved_groups != 0:
            self._rollouts.write(step, groups)

    def record_evaluation(
        self, evaluation: EvaluationRecord, groups: Sequence[SavedGroup] = ()
    ) -> None:
        """Write and show one held-out evaluation with its groups; delete its journal."""
        if groups:
            write_rollouts(step_file(self._folder / HELD_OUT_FOLDER, evaluation.step), groups)
        self.metrics.record_evaluation(evaluation)
        self.evaluated_steps.add(evaluation.step)
        self._display.evaluation(evaluation)
        self._evaluated = evaluation
        journal_path(self._folder, EVALUATION, evaluation.step).unlink(missing_ok=True)

    def recall_evaluation(self) -> None:
        """Put the newest evaluation into the next record unless a record contains it.

        A run that repeats a step does not repeat the step's evaluation. The evaluation before the
        first step is in no record.
        """
        self._evaluated = None
        evaluations = RunRecords(self._folder).evaluations
        if not evaluations or evaluations[-1].step == 0:
            return
        reported = {record.get("eval/policy_version") for record in self.records}
        if evaluations[-1].policy_version not in reported:
            self._evaluated = evaluations[-1]

    def show(self, *messages: str) -> None:
        """Show messages on the console and in log.txt."""
        for message in messages:
            self._display.note(message)

    def send_event(self, event: Event, *, reason: str | None = None) -> None:
        """Send an event to `run.on_event`, a step's with its metrics."""
        status, record = self._last_step()
        is_step = event == "step" and record.get("step") == status.step
        self._hook.send(event, status, reason=reason, metrics=record if is_step else None)

    def end(self, error: BaseException | None, *, stays_stopped: bool) -> None:
        """Write how the run ended to status.json and as the last line of log.txt.

        Under a supervisor, which may start the run again, the event is the supervisor's.
        """
        self._display.write(self.status.end(error, stays_stopped=stays_stopped), console=False)
        if not is_supervised():
            self.send_event("end", reason=self.status.current.reason)
        self._hook.finish()
