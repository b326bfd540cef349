"""Records of a run: evaluations, times, saved rollouts and its end."""

import math
import socket
import time
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megadapo.errors import InfraError
from megadapo.observe.metrics.names import METRIC_NAMES, METRICS
from megadapo.observe.metrics.records import read_evaluations, read_metrics
from megadapo.observe.rollouts import files as rollouts
from megadapo.observe.summary import before_after
from megadapo.rollout.journal.journal import EVALUATION, journal_path
from megadapo.run.run import Run
from megadapo.run.run_log import prometheus_name
from tests.support.rollout.saved_groups import saved_group
from tests.support.runs.checkpoints import write_shard, written_by
from tests.support.runs.recorded_runs import evaluation_record
from tests.support.runs.runs_alone import advance, config_of, record_step


def reported(folder: Path) -> list[tuple[object, object]]:
    return [(r["eval/accuracy"], r["eval/policy_version"]) for r in read_metrics(folder)]


def test_evaluation_is_in_the_next_record(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        run.log.record_evaluation(evaluation_record(0))
        for step in run.steps():
            if step in (3, 5):
                run.log.record_evaluation(evaluation_record(step - 1))
            if step == 5:
                run.log.record_evaluation(evaluation_record(5))
            record_step(run, step)
    nothing = (None, None)
    assert reported(tmp_path) == [nothing, nothing, (0.5, 2), nothing, (0.5, 5)]


def test_redone_step_reuses_evaluation(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 2)
        run.log.record_evaluation(evaluation_record(2))
    with Run.open(config_of(tmp_path)) as run:
        assert not run.evaluates(2)
        advance(run, 4)
    assert reported(tmp_path) == [(None, None), (None, None), (0.5, 2), (None, None)]


def test_redone_step_reports_older_evaluation(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        run.log.record_evaluation(evaluation_record(0))
        advance(run, 4)
        run.log.record_evaluation(evaluation_record(2))
    for _ in range(2):
        with Run.open(config_of(tmp_path)) as run:
            advance(run, 5)
        assert reported(tmp_path) == [(None, None)] * 4 + [(0.5, 2)]


def test_recorded_evaluation_deletes_its_answers(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        files = [journal_path(tmp_path, EVALUATION, step) for step in (2, 4)]
        for file in files:
            file.touch()
        run.log.record_evaluation(evaluation_record(2))
        assert [file.exists() for file in files] == [False, True]


def test_nested_phase_is_timed_once(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        with run.phase("rollout"), run.phase("evaluate"):
            time.sleep(0.05)
        run.log.record({"step": 1, "tokens/generated": 10})
    [record] = read_metrics(tmp_path)
    assert record["time/evaluate_s"] >= 0.05 > record["time/rollout_s"] >= 0.0


def test_last_log_line_says_how_the_run_ended(tmp_path):
    with pytest.raises(InfraError), Run.open(config_of(tmp_path)) as run:
        advance(run, 2)
        raise InfraError("engine 1 is gone")
    line = (tmp_path / "log.txt").read_text().splitlines()[-1]
    assert "end: state=failed step=2/5 checkpoint=2 reason='InfraError: engine 1 is gone'" in line


def test_evaluations_and_saves_are_timed_in_next_record(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        with run.phase("evaluate"):
            time.sleep(0.02)
        for step in run.steps():
            record_step(run, step)
            if step == 2:
                run.save(written_by(lambda folder: time.sleep(0.03)))
            if step == 4:
                break
    times = [(r["time/evaluate_s"], r["time/checkpoint_s"]) for r in read_metrics(tmp_path)]
    assert times[0][0] >= 0.02 and times[2][1] >= 0.03
    assert times[1] == times[3] == (0.0, 0.0) and times[0][1] == times[2][0] == 0.0
    assert all(r["time/step_s"] < 0.02 for r in read_metrics(tmp_path))


def test_step_without_generation_has_no_speed_or_sync(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        for name in ("rollout", "train", "sync"):
            with run.phase(name):
                pass
        record = run.log.record({"step": 1})
    assert record["tokens_per_s"] is None and record["time/sync_s"] is None
    assert record["time/step_s"] >= record["time/rollout_s"] + record["time/train_s"] > 0


def test_saved_rollouts_precede_record_and_are_rewound(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        for step in run.steps():
            run.log.save_rollouts(step, iter([saved_group(step=step)]))
            record_step(run, step)
            assert rollouts.saved_steps(tmp_path) == list(range(1, step + 1))
            if run.checkpoints.is_due(step):
                run.save(write_shard)
            if step == 3:
                break
    with Run.open(config_of(tmp_path)):
        assert rollouts.saved_steps(tmp_path) == [1, 2]


def test_unsaved_rollouts_prevent_the_record(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        (tmp_path / "rollouts").write_text("in the way")
        run.log.save_rollouts(1, [saved_group(step=1)])
        with pytest.raises(InfraError, match=r"rollouts/step-1"):
            record_step(run, 1)
    assert read_metrics(tmp_path) == []


def test_saved_rollouts_can_be_off(tmp_path):
    with Run.open(config_of(tmp_path, {"observe.saved_groups": 0})) as run:
        run.log.save_rollouts(1, [saved_group(step=1)])
    assert not (tmp_path / "rollouts").exists()


def test_named_sets_are_in_the_records_and_the_summary(tmp_path):
    """A record of the mean alone would hide a set that gets worse."""
    sets = {
        "aime24": {"accuracy": 0.25, "standard_error": 0.1, "num_problems": 30},
        "aime25": {"accuracy": 0.75, "standard_error": math.nan, "num_problems": 1},
    }
    evaluation = replace(evaluation_record(1), sets=sets)
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 1)
        run.log.record_evaluation(evaluation)
        advance(run, 2)
    record = read_metrics(tmp_path)[-1]
    assert [record[f"held_out/{name}/accuracy"] for name in sets] == [0.25, 0.75]
    [read] = read_evaluations(tmp_path)
    assert math.isnan(read.sets["aime25"].pop("standard_error"))
    assert read.sets["aime24"] == sets["aime24"]
    rows = {name: (first, last) for name, first, last in before_after([record], [evaluation])}
    assert rows["of aime24 (30 problems)"] == ("0.250 ± 0.100", "0.250 ± 0.100")
    with Run.open(config_of(tmp_path / "one")) as run:
        run.log.record_evaluation(evaluation_record(1))
    assert '"sets"' not in (tmp_path / "one" / "evaluations.jsonl").read_text()


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
