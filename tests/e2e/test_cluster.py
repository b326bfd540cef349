"""The Ray cluster of a run: its ports, its slots, and the clusters that it refuses."""

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from megadapo.cluster.config import ClusterConfig
from megadapo.config import load_config
from megadapo.errors import ConfigError
from tests.support import REPOSITORY
from tests.support.processes.running import wait_until
from tests.support.runs.whole_runs import descendants, marked

CLUSTERS = REPOSITORY / "docs" / "clusters.md"


PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
import psutil, ray
from megadapo.cluster.cluster import Cluster
from megadapo.cluster.config import ClusterConfig
from megadapo.cluster.places import PlaceRequest, wait_for_places
from megadapo.errors import ConfigError, InfraError

ONE_EACH = {"num_trainer_ranks": 1, "num_engines": 1, "engine_ranks": 1}
NODE = {"include_dashboard": False, "object_store_memory": 1 << 28}
"""


def execute(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + script, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | environment,
    )


def answer_of(script: str, *arguments: str, **environment: str) -> Any:
    result = execute(script, *arguments, **environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


DRIVER = """
cluster = Cluster(
    ClusterConfig(device="cpu"), num_trainer_ranks=3, num_engines=2, engine_ranks=1
)

@ray.remote
class Actor:
    def pid(self):
        return os.getpid()

actors = [Actor.options(**cluster.trainer_options(rank)).remote() for rank in range(3)]
actors += [Actor.options(**cluster.engine_options(index)).remote() for index in range(2)]
pids = ray.get([actor.pid.remote() for actor in actors])
family = [psutil.Process(), *psutil.Process().children(recursive=True)]
listening = sorted(
    {c.laddr.ip for p in family for c in p.net_connections("inet") if c.status == "LISTEN"}
)
processes = [process.pid for process in family[1:]]
folder = cluster._local.folder
answer = {"actors": pids, "listening": listening, "processes": processes, "folder": str(folder)}
answer["sockets"] = [str(path) for path in folder.rglob("*") if path.is_socket()]
print(json.dumps(answer), flush=True)
time.sleep(600)
"""


@pytest.mark.fault
def test_ray_listens_on_loopback_only_and_ends_with_its_driver():
    """Catches Ray in another cluster, and a folder of sockets that others enter or that stays."""
    driver = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + DRIVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"RAY_ADDRESS": "127.0.0.1:1"},
    )
    try:
        answer = json.loads(driver.stdout.readline())
        processes = [psutil.Process(pid) for pid in answer["processes"]]
        assert {"gcs_server", "raylet"} <= {process.name() for process in processes}
        folder = Path(answer["folder"])
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {Path(path).name for path in answer["sockets"]} >= {"plasma_store", "raylet"}
    finally:
        driver.kill()
        driver.wait()
    assert len(set(answer["actors"])) == 5
    assert answer["listening"]
    assert all(ip.removeprefix("::ffff:") in ("127.0.0.1", "::1") for ip in answer["listening"])
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
    wait_until(lambda: not folder.exists(), timeout_s=20, message="Ray's folder is left")


LOCAL = """
from megadapo.cluster.ray_connection import accepts_without_token

for _ in range(int(sys.argv[1])):
    cluster = Cluster(ClusterConfig(device="cpu"), **ONE_EACH)
    admits = accepts_without_token()
    token = os.environ["RAY_AUTH_TOKEN"]
    logs = ray._private.worker._global_node.get_session_dir_path()
    in_logs = subprocess.run(["grep", "-rl", token, logs], capture_output=True, text=True).stdout
    seen = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout
    cluster.shutdown()
print(json.dumps([admits, in_logs, token in seen]))
"""


AFTER_ANOTHER = (
    """
Path.home().joinpath(".ray").mkdir()
Path.home().joinpath(".ray/auth_token").write_text("b" * 64)
ray.init(address="local", include_dashboard=False, log_to_driver=False)
ray.shutdown()
"""
    + LOCAL
)


@pytest.mark.slow
def test_ray_of_its_own_starts_after_another_of_the_same_process(tmp_path):
    """Ray keeps the first token that a process reads, here the one of its user's own clusters."""
    assert answer_of(AFTER_ANOTHER, "1", HOME=str(tmp_path)) == [False, "", False]
    assert (tmp_path / ".ray" / "auth_token").read_text() == "b" * 64


@pytest.mark.full
@pytest.mark.parametrize("mode", ["", "disabled", "token"])
def test_ray_of_its_own_takes_no_strangers(mode, tmp_path):
    """Loopback belongs to all users of the machine, and Ray runs the code of any process."""
    variables = {"HOME": str(tmp_path)} | ({"RAY_AUTH_MODE": mode} if mode else {})
    assert answer_of(LOCAL, "1", **variables) == [False, "", False]
    # Ray writes a token of its own with the permissions of any file
    assert not (tmp_path / ".ray" / "auth_token").exists()


GPUS = """
num_gpus, config, sizes = (json.loads(text) for text in sys.argv[1:])
ray.init(
    address="local", num_cpus=2 * num_gpus, num_gpus=num_gpus, include_dashboard=False,
    log_to_driver=False,
)
cluster = Cluster(ClusterConfig(**config), **sizes)

@ray.remote
class Actor:
    def gpu(self):
        return str(ray.get_gpu_ids()[0])

engines = range(sizes["num_engines"])
options = [cluster.trainer_options(rank) for rank in range(sizes["num_trainer_ranks"])]
options += [cluster.engine_options(index) for index in engines]
actors = [Actor.options(**entry).remote() for entry in options]
gpus = ray.get([actor.gpu.remote() for actor in actors])
print(json.dumps([gpus, [gpu for index in engines for gpu in cluster.engine_gpus(index)]]))
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [pytest.param("0,1,2,3", marks=pytest.mark.full), "GPU-1c,GPU-0a,GPU-77,GPU-9f"]
)
def test_trainer_and_engines_share_gpus_by_name(names):
    sizes = {"num_trainer_ranks": 4, "num_engines": 2, "engine_ranks": 2, "tensor_parallel": 2}
    words = ("4", '{"device": "cuda"}', json.dumps(sizes))
    gpus, engine_gpus = answer_of(GPUS, *words, CUDA_VISIBLE_DEVICES=names)
    assert gpus[:4] == engine_gpus == sorted(names.split(","))


@pytest.mark.full
def test_quickstart_fits_a_single_gpu():
    config = load_config(REPOSITORY / "configs" / "quickstart.toml", ["cluster.device=cuda"])
    sizes = {
        "num_trainer_ranks": config.trainer.num_ranks,
        "num_engines": config.num_engines,
        "engine_ranks": config.rollout.ranks_per_engine,
    }
    words = ("1", config.cluster.model_dump_json(), json.dumps(sizes))
    assert answer_of(GPUS, *words, CUDA_VISIBLE_DEVICES="0") == [["0", "0"], ["0"]]


ELASTIC = """
from ray.cluster_utils import Cluster as Nodes
from megadapo.cluster.nodes import NodeFolders

def wait_for(request, seconds):
    until = time.monotonic() + seconds
    while (place := request.poll()) is None and time.monotonic() < until:
        time.sleep(0.2)
    return place

folder = Path(sys.argv[1])
nodes = Nodes(initialize_head=True, head_node_args={**NODE, "num_cpus": 3, "num_gpus": 3})
config = ClusterConfig(
    device="cuda", placement="separate", address=nodes.address, allow_unauthenticated=True,
    check_nodes=False,
)
folders = NodeFolders(shared=folder, present={"model.path": folder})
sizes = {"num_trainer_ranks": 1, "num_engines": 2, "engine_ranks": 1}
cluster = Cluster(config, **sizes, folders=folders)
gpus = [cluster.engine_gpus(index)[0] for index in (0, 1)]
request = cluster.request_engine(1)
answers = {"full": wait_for(request, 2) is None}
cluster.release_engine(0)
place = wait_for(request, 60)
cluster.add_engine(5, place)
answers["reused"] = cluster.engine_gpus(5) == (gpus[0],)
late = cluster.request_engine(2)
answers["one GPU"] = wait_for(late, 2) is None
nodes.add_node(num_cpus=2, num_gpus=2, **NODE)
answers["two GPUs"] = len(wait_for(late, 60).gpus)
cluster._folders = NodeFolders(shared=folder, present={"model.path": folder / "missing"})
cluster.release_engine(1)
try:
    wait_for(cluster.request_engine(1), 60)
except InfraError as error:
    answers["error"] = str(error)
answers["free again"] = wait_for(cluster.request_engine(3), 2) is None
print(json.dumps(answers), flush=True)
cluster.shutdown()
nodes.shutdown()
"""


@pytest.mark.full
def test_engine_that_joins_waits_for_slots_and_for_a_node_that_has_the_model(tmp_path):
    """Slots of an engine that left are free again, and a node may join later."""
    answers = answer_of(ELASTIC, str(tmp_path), CUDA_VISIBLE_DEVICES="0,1,2")
    error = answers.pop("error")
    assert error.endswith("copy it to that path on every node") and "(model.path)" in error
    expected = {"full": True, "reused": True, "one GPU": True, "two GPUs": 2, "free again": True}
    assert answers == expected


def test_zero_timeout_is_refused():
    with pytest.raises(ConfigError, match="cluster.start_timeout_s"):
        ClusterConfig(start_timeout_s=0)


STOPS = """
from megadapo.cluster import ray_connection

ray_connection.LIMIT_S, ray_connection.LEAVE_S = 7.0, 3.0
cluster = Cluster(ClusterConfig(device="cpu"), **ONE_EACH)
(daemon,) = [
    one for one in psutil.Process().children(recursive=True)
    if one.cmdline() and one.cmdline()[0].endswith("/" + sys.argv[1])
]
daemon.send_signal(signal.Signals[sys.argv[2]])
while sys.argv[1] == "raylet":
    ray.put(bytes(1 << 20))
while sys.argv[2] == "SIGKILL":
    time.sleep(0.1)
    try:
        cluster.daemons.check()
    except InfraError as error:
        print(error, file=sys.stderr)
        break
cluster.keep_logs(Path(sys.argv[3]))
cluster.shutdown()
print("left")
"""


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize(
    ("daemon", "how", "exit_code", "says"),
    [
        pytest.param(
            *("raylet", "SIGSTOP", 5, "given up the node of this driver.* this process waits"),
            marks=pytest.mark.full,
        ),
        pytest.param("gcs_server", "SIGSTOP", 0, "", marks=pytest.mark.full),
        ("gcs_server", "SIGKILL", 0, r"Ray's control service \(gcs_server\) has ended"),
    ],
)
def test_driver_does_not_wait_for_lost_daemon(tmp_path, daemon, how, exit_code, says):
    """Requests to a stopped daemon wait inside Ray, where no signal is handled."""
    health = {"initial_delay_ms": 0, "period_ms": 500, "timeout_ms": 500, "failure_threshold": 3}
    variables = {f"RAY_health_check_{name}": str(value) for name, value in health.items()}
    logs = tmp_path / "logs"
    done = execute(STOPS, daemon, how, str(logs), RUN_UNDER_TEST=str(tmp_path), **variables)
    assert done.returncode == exit_code, done.stderr
    assert re.search(says, done.stderr)
    assert ("left" in done.stdout) == (exit_code == 0) == (logs / "gcs_server.out").exists()
    wait_until(lambda: not descendants(tmp_path), timeout_s=30, message="processes are left")


JOIN = """
Cluster(ClusterConfig(device="cpu", address="auto"), **ONE_EACH).shutdown()
"""


@pytest.mark.full
def test_documented_commands_start_a_cluster_with_token(tmp_path):
    (block, *_) = re.findall(r"```\n(.*?ray start --head.*?)```", CLUSTERS.read_text(), re.DOTALL)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    commands = block.replace("HEAD", "127.0.0.1").replace("6379", str(port))
    folder = Path(sys.executable).parent
    # marked, so that the test ends its own processes and no other cluster's
    environment = {**marked(tmp_path), "HOME": str(tmp_path)}
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "RAY_ADDRESS": f"127.0.0.1:{port}"}
    subprocess.run(["bash", "-ec", commands], env=environment, check=True, timeout=120)
    try:
        assert (tmp_path / ".ray" / "auth_token").stat().st_size
        assert execute(JOIN, **{**environment, "RAY_AUTH_MODE": "token"}).returncode == 0
        refused = execute(JOIN, **{**environment, "RAY_AUTH_MODE": "disabled"})
        assert refused.returncode != 0 and "InfraError: no Ray cluster at auto" in refused.stderr
    finally:
        for pid, _ in descendants(tmp_path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


MODES = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled"}
"""Variables of which the first makes Ray listen on loopback."""
TWO_NODES = """
from ray.cluster_utils import Cluster as Nodes
from megadapo.cli import run_command

path, *arguments = sys.argv[1:]
nodes = Nodes(initialize_head=True, head_node_args={**NODE, "num_cpus": 1})
nodes.add_node(**NODE, num_cpus=1, env_vars={"PATH": path})
config = ClusterConfig(device="cpu", address=nodes.address)
try:
    Cluster(config, **ONE_EACH)
except ConfigError as error:
    print(error, file=sys.stderr)
config = config.model_copy(update={"allow_unauthenticated": True})
Cluster(config, **ONE_EACH).shutdown()
code = run_command(["doctor", f"--cluster={nodes.address}", *arguments])
nodes.shutdown()
sys.exit(code)
"""


@pytest.mark.slow
def test_cluster_without_token_is_refused_and_doctor_asks_every_node(tmp_path):
    """The second node claims to have a GPU, which the first has not; the doctor must see that."""
    driver = tmp_path / "bin" / "nvidia-smi"
    driver.parent.mkdir()
    driver.write_text("#!/bin/sh\necho 570.1, NVIDIA H200, 143771, 9.0\n")
    driver.chmod(0o755)
    folder = tmp_path / "run"
    arguments = [f"{driver.parent}:{os.environ['PATH']}", "--json", f"--folder={folder}"]
    result = execute(TWO_NODES, *arguments, **MODES)
    diagnosis = json.loads(result.stdout)
    assert result.returncode == (1 if diagnosis["errors"] else 0), result.stderr
    assert "set cluster.allow_unauthenticated = true if the network is" in result.stderr
    assert any("start Ray with RAY_AUTH_MODE=token" in text for text in diagnosis["warnings"])
    nodes = diagnosis["facts"]["nodes"]
    assert [len(node["machine"]["gpus"]) for node in nodes] == [0, 1]
    assert all(node["sees_folder"] and node["clock"]["ahead_ns"] == 0 for node in nodes)
    assert not list(folder.iterdir()), "the check may leave no file"
    links = [(link["source"][0], link["target"][0]) for link in diagnosis["facts"]["links"]]
    assert sorted(links) == [("0", "1"), ("1", "0")]
    assert all(link["gb_per_s"] > 0 for link in diagnosis["facts"]["links"])
    assert any("different GPUs: 1 x NVIDIA H200; none" in text for text in diagnosis["warnings"])


SICK_NODE = """
from ray.cluster_utils import Cluster as Nodes
from ray.util.placement_group import placement_group_table
from megadapo.cluster.health import unhealthy_nodes

node = {**NODE, "num_cpus": 2, "num_gpus": 2}
nodes = Nodes(initialize_head=True, head_node_args=node)
sick, hung = (nodes.add_node(**node).node_id for _ in range(2))
ray.init(address=nodes.address, log_to_driver=False)

def check(num_gpus):
    import time
    me = ray.get_runtime_context().get_node_id()
    time.sleep(600 if me == hung else 0)
    return [f"one of its {num_gpus} GPUs is sick"] if me == sick else []

left_out = unhealthy_nodes(check, answer_s=10.0)
config = ClusterConfig(device="cuda", start_timeout_s=120)
(place,) = wait_for_places([PlaceRequest(config, 2, without=left_out)], config)
used = set(placement_group_table(place.group)["bundles_to_node_id"].values())
try:
    config = config.model_copy(update={"start_timeout_s": 3.0})
    wait_for_places([PlaceRequest(config, 1, without=left_out)], config)
except Exception as error:
    refusal = str(error)
all_fail = unhealthy_nodes(lambda num_gpus: ["an old driver"])
print(json.dumps([sorted(left_out) == sorted([sick, hung]), used == {nodes.head_node.node_id},
    refusal, all_fail]))
ray.shutdown()
nodes.shutdown()
"""


@pytest.mark.fault
@pytest.mark.slow
def test_start_leaves_out_nodes_whose_gpus_fail():
    """A rank on a node with a lost GPU would end every start of the run."""
    result = execute(SICK_NODE, **MODES)
    assert result.returncode == 0, result.stderr
    found, healthy_used, refusal, all_fail = json.loads(result.stdout.splitlines()[-1])
    assert found and healthy_used and all_fail == []
    assert "6 GPUs (2 nodes that fail the health check included)" in refusal
    assert "is left out: one of its 2 GPUs is sick" in result.stderr
    assert "is left out: it did not finish the check of its health within 10 s" in result.stderr
    assert "every node fails the health check, so none is left out" in result.stderr
