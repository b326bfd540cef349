"""The user's command gets each event, and neither delays nor ends the run."""

import json
import math
import os
import sys
import time
from pathlib import Path

import pytest

from megadapo.config.preflight import check_run
from megadapo.errors import ConfigError, InfraError, OracleError
from megadapo.run.run import Run
from megadapo.run.state.events import EventHook, is_supervised
from megadapo.run.step.record_writer import StepWriter
from tests.support.processes.running import is_running, wait_until
from tests.support.processes.supervised import supervise
from tests.support.runs.runs_alone import advance, config_of, record_step


@pytest.fixture
def script(tmp_path):
    """Returns the command of a shell script, and the file that its lines can append to."""

    def write(body):
        path, out = tmp_path / "hook.sh", tmp_path / "out"
        path.write_text(f"#!/bin/sh\nout='{out}'\n{body}\n")
        path.chmod(0o700)
        return str(path), out

    return write


def received(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def names(out: Path) -> list[str]:
    return [event["event"] for event in received(out)]


def run_alone(folder: Path, command: str, num_steps: int = 2) -> None:
    with Run.open(config_of(folder / "run", on_event=command)) as run:
        advance(run, num_steps)


def test_events_of_a_run_come_in_order_with_status_and_metrics(tmp_path, script):
    command, out = script('cat >> "$out"')
    with Run.open(config_of(tmp_path / "run", on_event=command)) as run:
        for step in run.steps():
            record_step(run, step)
            # a slow command would get the newest step only
            wait_until(lambda step=step: names(out).count("step") == step)
            if step == 2:
                break
    events = received(out)
    assert names(out) == ["start", "step", "step", "end"]
    assert {event["folder"] for event in events} == {str(tmp_path / "run")}
    assert [event["status"]["step"] for event in events] == [0, 1, 2, 2]
    assert [event["status"]["state"] for event in events] == ["running"] * 3 + ["stopped"]
    assert events[2]["metrics"]["step"] == 2 and events[2]["metrics"]["tokens/generated"] == 10
    assert events[0]["metrics"] is events[3]["metrics"] is None


def test_save_comes_after_the_checkpoint(tmp_path, script):
    command, out = script('cat >> "$out"')
    run_alone(tmp_path, command, num_steps=2)
    [saved] = [event for event in received(out) if event["event"] == "save"]
    assert saved["status"]["checkpoint_step"] == 2


def test_example_of_the_page_exports_each_checkpoint_longer_than_a_command_may_take(
    tmp_path, monkeypatch
):
    """Its export was a part of the command, and ended with it."""
    page = (Path(__file__).parents[4] / "docs" / "reliability.md").read_text()
    hook, exporter = tmp_path / "export_saves.py", tmp_path / "megadapo"
    hook.write_text(page.split("```python\n")[1].split("```")[0])
    exporter.write_text('#!/bin/sh\nsleep 1; echo "GPUs: $CUDA_VISIBLE_DEVICES"; echo "$@"\n')
    exporter.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run_alone(tmp_path, f"{sys.executable} {hook}")
    run, log = tmp_path / "run", tmp_path / "run" / "logs" / "export-step-2.log"
    wait_until(lambda: log.read_text().count("\n") == 2, timeout_s=20)
    assert log.read_text() == f"GPUs: \nexport {run} {run}/exports/step-2 --step 2\n"


def test_failed_run_ends_with_its_reason(tmp_path, script):
    command, out = script('cat >> "$out"')
    config = config_of(tmp_path / "run", on_event=command)
    with pytest.raises(InfraError), Run.open(config):
        raise InfraError("engine 1 is gone")
    end = received(out)[-1]
    assert (end["event"], end["status"]["state"]) == ("end", "failed")
    assert end["reason"] == "InfraError: engine 1 is gone"


def test_broken_bound_is_an_event(tmp_path, script):
    command, out = script('cat >> "$out"')
    config = config_of(tmp_path / "run", on_event=command)
    with pytest.raises(OracleError), Run.open(config) as run:
        writer = StepWriter.__new__(StepWriter)
        writer._config, writer._run = config, run
        run.log.records.append({"step": 1, "policy/ratio_first_max_error": math.nan})
        writer._check_oracles()
    oracle, end = received(out)[-2:]
    assert (oracle["event"], end["event"]) == ("oracle", "end")
    assert "oracles.ratio_first_max_error" in oracle["reason"]


def test_numbers_that_json_lacks_are_text(tmp_path, script):
    command, out = script('cat >> "$out"')
    hook = EventHook(command, tmp_path, warn=print)
    hook.send("step", None, metrics={"policy/loss": math.nan, "kl/max": None})
    hook.finish()
    assert received(out)[0]["metrics"] == {"policy/loss": "nan", "kl/max": None}


def test_values_are_never_a_part_of_the_command(tmp_path, script):
    """A reward function's error quotes what a model wrote: it must run nothing."""
    victim = tmp_path / "victim"
    reason = f"$(touch {victim}); `touch {victim}`\n'; touch {victim} #\x1b[2J\ud800"
    command, out = script('echo "$#" >> "$out.words"; cat >> "$out"')
    hook = EventHook(f"{command} '$(date)'", tmp_path, warn=print)
    hook.send("oracle", None, reason=reason)
    hook.finish()
    assert received(out)[0]["reason"] == reason
    assert (tmp_path / "out.words").read_text() == "1\n" and not victim.exists()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("cat > /dev/null; printf 'no \\033route' >&2; exit 3", "exit code 3: no \\x1broute"),
        ("kill -9 $$", "exit code -9"),
        (None, "No such file"),
    ],
)
def test_failures_are_one_warning(tmp_path, script, body, problem, capfd):
    command = str(tmp_path / "missing") if body is None else script(body)[0]
    run_alone(tmp_path, command)
    log = (tmp_path / "run" / "log.txt").read_text() + capfd.readouterr().err
    assert log.count("run.on_event failed") == 1
    assert "at the event 'start'; further failures are not shown" in log and problem in log


def test_hanging_command_is_killed_with_its_children(tmp_path, script, monkeypatch):
    """A hook that waits for a server that is away would stay behind, one for each event."""
    command, out = script(f'sleep 600 & echo $! >> "{tmp_path}/pids"; wait')
    warnings = []
    monkeypatch.setattr("megadapo.run.state.events.COMMAND_S", 0.3)
    hook = EventHook(command, tmp_path, warn=warnings.append)
    began = time.monotonic()
    for event in ("start", "save"):
        hook.send(event, None)
    assert time.monotonic() - began < 0.2
    hook.finish()
    assert 0.6 <= time.monotonic() - began < 5
    [warning] = warnings
    assert "it was killed after 0.3 s" in warning
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    wait_until(lambda: not any(is_running(int(pid)) for pid in pids), timeout_s=10)


def test_background_of_a_command_ends_with_it(tmp_path, script):
    command, _ = script(f'sleep 600 & echo $! > "{tmp_path}/pids"')
    hook = EventHook(command, tmp_path, warn=print)
    hook.send("start", None)
    hook.finish()
    pid = int((tmp_path / "pids").read_text())
    wait_until(lambda: not is_running(pid), timeout_s=10)


def test_slow_command_gets_the_newest_step_and_delays_the_end_by_a_bound(
    tmp_path, script, monkeypatch
):
    command, out = script('cat >> "$out"; sleep 0.4')
    warnings = []
    monkeypatch.setattr("megadapo.run.state.events.FINISH_S", 2.0)
    hook = EventHook(command, tmp_path, warn=warnings.append)
    hook.send("start", None)
    wait_until(lambda: names(out) == ["start"])
    for step in range(100):
        hook.send("step", None, metrics={"step": step})
    hook.send("end", None)
    hook.finish()
    assert names(out) == ["start", "step", "end"] and not warnings
    assert received(out)[1]["metrics"] == {"step": 99}
    began = time.monotonic()
    for step in range(30):
        hook.send("save", None, metrics={"step": step})
    hook.finish()
    assert time.monotonic() - began < 3.5
    saves = [event["metrics"]["step"] for event in received(out) if event["event"] == "save"]
    # the oldest events are left out, after the one that was under way
    assert len(warnings) == 1 and len(saves) < 8 and saves[1] >= 14


def test_large_event_does_not_wait_for_a_command_that_reads_nothing(tmp_path, script):
    """A full pipe would block the thread, and the end of the run with it."""
    command, out = script("exit 0")
    warnings = []
    hook = EventHook(command, tmp_path, warn=warnings.append)
    hook.send("oracle", None, reason="x" * 10_000_000)
    began = time.monotonic()
    hook.finish()
    assert time.monotonic() - began < 4 and not warnings


RECORD = f"{sys.executable} -c 'import sys; open(sys.argv[1], \"a\").write(sys.stdin.read())'"


def test_restarts_and_the_end_come_from_the_supervisor(tmp_path, monkeypatch):
    """The end of one driver is no end of the run: a pager would ring at each restart."""
    out = tmp_path / "out"
    monkeypatch.setenv("ON_EVENT", f"{RECORD} {out}")
    driver = """
    from megadapo.run.state.events import is_supervised
    assert is_supervised()
    status = resume_and_complete(num)
    if num == 1: os.kill(os.getpid(), signal.SIGKILL)
    status.end(ValueError("no number") if num == 2 else None)
    sys.exit({2: 5, 3: 2}[num])
    """
    code, output, _ = supervise(tmp_path, driver)
    assert code == 2 and "run.on_event" not in output
    events = received(out)
    assert [event["event"] for event in events] == ["restart", "restart", "end"]
    assert [event["status"]["step"] for event in events] == [1, 2, 3]
    assert [event["status"]["state"] for event in events[:2]] == ["waiting"] * 2
    reasons = [event["reason"] for event in events]
    assert reasons[:2] == ["SIGKILL", "ValueError: no number"]
    assert reasons[2] == "exit code 2; not restarted: a restart cannot fix exit code 2"


def test_finished_run_under_a_supervisor_ends_without_a_reason(tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setenv("ON_EVENT", f"{RECORD} {out}")
    supervise(tmp_path, "resume_and_complete(9).end(None)")
    [end] = received(out)
    assert (end["event"], end["reason"], end["status"]["state"]) == ("end", None, "finished")


def test_run_that_never_started_has_an_end(tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setenv("ON_EVENT", f"{RECORD} {out}")
    supervise(tmp_path, "sys.exit(2)")
    [end] = received(out)
    assert end["status"] is None and "cannot fix exit code 2" in end["reason"]


def test_driver_without_its_supervisor_sends_the_end_itself(tmp_path, script, monkeypatch):
    """A killed supervisor sends nothing; the variable alone would silence its driver."""
    command, out = script('cat >> "$out"')
    monkeypatch.setenv("MEGADAPO_SUPERVISOR", str(os.getppid()))
    assert is_supervised()
    run_alone(tmp_path, command)
    assert "end" not in names(out)
    monkeypatch.setenv("MEGADAPO_SUPERVISOR", "1234567")
    run_alone(tmp_path, command, num_steps=3)
    assert names(out)[-1] == "end"


@pytest.mark.parametrize(("command", "message"), [(" ", "is empty"), ("a 'b", "No closing")])
def test_wrong_command_is_refused(command, message):
    with pytest.raises(ConfigError, match=f"run.on_event.*{message}"):
        config_of(on_event=command)


def test_missing_command_is_a_warning_of_the_check(tmp_path, monkeypatch):
    from megadapo.config import load_config

    monkeypatch.chdir(Path(__file__).parents[4])
    overrides = [f"run.folder={tmp_path / 'run'}", "run.on_event=no-such-command --flag"]
    warnings = check_run(load_config("configs/quickstart.toml", overrides))
    assert "run.on_event: this machine has no command no-such-command" in warnings
