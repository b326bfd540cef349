"""tools/launch/kuberay.yaml agrees with the image, the recipe and the command line."""

import re
import subprocess
from typing import Any

import pytest
import yaml

from megadapo.config import load_config
from tests.support import REPOSITORY

LAUNCH = REPOSITORY / "tools" / "launch"
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")


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
