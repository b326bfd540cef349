"""Prometheus reads the run's state and the metrics of its last step; no failure ends the run."""

import math
import socket
import time
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megadapo.observe.metrics.names import METRIC_NAMES, METRICS
from megadapo.run.run import Run
from megadapo.run.run_log import prometheus_name
from tests.support.runs.runs_alone import config_of, record_step


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def scrape(port):
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    return {sample.name: sample for sample in samples}, {f.name: f.documentation for f in families}


def serving(folder, port):
    return config_of(folder, {"observe.prometheus_port": port})


def test_every_metric_of_the_last_step_is_served(tmp_path, port):
    values = {name: number + 0.5 for number, name in enumerate(METRIC_NAMES)}
    with Run.open(serving(tmp_path, port)) as run:
        for step in (1, 2):
            with run.phase("rollout"):
                pass
            record = run.log.record({**values, "step": step, "policy/loss": math.nan})
            run.complete(step, {})
        samples, meanings = scrape(port)
    for metric in METRIC_NAMES:
        name, factor = prometheus_name(metric)
        assert meanings[name] == METRICS[metric]
        value, expected = samples[name].value, record[metric]
        assert value == factor * expected or metric == "policy/loss" and math.isnan(value)
    assert samples["megadapo_step"].value == samples["megadapo_run_step"].value == 2
    assert samples["megadapo_run_num_steps"].value == 5
    assert samples["megadapo_run_phase"].labels == {"phase": "rollout"}
    assert samples["megadapo_run_restarts_total"].value == 0
    assert abs(samples["megadapo_run_step_end_timestamp_seconds"].value - time.time()) < 60


def test_run_without_a_step_serves_its_state(tmp_path, port):
    """A scrape during the first rollout, which can take an hour, must not fail."""
    with Run.open(serving(tmp_path, port)) as run, run.phase("start engines"):
        samples, _ = scrape(port)
    assert samples["megadapo_run_phase"].labels == {"phase": "start engines"}
    assert samples["megadapo_run_step"].value == 0
    assert "megadapo_step" not in samples


def test_missing_value_is_left_out_and_equal_names_are_served_once(tmp_path, port):
    """Two samples with one name make Prometheus refuse the whole answer."""
    own = {"reward/a-b": 1.0, "reward/a_b": 2.0}
    with Run.open(serving(tmp_path, port)) as run:
        run.log.record({"step": 1, **own})
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    assert "megadapo_reward_a_b 1.0" in lines and "megadapo_reward_a_b 2.0" not in lines
    assert not [line for line in lines if line.startswith("megadapo_policy_loss")]


def test_taken_port_is_one_warning(tmp_path, port, capsys):
    with socket.create_server(("127.0.0.1", port)), Run.open(serving(tmp_path, port)) as run:
        for step in run.steps():
            record_step(run, step)
    assert (tmp_path / "log.txt").read_text().count("observe.prometheus_port") == 1
    assert "Prometheus gets no metrics" in capsys.readouterr().out


def test_next_driver_binds_the_port_again(tmp_path, port):
    """Connections of the last driver keep its port busy for a minute unless it may be reused."""
    for restarts in range(2):
        with Run.open(serving(tmp_path, port)) as run:
            record_step(run, 1 + restarts)
            # the server closes a connection first, so the port stays in TIME_WAIT
            samples, _ = scrape(port)
        assert samples["megadapo_run_restarts_total"].value == restarts
    with pytest.raises(OSError):
        scrape(port)


def test_driver_keeps_the_time_of_the_last_step(tmp_path, port):
    """An alert on the age of the last step must not fall silent while a new driver starts."""
    with Run.open(serving(tmp_path, port)) as run:
        record_step(run, 1)
        before, _ = scrape(port)
    with Run.open(serving(tmp_path, port)):
        after, _ = scrape(port)
    name = "megadapo_run_step_end_timestamp_seconds"
    assert after[name].value == before[name].value


@pytest.mark.parametrize(
    ("metric", "name", "factor"),
    [
        ("time/step_s", "megadapo_time_step_seconds", 1),
        ("tokens_per_s", "megadapo_tokens_per_second", 1),
        ("rollout/tokens_per_s_min", "megadapo_rollout_tokens_per_second_min", 1),
        ("memory/driver_mib", "megadapo_memory_driver_bytes", 1 << 20),
        ("reward/format", "megadapo_reward_format", 1),
        ("reward/my-rule/é_s", "megadapo_reward_my_rule___s", 1),
    ],
)
def test_names_have_the_units_of_prometheus(metric, name, factor):
    assert prometheus_name(metric) == (name, factor)
