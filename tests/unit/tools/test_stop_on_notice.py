"""A notice becomes the stop file of a run; all other answers of a cloud's service do not."""

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megadapo.rollout.pool.request import read_request
from megadapo.run.run import Run
from megadapo.run.state.lease import Lease
from megadapo.run.state.stop import restarts_after, take_stop_file
from tests.support import REPOSITORY
from tests.support.processes.running import wait_until
from tests.support.runs.runs_alone import config_of

SCRIPT = REPOSITORY / "tools" / "launch" / "stop_on_notice.py"
ACTION = '{"action": "terminate", "time": "2026-11-23T14:00:00Z"}'


class Metadata(BaseHTTPRequestHandler):
    """Answers as the clouds do, from a table of the server."""

    def do_PUT(self):
        wanted = self.path == "/latest/api/token"
        wanted &= self.headers["X-aws-ec2-metadata-token-ttl-seconds"] == "60"
        self.answer("secret" if wanted else None)

    def do_GET(self):
        self.server.asked.append(self.path)
        may = self.headers["X-aws-ec2-metadata-token"] == "secret"
        may |= self.headers["Metadata-Flavor"] == "Google"
        self.answer(self.server.answers.get(self.path) if may else None)

    def answer(self, text):
        self.send_response(404 if text is None else 200)
        self.end_headers()
        self.wfile.write((text or "not found").encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        server.asked, server.answers = [], {}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


AWS = "/latest/meta-data/spot/instance-action"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
EVENT = "/computeMetadata/v1/instance/maintenance-event"


@pytest.mark.parametrize(
    ("cloud", "before", "path", "notice"),
    [
        ("aws", {}, AWS, ACTION),
        ("google", {PREEMPTED: "FALSE", EVENT: "NONE"}, PREEMPTED, "TRUE"),
        ("google", {EVENT: "MIGRATE_ON_HOST_MAINTENANCE"}, EVENT, "TERMINATE_ON_HOST_MAINTENANCE"),
    ],
)
def test_notice_becomes_a_stop_file(server, tmp_path, cloud, before, path, notice):
    server.answers.update(before)
    address = f"http://127.0.0.1:{server.server_port}"
    options = ["--cloud", cloud, "--server", address, "--every", "0.05"]
    process = subprocess.Popen([sys.executable, "-S", SCRIPT, tmp_path, *options])
    wait_until(lambda: server.asked.count(path) > 3, timeout_s=20)
    assert process.poll() is None and list(tmp_path.iterdir()) == []
    server.answers[path] = notice
    assert process.wait(timeout=20) == 0
    text = take_stop_file(tmp_path)
    assert restarts_after(text) and (notice if notice != "TRUE" else "preempted") in text
    assert list(tmp_path.iterdir()) == []


def test_machine_without_the_service_has_no_notice(server, tmp_path):
    server.shutdown()
    server.server_close()
    address = f"http://127.0.0.1:{server.server_port}"
    command = [sys.executable, SCRIPT, tmp_path, "--cloud", "aws", "--server", address]
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([*command, "--every", "0.05"], timeout=1.5)
    assert list(tmp_path.iterdir()) == []


def test_file_is_a_notice(tmp_path):
    run, announced = tmp_path / "run", tmp_path / "node-ends"
    run.mkdir()
    options = [sys.executable, "-S", SCRIPT, run, "--every", "0.05"]
    process = subprocess.Popen([*options, "--file", announced])
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    announced.touch()
    assert process.wait(timeout=20) == 0
    assert f"{announced} exists" in take_stop_file(run)
    refused = subprocess.run(options, capture_output=True, text=True)
    assert refused.returncode == 2 and "name a source of notices" in refused.stderr


def test_signal_is_a_notice(server, tmp_path):
    address = f"http://127.0.0.1:{server.server_port}"
    options = ["--signal", "--cloud", "google", "--server", address, "--every", "0.05"]
    process = subprocess.Popen([sys.executable, "-S", SCRIPT, tmp_path, *options])
    # it asks only after it has blocked the signal, which would end it before
    wait_until(lambda: server.asked, timeout_s=20)
    process.terminate()
    assert process.wait(timeout=20) == 0
    assert "ends: SIGTERM" in take_stop_file(tmp_path)


@pytest.mark.parametrize("next_driver", [False, True])
def test_hook_waits_until_the_driver_has_saved(tmp_path, next_driver):
    """A pod that ends before takes a trainer rank with it, in the middle of the save."""
    lease = Lease.take(tmp_path, heartbeat_s=0.1)
    command = [sys.executable, "-S", SCRIPT, tmp_path, "--now", "the pod ends", "--wait", "60"]
    process = subprocess.Popen(command)
    wait_until((tmp_path / "stop").exists, timeout_s=20)
    assert restarts_after(take_stop_file(tmp_path))
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1.5)
    lease.close()
    if next_driver:
        lease = Lease.take(tmp_path)
    assert process.wait(timeout=10) == 0
    lease.close()
    # without a driver there is nothing to stop or to wait for
    subprocess.run(command, check=True, timeout=10)
    assert not (tmp_path / "stop").exists()


def test_hook_does_not_wait_for_a_dead_driver(tmp_path):
    script = f"""
import importlib.util
from pathlib import Path
spec = importlib.util.spec_from_file_location("stop_on_notice", {str(SCRIPT)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.STALE_S = 1.0
module.wait_for_end(Path({str(tmp_path)!r}), "killed", limit_s=600.0)
"""
    (tmp_path / "lease.json").write_text("killed")
    subprocess.run([sys.executable, "-c", script], check=True, timeout=20)


@pytest.mark.parametrize("node", ["10.0.0.1", "10.0.0.2"])
def test_engines_leave_a_node_without_trainer_ranks(tmp_path, node):
    """A run that can do without the machine must not stop, and one that cannot must."""
    config = config_of(tmp_path, {"cluster.placement": "separate", "rollout.num_engines": 2})
    with Run.open(config) as run:
        engine = {"number": 1, "node": "10.0.0.2", "state": "serving"}
        run.log.status.report_engines(
            {"wanted": 2, "engines": [engine], "trainer_nodes": ["10.0.0.1"], "problem": None}
        )
        words = [sys.executable, SCRIPT, tmp_path, "--now", "spot", "--leave-node", node]
        subprocess.run(words, cwd=REPOSITORY, check=True, timeout=60)
        request = read_request(tmp_path)
        if node == "10.0.0.2":
            assert request is not None and request.leave_nodes == (node,)
            assert (request.num_engines, request.within_s) == (2, 60.0)
        else:
            assert request is None and "spot" in (take_stop_file(tmp_path) or "")
