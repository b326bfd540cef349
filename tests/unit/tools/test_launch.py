"""tools/launch: the Slurm script runs in bash with stand-ins for Slurm's and Ray's programs."""

import re
import shlex
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from megadapo.cli import build_parser
from megadapo.config import load_config
from tests.support import REPOSITORY
from tests.support.processes.running import wait_until

LAUNCH = REPOSITORY / "tools" / "launch"
CLUSTERS = (REPOSITORY / "docs" / "clusters.md").read_text(encoding="utf-8")
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
ADDRESS = "10.0.0.1"

PROGRAMS = {
    # like a task of srun it becomes the command after its options
    "srun": """
        echo "srun $*" >>"$LOG"
        while [[ ${1:-} == --* ]]; do shift; done
        exec "$@"
    """,
    "scontrol": """
        echo "scontrol $*" >>"$LOG"
        if [ "$1" = show ]; then tr , '\\n' <<<"$3"; fi
    """,
    "hostname": f'echo "{ADDRESS} fe80::1"',
    "ray": """
        echo "ray $* [$RAY_AUTH_MODE ${RAY_AUTH_TOKEN_PATH:-}]" >>"$LOG"
        case $1 in
            get-auth-token) echo token >"$HOME/.ray/auth_token" ;;
            start) echo $$ >>"$LOG.pids"; exec sleep 60 ;;
        esac
    """,
    "megadapo": """
        trap 'sleep 0.2; echo "megadapo saved" >>"$LOG"; exit 75' TERM
        printf 'megadapo'  >>"$LOG"; printf ' <%s>' "$@" >>"$LOG"; echo " $RAY_ADDRESS" >>"$LOG"
        if [ -n "${DRIVER_CODE:-}" ]; then exit "$DRIVER_CODE"; fi
        while :; do sleep 0.05; done
    """,
}


@dataclass
class Job:
    """A Slurm job of three nodes on this machine."""

    folder: Path

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        programs = self.folder / "bin"
        programs.mkdir()
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
            **variables,
        }
        return subprocess.Popen(
            ["bash", str(LAUNCH / "slurm.sh"), *arguments],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )

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
    process = job.start("recipe.toml", "--run.folder=/shared/a b", MEGADAPO_REQUEUE="1")
    job.wait_for("megadapo <train>")
    job.wait_for(f"ray start --address={ADDRESS}")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 75, process.stderr.read()
    pids = (tmp_path / "log.pids").read_text().split()
    assert len(pids) == 2
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), timeout_s=5)

    log = job.log
    token = tmp_path / "home" / ".ray" / "auth_token"
    known = f"[token {token}]"
    assert "ray get-auth-token --generate [token ]" in log
    assert token.stat().st_mode & 0o777 == 0o600
    assert f"{documented('ray start --head')} --block {known}" in log
    assert f"{documented('ray start --address')} --block {known}" in log
    assert f"ray status --address={ADDRESS}:6379 {known}" in log
    train = "megadapo <train> <recipe.toml> <--run.folder=/shared/a b> <--cluster.address=auto>"
    assert f"{train} {ADDRESS}:6379" in log
    assert log[-2:] == ["megadapo saved", "scontrol requeue 77"]
    steps = [line for line in log if line.startswith("srun ")]
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
        "recipe.toml",
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


def test_job_without_a_recipe_starts_nothing(tmp_path):
    job = Job(tmp_path)
    process = job.start()
    assert process.wait(timeout=20) == 2
    assert "name a recipe" in process.stderr.read() and job.log == []


def test_slurm_leaves_the_driver_time_to_save():
    """Without "B:" every step would get the signal, also Ray's nodes."""
    options = re.findall(r"^#SBATCH (\S+)", (LAUNCH / "slurm.sh").read_text(), re.MULTILINE)
    assert "--signal=B:TERM@600" in options and "--ntasks-per-node=1" in options


@pytest.mark.parametrize("name", ["slurm.sh", "kuberay.yaml"])
def test_commands_in_the_comments_are_commands(name):
    text = re.sub(r"\\\n#\s+", "", (LAUNCH / name).read_text())
    lines = [line.removeprefix("# ").strip() for line in text.splitlines() if line.startswith("# ")]
    commands = [line for line in lines if line.startswith("megadapo ")]
    for line in lines:
        if line.startswith("sbatch "):
            arguments = line.partition("slurm.sh ")[2]
            commands.append(f"megadapo train {arguments} --cluster.address=auto")
    assert commands
    for command in commands:
        words = shlex.split(command)[1:]
        known, overrides = build_parser().parse_known_args(words)
        if known.takes_overrides:
            keys = [word.removeprefix("--") for word in overrides]
            config = load_config(str(REPOSITORY / known.config), keys)
            assert config.cluster.address == "auto" and str(config.run.folder).startswith("/shared")
        else:
            assert overrides == []


@pytest.fixture
def manifest() -> dict[str, Any]:
    documents = yaml.safe_load_all((LAUNCH / "kuberay.yaml").read_text())
    return {document["kind"]: document for document in documents}


def test_pods_share_a_token_a_folder_and_memory(manifest):
    """A pod without the token cannot join, and Ray needs more than 64 MiB of /dev/shm."""
    cluster = manifest["RayCluster"]["spec"]
    (workers,) = cluster["workerGroupSpecs"]
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        values = {one["name"]: one for one in container["env"]}
        assert values["RAY_AUTH_MODE"]["value"] == "token"
        secret = values["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
        text = (LAUNCH / "kuberay.yaml").read_text()
        assert f"secret generic {secret['name']} --from-literal={secret['key']}=" in text
        mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        volumes = {one["name"]: one for one in pod["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        claim = volumes[mounts["/shared"]]["persistentVolumeClaim"]["claimName"]
        assert claim == manifest["PersistentVolumeClaim"]["metadata"]["name"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
    assert manifest["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    config = load_config(str(REPOSITORY / "configs" / "qwen2.5-32b.toml"), [])
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert (1 + workers["replicas"]) * gpus == config.trainer.num_ranks
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]


def test_terminated_pod_lets_its_driver_save(manifest):
    """Kubernetes signals only the container's first process, Ray's, so a hook does the rest."""
    pod = manifest["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"]
    hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[:2] == ["bash", "-c"]
    subprocess.run(["bash", "-n", "-c", hook[2]], check=True)
    (pattern, same) = re.findall(r'-f "([^"]+)"', hook[2])
    assert pattern == same
    assert re.search(pattern, "/opt/venv/bin/python /opt/venv/bin/megadapo train a.toml")
    assert not re.search(pattern, " ".join(hook)), "the hook must not find itself"
    assert pod["terminationGracePeriodSeconds"] >= 600
    # the programs of the hook and of KubeRay's probes
    (installed,) = re.findall(r"--no-install-recommends(.*?)&&", DOCKERFILE, re.DOTALL)
    assert {"procps", "wget"} <= set(installed.split())
    assert "WORKDIR /opt/megadapo" in DOCKERFILE and "COPY . ." in DOCKERFILE
