"""The image's pins against facts about the build files of the pinned revisions."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
FACTS = json.loads((ROOT / "requirements" / "build_files.json").read_text())
OLDEST_ARCHITECTURE = {12: 50, 13: 75}
"""The oldest architecture that nvcc compiles for, by CUDA's major version (its release notes)."""


def pinned() -> set[str]:
    (commit,) = re.findall(r"APEX_COMMIT=(\w+)", DOCKERFILE)
    (engine,) = re.findall(r"transformer-engine\[.*?\]==([\d.]+)", DOCKERFILE)
    return {f"apex@{commit}", f"transformer-engine-torch=={engine}"}


def test_facts_are_about_pinned_revisions():
    assert set(FACTS) == pinned(), "run tools/build_files.py after changing a pin"
    assert all(len(name.partition("@")[2]) in (0, 40) for name in FACTS)


@pytest.mark.parametrize("name", sorted(FACTS))
def test_compiler_knows_every_architecture_that_build_files_name(name):
    """apex 25.09 names compute_70 itself, so CUDA 13's nvcc ends the image's build."""
    (cuda,) = re.findall(r"^FROM nvidia/cuda:(\d+)", DOCKERFILE, re.M)
    unknown = [
        one for one in FACTS[name]["architectures"] if int(one) < OLDEST_ARCHITECTURE[int(cuda)]
    ]
    assert not unknown


def test_image_sets_only_variables_that_build_files_read():
    """A renamed switch would build NCCL EP, or download a wheel, without notice."""
    read = {variable for facts in FACTS.values() for variable in facts["environment"]}
    used = set(re.findall(r"\b((?:NVTE|APEX)_\w+)=", DOCKERFILE)) - {"APEX_COMMIT"}
    assert used <= read
    assert {"NVTE_WITH_NCCL_EP", "NVTE_PYTORCH_FORCE_BUILD"} <= used


def test_image_has_the_baselines_that_are_goals():
    """Without a network the goals against verl and Liger would not be measured."""
    assert "-r requirements/bench.txt" in DOCKERFILE


def test_image_has_no_environment_or_history_of_its_builder():
    """A checkout's .venv would cover the image's packages, and its runs fill it."""
    left_out = set((ROOT / ".dockerignore").read_text().splitlines())
    assert {".git", ".venv", "runs", "**/*.so"} <= left_out
    assert not left_out & {"megadapo", "tools", "configs", "requirements", "tests", "kernels"}


def test_image_has_one_cudnn():
    """A second one, of the base image, would be loaded by Transformer Engine beside torch's."""
    assert "cudnn" not in re.findall(r"^FROM .*", DOCKERFILE, re.M)[0]
    assert "CUDNN_HOME=$NVIDIA_WHEELS/cudnn" in DOCKERFILE
