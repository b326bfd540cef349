"""Update requirements/build_files.json: facts about the build files that the Dockerfile runs.

The image is built where CUDA's compiler is, and the tests run where it is not. So this file has,
for the pinned revisions, the GPU architectures that the build files name themselves and the
environment variables that they read. A test compares them with the Dockerfile.

    python tools/build_files.py APEX TRANSFORMER_ENGINE_TORCH

APEX is a clone of NVIDIA's repository, TRANSFORMER_ENGINE_TORCH the unpacked source distribution.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD_FILES = ROOT / "requirements" / "build_files.json"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
APEX_SECTION = re.compile(r'^if has_flag\("--c(?:pp|uda)_ext".*?(?=^if |\Z)', re.M | re.S)
"""The extensions that APEX_CPP_EXT and APEX_CUDA_EXT select."""


def facts(text: str) -> dict[str, list[str]]:
    """Return the architectures that a build file names and the environment variables it reads."""
    read = r"""(?:environ(?:\.get)?|getenv)[(\[]\s*f?["']([A-Z]\w+)|^\s+"([A-Z_]+)": "--"""
    return {
        "architectures": sorted(set(re.findall(r"compute_(\d+)", text)), key=int),
        "environment": sorted({one or other for one, other in re.findall(read, text, re.M)}),
    }


def apex_facts(clone: Path) -> dict[str, list[str]]:
    """Return the facts about setup.py at the Dockerfile's commit, of its two extensions alone."""
    commit = re.findall(r"APEX_COMMIT=(\w+)", DOCKERFILE)[0]
    command = ["git", "-C", str(clone), "show", f"{commit}:setup.py"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    sections = APEX_SECTION.findall(text)
    if len(sections) < 2:
        raise SystemExit(f"error: {commit}:setup.py has no sections for the two extensions")
    return {
        "architectures": facts("".join(sections))["architectures"],
        "environment": facts(text)["environment"],
    }


def main() -> None:
    """Write the facts about the revisions that the Dockerfile pins."""
    apex, engine = (Path(name) for name in sys.argv[1:])
    (version,) = re.findall(r"transformer-engine\[.*?\]==([\d.]+)", DOCKERFILE)
    (line,) = re.findall(r"^Version: (.*)$", (engine / "PKG-INFO").read_text(), re.M)
    if line != version:
        raise SystemExit(f"error: {engine} is version {line}, the Dockerfile has {version}")
    files = [engine / "setup.py", *sorted((engine / "build_tools").glob("*.py"))]
    commit = re.findall(r"APEX_COMMIT=(\w+)", DOCKERFILE)[0]
    found = {
        f"apex@{commit}": apex_facts(apex),
        f"transformer-engine-torch=={version}": facts("\n".join(f.read_text() for f in files)),
    }
    BUILD_FILES.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
