"""Loader of C code for the CPU, compiled at first use for the processor it runs on.

Triton does the same for its launchers. Without a C compiler, or if compilation fails, the callers
use torch operations instead: slower, and with other last bits.
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
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SWITCH = "MEGADAPO_NATIVE"
"""Environment variable; "0" turns the C code off."""

_FLAGS = (
    *("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math"),
    # no implicit fusing, so that z * scale - maximum is exactly 0 at the maximum
    *("-ffp-contract=off", "-fopenmp", "-fPIC", "-Wno-psabi"),
)
_TIMEOUT_S = 60
_PROCESSOR = ("flags", "Features", "model", "stepping", "cpu family", "CPU ")
"""Prefixes of the /proc/cpuinfo lines that decide what -march=native uses, on x86 and ARM."""
_WRITABLE_BY_OTHERS = 0o022

logger = logging.getLogger(__name__)


@functools.cache
def load_native(source: Path) -> ctypes.CDLL | None:
    """Compile and load a C file; None if it is switched off or cannot be compiled.

    OpenMP calls stay unresolved at linking and bind to torch's thread pool: a second pool would
    compete with it for the cores.
    """
    import torch  # noqa: F401, its libraries resolve the OpenMP calls

    compiler = find_compiler()
    if os.environ.get(SWITCH) == "0" or compiler is None:
        return None
    try:
        return _load(source, compiler)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.warning("%s was not compiled, using torch instead: %s", source.name, reason)
        return None


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    """Return a tensor's data pointer as an argument of a C function; None: a null pointer."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def integers(*values: int) -> Iterator[ctypes.c_int64]:
    """Return arguments of type int64_t."""
    return map(ctypes.c_int64, values)


def find_compiler() -> list[str] | None:
    """Return the command of the C compiler: $CC, gcc or cc; None if not found."""
    for command in (os.environ.get("CC", ""), "gcc", "cc"):
        try:
            words = shlex.split(command)
        except ValueError:  # an open quotation
            continue
        if words and shutil.which(words[0]):
            return words
    return None


def _load(source: Path, compiler: list[str]) -> ctypes.CDLL:
    folder = _cache_folder()
    if folder is None:
        # a loaded library outlives its file
        with tempfile.TemporaryDirectory(prefix="megadapo-kernels-") as temporary:
            return ctypes.CDLL(str(_compile(source, Path(temporary) / "library.so", compiler)))
    library = folder / f"{source.stem}-{_fingerprint(source, compiler)}.so"
    if library.exists():
        try:
            return ctypes.CDLL(str(library))
        except OSError:
            library.unlink(missing_ok=True)  # damaged: compile it again
    return ctypes.CDLL(str(_compile(source, library, compiler)))


def _compile(source: Path, library: Path, compiler: list[str]) -> Path:
    """Compile into a temporary folder and move the file: processes may compile at the same time."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, linked = Path(folder) / "code.o", Path(folder) / "library.so"
        _run([*compiler, *_FLAGS, "-c", str(source), "-o", str(compiled)])
        _run([*compiler, "-shared", str(compiled), "-o", str(linked), "-lm"])
        linked.replace(library)
    return library


def _run(command: list[str]) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    return done.stdout


def _fingerprint(source: Path, compiler: list[str]) -> str:
    """Return a hash of everything that decides the result: source, compiler and processor."""
    texts = [source.read_text(), *(file.read_text() for file in sorted(source.parent.glob("*.h")))]
    parts = [*texts, *compiler, *_FLAGS, _run([*compiler, "--version"])]
    processor = Path("/proc/cpuinfo")
    if processor.exists():
        lines = set(processor.read_text().splitlines())
        parts += sorted(line for line in lines if line.startswith(_PROCESSOR))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cache_folder() -> Path | None:
    """Return a cache folder that only this user can write; None if impossible."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "megadapo" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    is_own = status.st_uid == os.geteuid() and not status.st_mode & _WRITABLE_BY_OTHERS
    return folder if is_own and os.access(folder, os.W_OK) else None
