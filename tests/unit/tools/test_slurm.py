"""tools/launch/slurm.sh runs in bash, with stand-ins for the programs of Slurm and Ray."""

import json
import os
import re
import shlex
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from megadapo.cli import build_parser
from megadapo.config import load_config
from tests.support import REPOSITORY
from tests.support.processes.running import wait_until

LAUNCH = REPOSITORY / "tools" / "launch"
CLUSTERS = (REPOSITORY / "docs" / "clusters.md").read_text(encoding="utf-8")
ADDRESS = "10.0.0.1"

PROGRAMS = {
    # like a task of srun it becomes the command after its options
    "srun": """
        echo "srun $*" >>"$LOG"
        options=$*
        while [[ ${1:-} == --* ]]; do shift; done
        export NODE=$(sed 's/.*--nodelist=\\([^ ]*\\).*/\\1/' <<<"$options")
        exec "$@"
    """,
    "scontrol": """
        echo "scontrol $*" >>"$LOG"
        case "$1 $2" in
            "show hostnames") tr , '\\n' <<<"$3" ;;
            "show job")
                echo "   ReqNodeList=(null) ExcNodeList=${EXCLUDED:-(null)}"
                echo "   Command=$LAUNCH/slurm.sh recipe.toml"
                ;;
        esac
    """,
    "hostname": f'echo "{ADDRESS} fe80::1"',
    "ray": """
        echo "ray $* [$RAY_AUTH_MODE ${RAY_AUTH_TOKEN_PATH:-}]" >>"$LOG"
        case $1 in
            get-auth-token) echo token >"$HOME/.ray/auth_token" ;;
            start) echo $$ >>"$LOG.pids"; exec sleep 60 ;;
        esac
    """,
    "python3": """
        echo "python3 $* on $NODE" >>"$LOG"
    """,
    "megadapo": """
        if [ "$1" = doctor ]; then
            echo "megadapo $*" >>"$LOG"
            [[ ,${SICK:-}, != *,$NODE,* ]]
            exit
        fi
        trap 'sleep 0.2; echo "megadapo saved" >>"$LOG"; exit 75' TERM
        echo $$ >>"$LOG.pids"
        echo "megadapo$(printf ' <%s>' "$@") $RAY_ADDRESS" >>"$LOG"
        if [ -n "${SAVES:-}" ]; then mkdir -p "$RUN/checkpoints/$SAVES"; fi
        if [ -n "${STATUS:-}" ]; then echo "$STATUS" >"$RUN/status.json"; fi
        if [ -n "${DRIVER_CODE:-}" ]; then exit "$DRIVER_CODE"; fi
        while :; do sleep 0.05; done
    """,
}


@dataclass
class Job:
    """A Slurm job of three nodes on this machine."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "a run"

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start the job; without arguments, with a recipe and the run's folder."""
        arguments = arguments or ("recipe.toml", f"--run.folder={self.run}")
        programs = self.folder / "bin"
        programs.mkdir(exist_ok=True)
        for name, text in PROGRAMS.items():
            (programs / name).write_text(f"#!/bin/bash\n{text}\n")
            (programs / name).chmod(0o755)
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        environment = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "HOME": str(home),
            "LOG": str(self.folder / "log"),
            "SLURM_JOB_NODELIST": "node1,node2,node3",
            "SLURM_JOB_ID": "77",
            "SLURM_GPUS_ON_NODE": "8",
            "LAUNCH": str(LAUNCH),
            "RUN": str(self.run),
            **variables,
        }
        return subprocess.Popen(
            ["bash", str(LAUNCH / "slurm.sh"), *arguments],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, **variables: str) -> tuple[int, str]:
        """Run a job until it ends; return its exit code and its messages."""
        (self.folder / "log").unlink(missing_ok=True)
        process = self.start(**variables)
        _, messages = process.communicate(timeout=20)
        return process.returncode, messages

    @property
    def requests(self) -> list[str]:
        """Changes that the job asked Slurm for."""
        return [line for line in self.log if line.startswith(("scontrol requeue", "scontrol upd"))]

    @property
    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, beginning: str) -> None:
        wait_until(lambda: any(line.startswith(beginning) for line in self.log), timeout_s=20)


def documented(beginning: str) -> str:
    """Return a command of docs/clusters.md; tests/e2e/test_cluster.py runs it unchanged."""
    (command,) = re.findall(rf"^({beginning}.*)$", CLUSTERS, re.MULTILINE)
    return command.replace("HEAD", ADDRESS)


def test_job_starts_ray_as_documented_and_only_the_driver_gets_a_signal(tmp_path):
    """The run must be saved before Ray or the script ends: then Slurm takes the nodes."""
    job = Job(tmp_path)
    process = job.start()
    job.wait_for("megadapo <train>")
    job.wait_for(f"ray start --address={ADDRESS}")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=20) == 75, process.stderr.read()
    pids = (tmp_path / "log.pids").read_text().split()
    assert len(pids) == 3
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), timeout_s=5)

    log = job.log
    token = tmp_path / "home" / ".ray" / "auth_token"
    known = f"[token {token}]"
    assert "ray get-auth-token --generate [token ]" in log
    assert token.stat().st_mode & 0o777 == 0o600
    assert f"{documented('ray start --head')} --block {known}" in log
    assert f"{documented('ray start --address')} --block {known}" in log
    assert f"ray status --address={ADDRESS}:6379 {known}" in log
    train = f"megadapo <train> <recipe.toml> <--run.folder={job.run}> <--cluster.address=auto>"
    assert f"{train} {ADDRESS}:6379" in log
    assert log[-3:] == ["megadapo saved", "scontrol show job 77", "scontrol requeue 77"]
    steps = [line for line in log if line.startswith("srun ") and "doctor" not in line]
    by_nodes = [re.search(r"--nodelist=(\S+) --nodes=(\d)", line).groups() for line in steps]
    assert set(by_nodes) == {("node1", "1"), ("node2,node3", "2")}
    (workers,) = [line for line in steps if "--nodelist=node2,node3" in line]
    assert "ray start --address=" in workers


def test_job_has_the_drivers_exit_code_and_keeps_the_token(tmp_path):
    token = tmp_path / "home" / ".ray" / "auth_token"
    token.parent.mkdir(parents=True)
    token.write_text("mine")
    job = Job(tmp_path)
    process = job.start(
        DRIVER_CODE="3",
        SLURM_JOB_NODELIST="node1",
        MEGADAPO_IMAGE="there/megadapo.sqsh",
        MEGADAPO_MOUNTS="/shared:/shared",
        MEGADAPO_HEAD="192.168.0.1",
        MEGADAPO_PORT="7000",
    )
    assert process.wait(timeout=20) == 3, process.stderr.read()
    assert token.read_text() == "mine"
    steps = [line for line in job.log if line.startswith("srun ")]
    mounts = f"--container-mounts={token.parent}:{token.parent},/shared:/shared"
    assert all(f"--container-image=there/megadapo.sqsh {mounts}" in line for line in steps)
    assert "--head --node-ip-address=192.168.0.1 --port=7000" in "\n".join(steps)
    assert not any("ray start --address" in line or "requeue" in line for line in job.log)


def test_job_without_a_run_folder_starts_nothing(tmp_path):
    job = Job(tmp_path)
    process = job.start("recipe.toml", "--model.path=/model")
    assert process.wait(timeout=20) == 2
    assert "name a recipe" in process.stderr.read() and job.log == []


def test_nodes_are_checked_before_ray_starts(tmp_path):
    """A rank on a sick node would end each start; Slurm gives the same nodes again."""
    job = Job(tmp_path)
    code, messages = job.end(SICK="node2,node3", EXCLUDED="node[8-9]")
    assert code == 5 and "fail megadapo doctor --node: node2 node3" in messages
    excluded = "scontrol update JobId=77 ExcNodeList=node2,node3,node[8-9]"
    assert job.requests == ["scontrol requeue 77", excluded]
    assert job.log.count("megadapo doctor --node 8") == 3
    assert not any(line.startswith(("ray", "megadapo <train>")) for line in job.log)
    job.end(SICK="node1")
    assert job.requests[-1] == "scontrol update JobId=77 ExcNodeList=node1"


def test_spare_nodes_replace_sick_ones(tmp_path):
    job = Job(tmp_path)
    code, _ = job.end(SICK="node1", MEGADAPO_SPARES="1", DRIVER_CODE="0")
    assert code == 0 and job.requests == []
    started = [line for line in job.log if line.startswith("srun ") and "ray start" in line]
    assert "--nodelist=node2 " in started[0] and "--head" in started[0]
    assert all("node1" not in line for line in started)


def test_check_that_fails_everywhere_excludes_no_node(tmp_path):
    """A broken image would exclude the whole cluster."""
    job = Job(tmp_path)
    code, messages = job.end(SICK="node1,node2,node3")
    assert code == 5 and "every node fails" in messages and job.requests == []


@pytest.mark.parametrize("code", ["1", "5", "137"])
def test_job_is_queued_again_a_bounded_number_of_times(tmp_path, code):
    """A driver that fails on every node would hold the nodes for ever."""
    job = Job(tmp_path)
    variables = {"DRIVER_CODE": code, "MEGADAPO_MAX_REQUEUES": "2"}
    for count in range(2):
        assert job.end(**variables, SLURM_RESTART_COUNT=str(count))[0] == int(code)
        assert job.requests == ["scontrol requeue 77"]
    assert "without a new checkpoint" in job.end(**variables, SLURM_RESTART_COUNT="2")[1]
    assert job.requests == []
    # a job that the user submits again starts over
    job.end(**variables)
    assert job.requests == ["scontrol requeue 77"]


def test_lost_nodes_count_as_well(tmp_path):
    """Slurm itself repeats a job that lost a node, and kills its script."""
    job = Job(tmp_path)
    for count in range(3):
        process = job.start(SLURM_RESTART_COUNT=str(count), MEGADAPO_MAX_REQUEUES="2")
        job.wait_for("megadapo <train>")
        process.send_signal(signal.SIGKILL)
        process.wait()
        for pid in (tmp_path / "log.pids").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        (tmp_path / "log").unlink()
    code, messages = job.end(SLURM_RESTART_COUNT="3", MEGADAPO_MAX_REQUEUES="2")
    assert code == 5 and "not started: queued again 2 times" in messages
    assert not any("doctor" in line for line in job.log)


def test_new_checkpoint_starts_the_count_again(tmp_path):
    job = Job(tmp_path)
    variables = {"DRIVER_CODE": "5", "MEGADAPO_MAX_REQUEUES": "1"}
    for count, saved in enumerate(["step-9", "step-10", "step-100"]):
        job.end(**variables, SLURM_RESTART_COUNT=str(count), SAVES=saved)
        assert job.requests == ["scontrol requeue 77"]
    job.end(**variables, SLURM_RESTART_COUNT="3")
    assert job.requests == ["scontrol requeue 77"]
    job.end(**variables, SLURM_RESTART_COUNT="4")
    assert job.requests == []


@pytest.mark.parametrize("code", ["0", "2", "3", "4", "6"])
def test_end_that_no_restart_can_fix_is_final(tmp_path, code):
    job = Job(tmp_path)
    assert job.end(DRIVER_CODE=code)[0] == int(code)
    assert job.requests == []


@pytest.mark.parametrize("stays", [True, False])
def test_stop_file_decides_whether_the_job_is_queued_again(tmp_path, stays):
    """After a notice of a machine's end the run must continue, after the user's request not."""
    job = Job(tmp_path)
    status = json.dumps({"state": "stopped", "stays_stopped": stays}, indent=2)
    assert job.end(DRIVER_CODE="75", STATUS=status)[0] == 75
    assert job.requests == ([] if stays else ["scontrol requeue 77"])


def test_job_that_its_user_stops_is_not_queued_again(tmp_path):
    job = Job(tmp_path)
    process = job.start()
    job.wait_for("megadapo <train>")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 75, process.stderr.read()
    assert "megadapo saved" in job.log and job.requests == []


def test_clouds_notices_are_awaited_on_every_node(tmp_path):
    job = Job(tmp_path)
    process = job.start(MEGADAPO_CLOUD="aws", MEGADAPO_IMAGE="there/megadapo.sqsh")
    job.wait_for("python3")
    job.wait_for("megadapo <train>")
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=20)
    (started,) = [line for line in job.log if line.startswith("python3")]
    program = LAUNCH / "stop_on_notice.py"
    assert started == f"python3 {program} {job.run} --cloud aws on node1,node2,node3"
    assert program.exists()


def test_slurm_leaves_the_driver_time_to_save_and_repeats_the_job():
    """Without "B:" every step would get the signal, also Ray's nodes."""
    options = re.findall(r"^#SBATCH (\S+)", (LAUNCH / "slurm.sh").read_text(), re.MULTILINE)
    assert {"--signal=B:USR1@600", "--ntasks-per-node=1"} <= set(options)
    assert {"--requeue", "--open-mode=append"} <= set(options)


def test_command_in_the_comments_is_a_command():
    (command,) = re.findall(
        r"^#   sbatch .*slurm.sh (.*)$",
        re.sub(r"\\\n#\s+", "", (LAUNCH / "slurm.sh").read_text()),
        re.MULTILINE,
    )
    words = ["train", *shlex.split(command), "--cluster.address=auto"]
    known, overrides = build_parser().parse_known_args(words)
    keys = [word.removeprefix("--") for word in overrides]
    config = load_config(str(REPOSITORY / known.config), keys)
    assert known.restarts > 0 and str(config.run.folder).startswith("/shared")
