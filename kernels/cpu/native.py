"""C code for the CPU, compiled at first use for the processor it runs on.

Triton does the same for its launchers. Where no C compiler is found, or compilation fails, the
callers use their torch operations instead: slower, and with last bits of their own.
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
"""Environment variable: "0" keeps the C code out."""

_FLAGS = (
    *("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math"),
    # z * scale - maximum is 0 at the maximum; the exponential asks for its fusing itself
    *("-ffp-contract=off", "-fopenmp", "-fPIC", "-Wno-psabi"),
)
_TIMEOUT_S = 60
_PROCESSOR = ("flags", "Features", "model", "stepping", "cpu family", "CPU ")
"""Lines of /proc/cpuinfo that say what -march=native may use, on x86 and ARM."""
_WRITABLE_BY_OTHERS = 0o022

logger = logging.getLogger(__name__)


@functools.cache
def load_native(source: Path) -> ctypes.CDLL | None:
    """The library made from a C file; None where it cannot be had.

    Its OpenMP calls are left open at linking and find torch's own threads: a second pool would
    fight with that one for the cores.
    """
    import torch  # noqa: F401, its libraries resolve those calls

    compiler = find_compiler()
    if os.environ.get(SWITCH) == "0" or compiler is None:
        return None
    try:
        return _load(source, compiler)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.warning("%s was not compiled, torch does its work: %s", source.name, reason)
        return None


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    """Where a tensor's numbers lie, as an argument of a C function; None is a null pointer."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def integers(*values: int) -> Iterator[ctypes.c_int64]:
    """Arguments of type int64_t."""
    return map(ctypes.c_int64, values)


def find_compiler() -> list[str] | None:
    """The command of the C compiler: $CC, gcc or cc."""
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
            library.unlink(missing_ok=True)  # damaged: made again below
    return ctypes.CDLL(str(_compile(source, library, compiler)))


def _compile(source: Path, library: Path, compiler: list[str]) -> Path:
    """Processes that start together may all compile; each puts a complete file in place."""
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
    """Of everything that decides what the compiler makes: source, compiler and processor."""
    texts = [source.read_text(), *(file.read_text() for file in sorted(source.parent.glob("*.h")))]
    parts = [*texts, *compiler, *_FLAGS, _run([*compiler, "--version"])]
    processor = Path("/proc/cpuinfo")
    if processor.exists():
        lines = set(processor.read_text().splitlines())
        parts += sorted(line for line in lines if line.startswith(_PROCESSOR))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cache_folder() -> Path | None:
    """A folder that only this user can write; None where there is none."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "megadapo" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    is_own = status.st_uid == os.geteuid() and not status.st_mode & _WRITABLE_BY_OTHERS
    return folder if is_own and os.access(folder, os.W_OK) else None
