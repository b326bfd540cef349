"""`megadapo top` shows a run from the files of its folder, with any text in them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from types import SimpleNamespace
from urllib.request import urlopen

import pytest

from megadapo.cli import main
from megadapo.cluster.watch.heartbeat import Heartbeat
from megadapo.commands import status as commands
from megadapo.errors import ConfigError, DataError
from megadapo.run.run import Run
from tests.support.runs.recorded_runs import record_run
from tests.support.runs.runs_alone import config_of


@pytest.fixture
def folder(tmp_path):
    """A run that works, in its third step."""
    folder = tmp_path / "run"
    with Run.open(config_of(folder)) as run:
        record_run(folder, num_steps=2)
        run.complete(2, {})
        with run.phase("train"):
            yield folder


@pytest.fixture
def frame(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def show():
        assert main(["top", str(folder), "--once"]) == 0
        return capsys.readouterr().out

    capsys.readouterr()
    return show


def beat(folder, rank, *, age_s=0.0, **values):
    path = folder / "logs" / f"trainer-rank-{rank}.heartbeat"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(vars(Heartbeat(**values))))
    then = time.time() - age_s
    os.utime(path, (then, then))


def test_frame_has_state_step_phase_speed_and_disk(frame):
    shown = frame()
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "running" in rows["state"] and "train for 0:00:0" in rows["phase"]
    assert "2 of 5, ended 0:00:0" in rows["step"] and "0:00:06 left" in rows["step"]
    assert "500 tokens/s" in rows["speed"] and "tokens/s each, busy 50%" in shown
    assert "GiB free" in rows["disk"] and "0; newest checkpoint: none" in rows["restarts"]
    assert "accuracy" in rows and "held-out" in rows


def test_slowest_rank_is_named(folder, frame):
    """The smallest and the largest time alone do not say where to look."""
    for rank, slowest_s in enumerate((1.0, 7.5, 2.0)):
        beat(folder, rank, doing="update", slowest_s=slowest_s)
    lines = [line for line in frame().splitlines() if line.startswith("ranks")]
    assert "slowest rank 0.5: 0.50 s for old log-probs" in lines[0]
    assert "now update on 3 of 3; slowest piece of work: 7.5 s on rank 1" in lines[1]
    assert len(lines) == 2


def test_silent_rank_is_shown_and_that_of_an_earlier_driver_is_not(folder, frame):
    then = time.time() - 100
    os.utime(folder / "config.json", (then, then))
    beat(folder, 0)
    beat(folder, 1, age_s=30)
    beat(folder, 2, age_s=1000)
    shown = frame()
    assert "rank 1 has sent no heartbeat for 30 s" in shown
    assert "rank 2" not in shown and "slowest piece" not in shown


def test_last_warnings_are_shown_without_routine(folder, frame):
    with (folder / "log.txt").open("a") as log:
        for number in range(9):
            log.write(f"2026-11-23T17:00:0{number}+00:00 warning: number {number}\n")
            log.write(f"2026-11-23T17:00:0{number}+00:00 step={number}/9 accuracy=0.5\n")
        log.write("2026-11-23T17:00:09+00:00 warning: half a li")
    lines = frame().splitlines()[-5:]
    assert [line.rpartition(" ")[2] for line in lines] == ["4", "5", "6", "7", "8"]


def test_terminal_gets_no_escape_sequences_and_no_markup(folder, frame):
    """A model writes answers that warnings quote; a stop file and a host name come from others."""
    evil = "\x1b]0;owned\x07\x1b[2J[red]not red[/red]"
    with (folder / "log.txt").open("ab") as log:
        log.write(f"2026-11-23T17:00:00+00:00 warning: {evil}\n".encode() + b"\xff\xfe\n")
    status = json.loads((folder / "status.json").read_text())
    changes = {"state": evil, "reason": evil, "phase": evil, "host": f"{evil}\nx"}
    (folder / "status.json").write_text(json.dumps(status | changes))
    shown = frame()
    assert "\x1b" not in shown and "\x07" not in shown
    assert shown.count("\\x1b]0;owned\\x07\\x1b[2J[red]not red[/red]") == 5


def test_run_without_a_step_has_a_frame(tmp_path, capsys):
    with Run.open(config_of(tmp_path)):
        assert main(["top", str(tmp_path)]) == 0
    assert "0 of 5; - left" in capsys.readouterr().out
    assert main(["top", str(tmp_path / "other")]) == DataError.exit_code
    assert "not a run's folder" in capsys.readouterr().err


def test_dead_driver_is_gone(tmp_path, capsys):
    """Its files still say that it runs, and what its ranks did last."""
    with Run.open(config_of(tmp_path)):
        status = (tmp_path / "status.json").read_text()
        beat(tmp_path, 0, doing="update")
        main(["top", str(tmp_path), "--once"])
        assert "now update on 1 of 1" in capsys.readouterr().out
    (tmp_path / "status.json").write_text(status)
    main(["top", str(tmp_path), "--once"])
    shown = capsys.readouterr().out
    assert "gone: the driver is dead" in shown and "update" not in shown


def test_current_speed_is_that_between_frames(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("megadapo.commands.status.time.monotonic", lambda: now[0])
    growths = deque(maxlen=4)

    def speed(tokens, phase="rollout"):
        now[0] += 10
        return commands.current_speed(SimpleNamespace(tokens=tokens, phase=phase), growths)

    assert [speed(0), speed(5000), speed(5000)] == ["", "; now 500", "; now 500"]
    # training generates nothing; another driver counts from 0; tokens that stop have no speed
    assert [speed(5000, "train"), speed(6000), speed(10)] == ["", "; now 100", ""]
    assert speed(1010) == "; now 100"
    now[0] += 60
    assert speed(1010) == ""


def test_web_page_prints_its_address_and_ends_with_ctrl_c(folder, capsys):
    words = ["top", str(folder), "--web", "--port"]
    # a test in the background of a shell ignores the signal
    program = ["env", "--default-signal=INT", sys.executable, "-m", "megadapo.cli", *words, "0"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as server:
        address, rest = server.stdout.readline().split(" shows ")
        with urlopen(f"{address}/data.json") as answer:
            run = json.load(answer)["data"]["runs"][0]
        assert rest == f"{folder}; Ctrl-C ends\n" and "2 of 5 steps \u00b7 running" in run["title"]
        port = address.rpartition(":")[2]
        assert main([*words, port]) == ConfigError.exit_code
        assert f"--port={port}: Address already in use" in capsys.readouterr().err
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0


def test_long_run_is_read_from_the_end_only(folder, frame, monkeypatch):
    """Ten thousand steps are 50 MB, every two seconds."""
    with (folder / "metrics.jsonl").open("r+") as file:
        steps = file.read()
        file.seek(0)
        file.write("not json\n" * 300 + steps)
    monkeypatch.setattr(commands, "TAIL_BYTES", len(steps) + 4)
    assert "2 of 5" in frame()
