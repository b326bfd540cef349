"""The run's state and the metrics of its last step, over HTTP for Prometheus."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megadapo.cluster.processes import MIB
from megadapo.cluster.this_node import LOOPBACK
from megadapo.observe.metrics.names import METRICS
from megadapo.run.state.status import Status

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
    yield GaugeMetricFamily("megadapo_run_step", "Last completed step.", value=status.step)
    yield GaugeMetricFamily("megadapo_run_num_steps", "Steps of the run.", value=status.num_steps)
    yield GaugeMetricFamily(
        "megadapo_run_checkpoint_step",
        "Step of the newest checkpoint.",
        value=status.checkpoint_step,
    )
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
