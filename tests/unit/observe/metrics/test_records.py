"""Metrics survive kills, other writers get them, and their names and reflections are known."""

import json
import math
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megadapo.cli import main, run_command
from megadapo.errors import ConfigError, DataError
from megadapo.observe.config import ObserveConfig
from megadapo.observe.metrics.names import METRIC_NAMES, METRICS
from megadapo.observe.metrics.page import metrics_page
from megadapo.observe.metrics.records import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    MetricsLog,
    read_evaluations,
    read_metrics,
)
from megadapo.observe.metrics.reflection import metric_name, reflection_shares
from megadapo.observe.metrics.writers import missing_packages, open_writer
from tests.support import REPOSITORY
from tests.support.processes.running import run_python
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


def test_a_writer_that_is_not_installed_is_named_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "wandb" not in p])
    with pytest.raises(ConfigError, match=r"observe\.writers.*pip install wandb"):
        run_command(
            [
                *("train", "configs/quickstart.toml", "--dry-run"),
                f"--run.folder={tmp_path / 'run'}",
                '--observe.writers=["tensorboard", "wandb"]',
            ]
        )
    assert not (tmp_path / "run").exists()


def test_a_folder_of_that_name_is_no_package(tmp_path, monkeypatch):
    """wandb keeps its files in ./wandb, which Python takes for a package without modules."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert missing_packages(("tensorboard", "wandb")) == ["wandb"]
    (tmp_path / "wandb" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert missing_packages(("tensorboard", "wandb")) == []


def test_a_disk_that_refuses_the_events_does_not_end_a_run(tmp_path, caplog):
    (tmp_path / "tensorboard").touch()
    writer = open_writer("tensorboard", tmp_path, {}, None)
    writer.write({"reward/mean": 1.0}, 1)
    writer.close()
    assert "tensorboard has no metrics" in caplog.text


class WandbError(Exception):
    pass


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package, whose runs fail or hang as told."""

    def log(values, step):
        if stand_in.fails:
            raise WandbError("the service is gone")
        stand_in.steps.append(step)

    stand_in = SimpleNamespace(fails=False, steps=[], finish=lambda: None)
    stand_in.errors = SimpleNamespace(Error=WandbError)
    stand_in.Settings = dict
    run = SimpleNamespace(log=log, finish=lambda: stand_in.finish())
    stand_in.init = lambda **options: run
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    return stand_in


def test_wandb_that_refuses_metrics_does_not_end_a_run(tmp_path, caplog, wandb):
    with MetricsLog(tmp_path, writers=("wandb",)) as log:
        log.open_writers()
        for step in (1, 2, 3):
            wandb.fails = step == 2
            log.record({"step": step})
    assert wandb.steps == [1]
    assert "none are sent from step 2 on: the service is gone" in caplog.text
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]


def test_writer_that_does_not_close_is_abandoned(tmp_path, caplog, wandb, monkeypatch):
    """With the network down, wandb waits for its upload without end."""
    monkeypatch.setattr("megadapo.observe.metrics.writers.CLOSE_S", 0.2)
    released = threading.Event()
    wandb.finish = released.wait
    start = time.monotonic()
    with MetricsLog(tmp_path, writers=("wandb",)) as log:
        log.open_writers()
    assert time.monotonic() - start < 5
    assert "WandbWriter did not send its last metrics in 0.2 s" in caplog.text
    released.set()


@pytest.mark.parametrize(
    ("key", "value"),
    [("writers", value) for value in (["csv"], "tensorboard", ["tensorboard", "tensorboard"])]
    + [("saved_groups", value) for value in (-1, "some", 1.5, True)],
)
def test_impossible_values_are_config_errors(key, value):
    with pytest.raises(ConfigError, match=rf"observe\.{key}"):
        ObserveConfig(**{key: value})


def test_importing_writers_imports_none_of_them():
    program = "import megadapo.observe.metrics.records, sys\n"
    program += "assert not {'wandb', 'tensorboard', 'torch'} & set(sys.modules)"
    run_python(program)


PROMISED = """
step policy_version time/step_s time/rollout_s time/train_s time/sync_s time/reward_s tokens_per_s
reward/mean accuracy/mean response_length/mean response_length/p95
response_length/truncated_fraction groups/sampled groups/kept groups/all_correct groups/all_wrong
groups/from_reserve groups/to_reserve tokens/generated tokens/trained policy/loss policy/entropy
policy/ratio_mean policy/ratio_first_max_error policy/clip_low_fraction policy/clip_high_fraction
policy/clip_high_probability
policy/token_probability_mean policy/grad_norm policy/lr policy/skipped_updates
parity/logprob_abs_mean parity/logprob_abs_max eval/accuracy
"""
"""Names that dashboards of users read."""


def test_promised_names_stay():
    assert set(PROMISED.split()) <= METRICS.keys()


def test_every_metric_has_a_sentence():
    assert all(meaning.endswith(".") for meaning in METRICS.values())


def test_page_is_current(capsys):
    """megadapo config --metrics > docs/metrics.md"""
    assert (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8") == metrics_page()
    assert main(["config", "--metrics"]) == 0
    assert capsys.readouterr().out == metrics_page()


def test_shares_are_of_responses_and_of_whole_words():
    texts = [
        "Wait, wait: 3.\nLet  me\ncheck that.",
        "The waiter awaits; let me checkmate.",
        "HOWEVER I wait",
        "",
    ]
    assert reflection_shares(texts, ["wait", "let me check", "however", "double-check"]) == {
        "reflection/response_share": 0.5,
        "reflection/wait": 0.5,
        "reflection/let_me_check": 0.25,
        "reflection/however": 0.25,
        "reflection/double_check": 0.0,
    }


@pytest.mark.parametrize(
    ("phrase", "text", "has"),
    [
        ("wait", "wait!", True),
        ("wait", "wait2", False),
        ("double-check", "I double-check", True),
        ("hmm...", "hmm... no", True),
        ("(wait)", "so (wait) so", True),
        ("等一下", "我们等一下再看", True),
        ("a.c", "abc", False),
    ],
)
def test_a_phrase_is_text_and_no_pattern(phrase, text, has):
    assert reflection_shares([text], [phrase])[metric_name(phrase)] == float(has)


def test_nothing_to_look_at_is_not_a_share_of_zero():
    assert reflection_shares([], ["wait"]) == {
        "reflection/response_share": None,
        "reflection/wait": None,
    }
    assert reflection_shares(["wait"], []) == {"reflection/response_share": None}


@pytest.mark.parametrize(
    ("phrases", "said"),
    [
        (("wait", "Wait"), "would share reflection/wait"),
        (("let me", "let-me"), "would share"),
        (("response share",), "would share"),
        (("", "wait"), "without a word"),
        (("...",), "without a word"),
    ],
)
def test_phrases_that_cannot_be_told_apart_are_refused(phrases, said):
    with pytest.raises(ConfigError, match=said):
        ObserveConfig(reflection_phrases=phrases)
    assert ObserveConfig(reflection_phrases=()).reflection_phrases == ()
