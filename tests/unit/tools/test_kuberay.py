"""tools/launch/kuberay.yaml agrees with KubeRay, the image, the recipe and the command line."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megadapo.cli import build_parser
from megadapo.config import load_config
from megadapo.run.state.lease import Lease
from megadapo.run.state.stop import restarts_after
from tests.support import REPOSITORY
from tests.support.processes.running import wait_until

LAUNCH = REPOSITORY / "tools" / "launch"
TEXT = (LAUNCH / "kuberay.yaml").read_text(encoding="utf-8")
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
IMAGE_FOLDER = "/opt/megadapo"
# fields of KubeRay 1.6 (ray-operator/apis/ray/v1), which drops a misspelled one in silence
JOB_FIELDS = {
    *("activeDeadlineSeconds", "backoffLimit", "entrypoint", "rayClusterSpec", "runtimeEnvYAML"),
    *("shutdownAfterJobFinishes", "submissionMode", "suspend", "ttlSecondsAfterFinished"),
}
CLUSTER_FIELDS = {"authOptions", "headGroupSpec", "rayVersion", "workerGroupSpecs"}
GROUP_FIELDS = {
    *("groupName", "maxReplicas", "minReplicas", "rayStartParams", "replicas", "template"),
}


@pytest.fixture
def manifest() -> dict[str, Any]:
    documents = yaml.safe_load_all(TEXT)
    return {document["kind"]: document for document in documents}


@pytest.fixture
def job(manifest) -> dict[str, Any]:
    return manifest["RayJob"]["spec"]


@pytest.fixture
def groups(job) -> list[dict[str, Any]]:
    """The groups of pods, the head's first."""
    cluster = job["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def environment(group: dict[str, Any]) -> dict[str, str]:
    (container,) = group["template"]["spec"]["containers"]
    return {one["name"]: one["value"] for one in container["env"]}


def in_image(path: str) -> Path:
    """Return the file of this repository that the image has at a path."""
    assert f"WORKDIR {IMAGE_FOLDER}\n" in DOCKERFILE and "COPY . ." in DOCKERFILE
    return REPOSITORY / Path(path).relative_to(IMAGE_FOLDER)


def test_fields_are_kuberays(job, groups):
    assert set(job) <= JOB_FIELDS and set(job["rayClusterSpec"]) == CLUSTER_FIELDS
    assert all(set(group) <= GROUP_FIELDS for group in groups)
    assert job["rayClusterSpec"]["authOptions"].keys() == {"mode", "secretName"}
    # with these, KubeRay asks Ray itself for its health, not wget
    assert tuple(map(int, job["rayClusterSpec"]["rayVersion"].split("."))) >= (2, 53)


def test_job_ends_with_its_cluster_and_survives_a_lost_head(job):
    assert job["shutdownAfterJobFinishes"] is True, "the GPUs would stay reserved"
    assert job["submissionMode"] == "SidecarMode" and 0 < job["backoffLimit"] <= 10


def test_jobs_command_line_is_a_supervised_training(job, groups):
    program, script, *words = shlex.split(job["entrypoint"])
    assert program == "bash" and in_image(script) == LAUNCH / "rayjob.sh"
    # what rayjob.sh adds
    folder = environment(groups[0])["MEGADAPO_RUN"]
    words += [f"--run.folder={folder}", "--cluster.address=auto"]
    known, overrides = build_parser().parse_known_args(["train", *words])
    assert known.restarts > 0 and known.give_up_after < 24 * 3600
    keys = [word.removeprefix("--") for word in overrides]
    config = load_config(str(in_image(known.config)), keys)
    workers = groups[1]
    gpus = int(
        workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    )
    assert (1 + workers["replicas"]) * gpus == config.trainer.num_ranks
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    # time to save is inside of the time that each of the others waits
    (hook,) = {hook_of(group)[-1] for group in groups}
    wait_s = float(hook.removeprefix("--wait="))
    stop_wait_s = float(environment(groups[0])["RAY_JOB_STOP_WAIT_TIME_S"])
    assert config.run.grace_s <= stop_wait_s <= wait_s
    for group in groups:
        assert wait_s < group["template"]["spec"]["terminationGracePeriodSeconds"]


def test_commands_in_the_comments_are_commands():
    commands = re.findall(r"^#   megadapo (.*)$", TEXT, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        _, overrides = build_parser().parse_known_args(shlex.split(command))
        assert overrides == []


def test_pods_share_a_token_a_folder_and_memory(manifest, job, groups):
    """A pod without the token cannot join, and Ray needs more than 64 MiB of /dev/shm."""
    auth = job["rayClusterSpec"]["authOptions"]
    assert auth["mode"] == "token"
    assert f"secret generic {auth['secretName']} --from-literal=auth_token=" in TEXT
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        volumes = {one["name"]: one for one in pod["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        claim = volumes[mounts["/shared"]]["persistentVolumeClaim"]["claimName"]
        assert claim == manifest["PersistentVolumeClaim"]["metadata"]["name"]
        assert environment(group)["MEGADAPO_RUN"].startswith("/shared/")
        assert container["resources"]["limits"] == container["resources"]["requests"]
    assert manifest["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]


def test_only_own_pods_and_the_operator_reach_the_pods(manifest, groups):
    """Trainer ranks unpickle what they receive, and ask for no token."""
    policy = manifest["NetworkPolicy"]["spec"]
    own = policy["podSelector"]["matchLabels"]
    for group in groups:
        assert own.items() <= group["template"]["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress"]
    pods, operator = policy["ingress"]
    assert pods == {"from": [{"podSelector": {"matchLabels": own}}]}
    (source,) = operator["from"]
    assert source["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "kuberay-operator"}
    assert operator["ports"] == [{"protocol": "TCP", "port": 8265}]


def hook_of(group: dict[str, Any]) -> list[str]:
    (container,) = group["template"]["spec"]["containers"]
    return container["lifecycle"]["preStop"]["exec"]["command"]


def test_pod_that_ends_lets_the_driver_save(groups, tmp_path):
    """Kubernetes signals only Ray in the pod, and a worker's pod has no driver to signal."""
    lease = Lease.take(tmp_path)
    hooks = []
    for group in groups:
        _, script, folder, *options = hook_of(group)
        assert folder == environment(group)["MEGADAPO_RUN"]
        hooks.append(subprocess.Popen([sys.executable, "-S", in_image(script), tmp_path, *options]))
        wait_until((tmp_path / "stop").exists, timeout_s=20)
        text = (tmp_path / "stop").read_text()
        assert restarts_after(text), "the supervisor must continue the run"
        (tmp_path / "stop").unlink()
    assert [hook.poll() for hook in hooks] == [None, None]
    lease.close()
    assert [hook.wait(timeout=20) for hook in hooks] == [0, 0]


def test_image_has_rays_dashboard():
    """KubeRay's probes and jobs need it; without it the pods are killed after ten minutes."""
    assert re.search(r"pip install .*ray\[default\]", (REPOSITORY / "Dockerfile").read_text())


def start_job(folder: Path, code: int) -> subprocess.CompletedProcess[str]:
    """Run the job's script with a stand-in for megadapo that ends with `code`."""
    program = folder / "bin" / "megadapo"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\necho "$*" >>{folder}/log\nexit {code}\n')
    program.chmod(0o755)
    variables = {"PATH": f"{program.parent}:{os.environ['PATH']}", "MEGADAPO_RUN": f"{folder}/run"}
    command = ["bash", LAUNCH / "rayjob.sh", "recipe.toml", "--restarts=3"]
    return subprocess.run(command, env=variables, capture_output=True, text=True)


@pytest.mark.parametrize("code", [2, 3, 4, 6])
def test_repetitions_of_a_job_that_no_restart_can_fix_end_at_once(code, tmp_path):
    """KubeRay repeats a job after any exit code, even a run that an oracle stopped."""
    assert start_job(tmp_path, code).returncode == code
    again = start_job(tmp_path, 0)
    assert again.returncode == code and f"delete {tmp_path}/run/rayjob-end" in again.stderr
    started = f"train recipe.toml --restarts=3 --run.folder={tmp_path}/run --cluster.address=auto\n"
    assert (tmp_path / "log").read_text() == started
    (tmp_path / "run" / "rayjob-end").unlink()
    assert start_job(tmp_path, 0).returncode == 0


@pytest.mark.parametrize(("code", "becomes"), [(0, 0), (1, 1), (5, 5), (137, 137), (75, 0)])
def test_job_is_repeated_after_failures_and_not_after_a_requested_stop(code, becomes, tmp_path):
    for _ in range(2):
        assert start_job(tmp_path, code).returncode == becomes
    assert (tmp_path / "log").read_text().count("train") == 2
