"""C row passes for the CPU, compiled at first use for the processor they run on.

Triton does the same for its launchers. Where no C compiler is found, or compilation fails, the
callers use their torch operations instead: slower, not different.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

SWITCH = "MEGADAPO_NATIVE"
"""Environment variable: "0" keeps the C passes out."""

_FLAGS = (
    *("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math"),
    # the same roundings with and without fused multiply-add
    *("-ffp-contract=off", "-fopenmp", "-fPIC", "-Wno-psabi"),
)
_TIMEOUT_S = 60

logger = logging.getLogger(__name__)


@functools.cache
def load_native(source: Path) -> ctypes.CDLL | None:
    """The library made from a C file; None where it cannot be had.

    Its OpenMP calls are left open at linking and find torch's own threads: a second pool would
    fight with that one for the cores.
    """
    compiler = find_compiler()
    if os.environ.get(SWITCH) == "0" or compiler is None:
        return None
    library = _cache_folder() / f"{source.stem}-{_fingerprint(source, compiler)}.so"
    try:
        if not library.exists():
            _compile(source, library, compiler)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.warning("%s was not compiled, torch does its work: %s", source.name, reason)
        return None


def find_compiler() -> list[str] | None:
    """The command of the C compiler: $CC, gcc or cc."""
    for command in (os.environ.get("CC", ""), "gcc", "cc"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    return None


def _compile(source: Path, library: Path, compiler: list[str]) -> None:
    """Processes that start together may all compile; each puts a complete file in place."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, linked = Path(folder) / "rows.o", Path(folder) / "rows.so"
        _run([*compiler, *_FLAGS, "-c", str(source), "-o", str(compiled)])
        _run([*compiler, "-shared", str(compiled), "-o", str(linked), "-lm"])
        linked.replace(library)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)


def _fingerprint(source: Path, compiler: list[str]) -> str:
    """Of everything that decides what the compiler makes: source, command and processor."""
    digest = hashlib.sha256(source.read_bytes())
    digest.update(" ".join([*compiler, *_FLAGS]).encode())
    processor = Path("/proc/cpuinfo")
    if processor.exists():
        text = processor.read_text()
        digest.update("".join(sorted({li for li in text.splitlines() if "flags" in li})).encode())
        digest.update("".join(sorted({li for li in text.splitlines() if "model" in li})).encode())
    return digest.hexdigest()[:16]


def _cache_folder() -> Path:
    """A folder that only this user can write; a new one for this process if that fails."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "megadapo" / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.geteuid() and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="megadapo-kernels-"))
