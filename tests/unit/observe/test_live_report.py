"""The live report answers its own page alone, and reads a run again when it has changed."""

import json
from http.client import HTTPConnection
from pathlib import Path

import pytest

from megadapo.observe.rollouts.files import rollouts_path, write_rollouts
from tests.support.rollout.saved_groups import saved_group
from tests.support.runs.live_pages import live_page
from tests.support.runs.recorded_runs import record_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def ask(folder):
    """Return a function that returns the status and text of an answer."""
    with live_page(folder) as address:

        def asked(path="data.json", method="GET", **headers):
            connection = HTTPConnection(address.split("/")[2], timeout=30)
            connection.request(method, f"/{path}", headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

        yield asked


@pytest.mark.parametrize(
    ("status", "method", "path", "host"),
    [
        (200, "GET", "", "localhost"),
        (200, "GET", "data.json", "127.0.0.1:9"),
        (403, "GET", "data.json", "evil.example:3276"),
        (403, "GET", "data.json", "127.0.0.1.evil.example"),
        (403, "GET", "data.json", ""),
        (404, "GET", "../run/metrics.jsonl", "localhost"),
        (501, "POST", "", "localhost"),
        (501, "HEAD", "data.json", "localhost"),
    ],
)
def test_other_names_paths_and_methods_are_refused(ask, folder, status, method, path, host):
    """A site whose name stands for loopback could otherwise read the run (DNS rebinding)."""
    record_run(folder, num_steps=1)
    assert ask(path, method, Host=host)[0] == status


def test_data_follow_a_run_from_before_its_first_step(ask, folder):
    assert "connect-src 'self'; " in ask("")[1]
    first = json.loads(ask()[1])["data"]
    assert first["runs"][0]["title"] == "0 steps \u00b7 running"
    known = {"If-None-Match": first["live"]}
    assert ask(**known)[0] == 304
    record_run(folder, num_steps=2)
    status, text = ask(**known)
    series = json.loads(text)["data"]["runs"][0]["series"]
    assert (status, series["accuracy/mean"]["steps"]) == (200, [1, 2])


def test_groups_of_new_files_are_added_and_those_of_repeated_steps_read_again(ask, folder):
    """Catches groups that are added twice, or that a resumed run has set aside."""

    def shown(step, *indices):
        groups = [saved_group(step=step, prompt_index=index) for index in indices]
        write_rollouts(rollouts_path(folder, step), groups)
        groups = json.loads(ask()[1])["data"]["groups"]
        return [(one["step"], one["prompt_index"]) for one in groups]

    assert shown(1, 1, 2) == [(1, 1), (1, 2)]
    assert shown(2, 3) == [(1, 1), (1, 2), (2, 3)]
    rollouts_path(folder, 3).write_bytes(b"damaged")
    status, text = ask()
    assert status == 503 and "step-3" in text
    rollouts_path(folder, 3).unlink()
    assert shown(2, 4) == [(1, 1), (1, 2), (2, 4)]
    assert shown(3, 5) == [(1, 1), (1, 2), (2, 4), (3, 5)]
