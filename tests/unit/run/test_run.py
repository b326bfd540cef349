"""A run's start, resume, refusal and evaluations."""

import errno
import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megadapo.errors import CheckpointError, ConfigError, InfraError
from megadapo.observe.metrics.records import read_evaluations, read_metrics
from megadapo.run.run import Run
from megadapo.run.state.status import read_status
from megadapo.run.state.stop import EVALUATE_SIGNAL, STEP_SIGNALS
from tests.support.runs.checkpoints import write_shard
from tests.support.runs.recorded_runs import evaluation_record
from tests.support.runs.runs_alone import (
    advance,
    config_of,
    open_and_close,
    record_step,
    saved_steps,
)


def test_first_ratio_is_checked_in_step_1_and_with_each_checkpoint(tmp_path):
    """Catches a check in every step, which costs GPUs a forward pass, and a last step without."""
    with Run.open(config_of(tmp_path)) as run:
        assert [run.checks_first_ratio(step) for step in range(1, 6)] == [
            *(True, True, False, True, True)
        ]
        advance(run, 2)
    with Run.open(config_of(tmp_path)) as run:
        assert not run.checks_first_ratio(run.step + 1)


def test_new_folder_is_the_users_alone(tmp_path):
    """Prompts, responses and settings would be readable by every user of the machine."""
    folder = tmp_path / "runs" / "new"
    before = os.umask(0)
    try:
        with Run.open(config_of(folder)):
            pass
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("mode", "warned"), [(0o755, 1), (0o750, 0)])
def test_existing_folder_keeps_its_permissions(tmp_path, mode, warned):
    tmp_path.chmod(mode)
    with Run.open(config_of(tmp_path)):
        pass
    assert tmp_path.stat().st_mode & 0o777 == mode
    assert (tmp_path / "log.txt").read_text().count("chmod o-rwx") == warned


def test_resumed_run_drops_later_records(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        run.log.record_evaluation(evaluation_record(0))
        advance(run, 3)
        run.log.record_evaluation(evaluation_record(3))
    with Run.open(config_of(tmp_path)) as run:
        # its evaluation may have been interrupted, beside step 3
        assert run.step == 2 and run.evaluates(2)
        assert run.checkpoints.current.state == {"cursor": 2}
        assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]
        assert [e.step for e in read_evaluations(tmp_path)] == [0]


def test_records_without_checkpoint_are_dropped(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        run.log.record_evaluation(evaluation_record(0))
        advance(run, 1)
    with Run.open(config_of(tmp_path)):
        assert read_metrics(tmp_path) == [] and read_evaluations(tmp_path) == []


def test_resume_from_path_abandons_later_steps(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 5)
    path = tmp_path / "checkpoints" / "step-4"
    with Run.open(config_of(tmp_path, resume=str(path))) as run:
        assert run.step == 4
        advance(run, 5)
    assert "step-5" in saved_steps(tmp_path)
    assert any(name.startswith("aside-step-5") for name in saved_steps(tmp_path))


@pytest.mark.parametrize(
    ("start", "every", "evaluated"),
    [(0, 2, [0, 2, 4, 5]), (2, 2, [4, 5]), (3, 2, [4, 5]), (5, 2, []), (0, 0, [])],
)
def test_each_due_step_is_evaluated_once(tmp_path, start, every, evaluated):
    with Run.open(config_of(tmp_path, {"evaluation.every": every})) as run:
        run.step = start
        if start:
            run.log.record_evaluation(evaluation_record(start))
        steps = [start, *range(start + 1, 6)]
        assert [step for step in steps if run.evaluates(step)] == evaluated


def test_signals_save_and_evaluate_the_step_in_progress(tmp_path):
    config = config_of(tmp_path, {"evaluation.every": 0, "checkpoint.every": 100})
    with Run.open(config) as run:
        record_step(run, 1)
        assert not run.saves(1) and not run.evaluates(1)
        for number in STEP_SIGNALS:
            os.kill(os.getpid(), number)
        assert run.saves(1) and run.evaluates(1)
        assert not run.saves(2) and not run.evaluates(2)


def test_signal_to_a_run_that_closes_does_not_end_it(tmp_path, monkeypatch):
    """All steps are done: an exit code of the signal would have a scheduler start it again."""
    ended: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 5)
        close = run.log.metrics.close
        monkeypatch.setattr(
            run.log.metrics, "close", lambda: (os.kill(os.getpid(), signal.SIGTERM), close())
        )
    signal.signal(signal.SIGTERM, before)
    assert ended == [] and read_status(tmp_path).state == "finished"
    assert saved_steps(tmp_path) == ["step-4", "step-5"]


def test_evaluation_without_problems_is_a_message(tmp_path):
    config = config_of(tmp_path, {"evaluation.every": 0, "data.held_out": None})
    with Run.open(config) as run:
        os.kill(os.getpid(), EVALUATE_SIGNAL)
        assert not run.evaluates(1)
    assert "SIGUSR2: data.held_out is not set" in (tmp_path / "log.txt").read_text()


def test_impossible_folder_is_one_message(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.folder = .*file/run cannot be created"):
        open_and_close(config_of(tmp_path / "file" / "run"))


def test_folder_of_a_disk_that_is_not_mounted_may_come_back(tmp_path, monkeypatch):
    """A configuration error would never be restarted."""

    def refuse(path: Path, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(InfraError, match=r"run\.folder = .* cannot be created: Read-only"):
        open_and_close(config_of(tmp_path / "run"))


def test_second_driver_changes_nothing(tmp_path):
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 2)
        before = (tmp_path / "metrics.jsonl").read_bytes()
        with pytest.raises(InfraError, match="is driven by process"):
            open_and_close(config_of(tmp_path))
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
    with pytest.raises(CheckpointError, match="run.folder"):
        open_and_close(config_of(tmp_path, resume="never"))
    open_and_close(config_of(tmp_path))


def test_driver_that_lost_its_lease_leaves_the_status_to_the_next(tmp_path):
    """The status of a run that went on under another driver was "failed"."""
    with pytest.raises(InfraError, match="lost the run's folder"), Run.open(config_of(tmp_path)):
        lease, theirs = tmp_path / "lease.json", read_status(tmp_path).driver
        lease.write_text(json.dumps(json.loads(lease.read_text()) | {"token": "theirs"}))
        raise InfraError("lost the run's folder")
    assert (read_status(tmp_path).state, read_status(tmp_path).driver) == ("running", theirs)


def test_failed_start_is_not_left_running(tmp_path):
    def states(error: type[Exception]) -> tuple[str, list[Path]]:
        with pytest.raises(error):
            open_and_close(config_of(tmp_path))
        return read_status(tmp_path).state, list(tmp_path.glob("lease*"))

    (tmp_path / "config.json").mkdir()
    assert states(InfraError) == ("failed", [])
    (tmp_path / "config.json").rmdir()
    with ThreadPoolExecutor() as threads:
        # which may not take signals over
        assert threads.submit(states, ValueError).result() == ("failed", [])
    with Run.open(config_of(tmp_path)):
        assert read_status(tmp_path).state == "running"


@pytest.mark.parametrize(
    ("name", "place"),
    [("model.safetensors", -1), ("config.json", 0), ("chat_template.jinja", 0)],
)
def test_run_whose_model_was_overwritten_is_not_resumed(tmp_path, name, place):
    """A resumed run had another reference policy or template without a word."""
    model, folder = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    for file in ("model.safetensors", "config.json", "chat_template.jinja"):
        (model / file).write_bytes(bytes(300_000))
    config = config_of(folder, {"model.path": str(model)})
    with Run.open(config) as run:
        advance(run, 2)
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    (copy / "README.md").write_text("notes")
    changed = bytearray((model / name).read_bytes())
    changed[place] = 1
    (model / name).write_bytes(changed)
    before = (folder / "config.json").read_text()
    with pytest.raises(ConfigError, match=rf"model\.path: other {name} (?s:.*)changes=model\.path"):
        open_and_close(config)
    assert (folder / "config.json").read_text() == before
    open_and_close(config_of(folder, {"model.path": str(copy)}))
    with Run.open(config, accept_changes=["model.path"]) as run:
        advance(run, 4)
    open_and_close(config)


def test_groups_of_another_rule_are_dropped(tmp_path):
    waiting = {"cursor": 7, "reserve": {"open": ["a group"]}, "counters": {"num_stopped": 3}}
    with Run.open(config_of(tmp_path)) as run:
        advance(run, 1)
        run.complete(2, {"sampler": waiting, "kl": 0.5})
        run.save(write_shard)
    changed = config_of(tmp_path, {"reward.rule": "boxed"})
    with pytest.raises(ConfigError, match=r"(?s)reward\.rule: .*--accept-changes"):
        open_and_close(changed)
    with Run.open(changed, accept_changes=["reward.rule"]) as run:
        empty = {"finished": {}, "versions": {}, "open": {}}
        assert run.checkpoints.current.state == {
            "sampler": {"cursor": 7, "reserve": empty, "counters": None},
            "kl": 0.5,
        }
    assert "are dropped" in (tmp_path / "log.txt").read_text()
