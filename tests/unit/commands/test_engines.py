"""`megadapo engines` writes what a run should have, and refuses what it cannot have."""

import json

import pytest

from megadapo.cli import main
from megadapo.rollout.pool.request import REQUEST_FILE, EngineRequest, read_request, write_request
from megadapo.run.run import Run
from tests.support.runs.runs_alone import config_of

SEPARATE = {"cluster.placement": "separate", "rollout.num_engines": 2}


def engine(number: int, node: str, **changes) -> dict:
    default = {"number": number, "node": node, "state": "serving", "load": 16, "tokens": 5000}
    return {**default, "tokens_per_s": 123.4, **changes}


REPORT = {
    "wanted": 2,
    "problem": None,
    "waiting_for_slots": 0,
    "trainer_nodes": ["10.0.0.1"],
    "engines": [engine(0, "10.0.0.1"), engine(1, "10.0.0.2", tokens_per_s=None)],
}


@pytest.fixture
def running(tmp_path):
    """A run that works."""
    with Run.open(config_of(tmp_path, SEPARATE)) as run:
        run.log.status.report_engines(REPORT)
        yield tmp_path


def wanted(folder) -> EngineRequest:
    found = read_request(folder)
    assert found is not None
    return found


def test_requests_add_up(running):
    """Each command changes the number that is wanted, not the engines that there are."""
    assert main(["engines", str(running), "--add", "2"]) == 0
    assert wanted(running).num_engines == 4
    main(["engines", str(running), "--remove", "1", "--within", "90s"])
    assert (wanted(running).num_engines, wanted(running).within_s) == (3, 90.0)
    main(["engines", str(running), "--remove-engine", "1"])
    assert wanted(running).within_s == 600.0, "the time of an earlier command was kept"
    main(["engines", str(running), "--remove-engine", "1"])
    assert (wanted(running).num_engines, wanted(running).leave) == (2, (1,))
    main(["engines", str(running), "--leave-node", "10.0.0.2"])
    assert wanted(running).num_engines == 2
    assert wanted(running).leave_nodes == ("10.0.0.2",)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--remove", "2"], "the last one cannot be removed"),
        (["--remove-engine", "7"], "no engine 7, only [0, 1]"),
        (["--leave-node", "10.0.0.1"], "trainer ranks are on node 10.0.0.1"),
        (["--leave-node", "10.0.0.9"], "no engine is on node 10.0.0.9"),
        (["--add", "5000"], "at most 4096 engines"),
        (["--within", "5s"], "--within is for"),
    ],
)
def test_impossible_request_is_refused(running, capsys, words, message):
    assert main(["engines", str(running), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (running / REQUEST_FILE).exists()


def test_list_shows_engines_and_why_a_request_is_not_followed(running, capsys):
    assert main(["engines", str(running)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split() == ["0", "10.0.0.1", "serving", "16", "5000", "123.4"]
    assert shown[2].split() == ["1", "10.0.0.2", "serving", "16", "5000", "-"]
    assert shown[3] == "engines wanted: 2; waiting for free slots: 0"
    main(["engines", str(running), "--json"])
    assert json.loads(capsys.readouterr().out)["report"] == REPORT


def test_stopped_run_gets_engines_when_it_resumes(tmp_path, capsys):
    """Names of engines mean nothing to the next driver."""
    with Run.open(config_of(tmp_path, SEPARATE)):
        pass
    assert main(["engines", str(tmp_path), "--remove", "1"]) == 0
    assert (
        "engines wanted: 1, before: 2; the run follows when it resumes" in capsys.readouterr().out
    )
    assert main(["engines", str(tmp_path), "--remove-engine", "0"]) == 2
    assert "only a run that is running" in capsys.readouterr().err


def test_run_on_fewer_engines_counts_from_these(tmp_path):
    """With --allow-fewer a run wants fewer engines than its recipe, and one more was two more."""
    with Run.open(config_of(tmp_path, SEPARATE | {"rollout.num_engines": 4})) as run:
        run.log.status.report_engines(REPORT)
        assert main(["engines", str(tmp_path), "--add", "1"]) == 0
    assert wanted(tmp_path).num_engines == 3


def test_names_of_an_earlier_driver_are_dropped(running):
    write_request(running, EngineRequest(num_engines=3, driver="before", leave=(1,)))
    main(["engines", str(running), "--add", "1"])
    assert (wanted(running).num_engines, wanted(running).leave) == (4, ())


def test_engines_on_the_trainers_slots_cannot_change(tmp_path, capsys):
    with Run.open(config_of(tmp_path)):
        assert main(["engines", str(tmp_path), "--add", "1"]) == 2
    assert 'cluster.placement = "colocated"' in capsys.readouterr().err


def test_damaged_request_is_named(running, capsys):
    (running / REQUEST_FILE).write_text("{")
    assert main(["engines", str(running), "--add", "1"]) != 0
    message = capsys.readouterr().err
    assert "engines.json" in message
    assert "remove it; megadapo engines --add or --remove then writes another one" in message
    (running / REQUEST_FILE).unlink()
    assert main(["engines", str(running), "--add", "1"]) == 0
