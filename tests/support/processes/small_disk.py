"""A disk of one megabyte that a test may fill or make read-only, without privileges."""

import ctypes
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

_NEW_NAMESPACES = 0x10000000 | 0x00020000
"""CLONE_NEWUSER and CLONE_NEWNS."""
_NO_NAMESPACES = 77


def on_a_small_disk(folder: Path, check: Callable[[Path], None]) -> str:
    """Run `check` in a process that has a disk of its own in `folder`; returns what it printed."""
    output = folder / "output.txt"
    disk = folder / "disk"
    disk.mkdir()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            for number in (1, 2):
                os.dup2(descriptor, number)
            sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
            if not _enter_namespaces():
                os._exit(_NO_NAMESPACES)
            mount(disk)
            check(disk)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == _NO_NAMESPACES:
        pytest.skip("a disk of its own needs user namespaces, which this machine does not allow")
    assert code == 0, output.read_text()
    return output.read_text()


def mount(disk: Path, *, read_only: bool | None = None, size: str = "1m") -> None:
    """Put the disk there or, where `read_only` is given, change whether it may be written."""
    options = f"size={size}" if read_only is None else f"remount,{'ro' if read_only else 'rw'}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True)


def fill(disk: Path, *, leave: int = 0) -> Path:
    """Fill a disk up to some bytes; returns the file that has them."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)) == 4096:
                continue
        except OSError:
            file.truncate(max(0, file.tell() // 4096 * 4096 - leave))
    return path


def _enter_namespaces() -> bool:
    ids = {"uid_map": os.getuid(), "gid_map": os.getgid()}
    try:
        if ctypes.CDLL(None).unshare(_NEW_NAMESPACES) != 0:
            return False
        Path("/proc/self/setgroups").write_text("deny")
        for name, number in ids.items():
            Path("/proc/self", name).write_text(f"0 {number} 1")
    except OSError:
        return False
    return True
