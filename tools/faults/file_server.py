"""A file server that fails on demand: a folder seen through FUSE.

    python tools/faults/file_server.py SOURCE MOUNT CONTROL

shows SOURCE at MOUNT until it is unmounted. The file CONTROL names the present fault: an error such
as EIO or ENOSPC, "hang", or "once ESTALE" for one failure; an empty file is no fault. It needs
/dev/fuse, libfuse (Debian's package fuse3) and the Python package mfusepy.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mfusepy  # type: ignore[import-not-found, unused-ignore]

HANG = "hang"
ONCE = "once "
POLL_S = 0.1
_UTIME_NOW = (1 << 30) - 1
"""Nanoseconds of a time that stands for the present one, see utimensat(2)."""
_WRITING = {"create", "write", "mkdir", "symlink", "link", "rename"}
"""Operations that a full disk refuses."""
_ATTRIBUTES = ("atime", "ctime", "gid", "ino", "mode", "mtime", "nlink", "size", "uid", "blocks")
_SPACE = ("bavail", "bfree", "blocks", "bsize", "favail", "ffree", "files", "frsize", "namemax")


def _may_fail(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def served(files: FailingFiles, *arguments: Any) -> Any:
        files.fail(operation.__name__)
        return operation(files, *arguments)

    return served


class FailingFiles(mfusepy.Operations):  # type: ignore[misc, unused-ignore]
    """The files of a folder, with the fault that a control file names."""

    use_ns = True

    def __init__(self, source: Path, control: Path) -> None:
        self._source = str(source)
        self._control = control
        self._lock = threading.Lock()

    def fail(self, operation: str) -> None:
        """Raise the present fault, or wait for its end.

        Raises:
            OSError: the operation is to fail.
        """
        while (fault := self._fault(operation)) == HANG:
            time.sleep(POLL_S)
        if fault:
            raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)))

    def _fault(self, operation: str) -> str:
        with self._lock:
            fault = self._control.read_text().strip()
            if fault.startswith(ONCE):
                self._control.write_text("")
                fault = fault.removeprefix(ONCE)
        return "" if fault == "ENOSPC" and operation not in _WRITING else fault

    def _path(self, path: str) -> str:
        return self._source + path

    def init_with_config(self, conn_info: Any, config_3: Any) -> None:
        # the true numbers of files, by which links are compared
        config_3.use_ino = 1

    @_may_fail
    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._path(path)) if fh is None else os.fstat(fh)
        times = ("atime", "ctime", "mtime")
        return {
            f"st_{name}": getattr(found, f"st_{name}{'_ns' if name in times else ''}")
            for name in _ATTRIBUTES
        }

    @_may_fail
    def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, Any], int]]:
        # an entry without a number would be left out
        return [
            (name, self.getattr(f"{path}/{name}"), 0)
            for name in (".", "..", *os.listdir(self._path(path)))
        ]

    @_may_fail
    def readlink(self, path: str) -> str:
        return os.readlink(self._path(path))

    @_may_fail
    def open(self, path: str, flags: int) -> int:
        return os.open(self._path(path), flags)

    @_may_fail
    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._path(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    @_may_fail
    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    @_may_fail
    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    @_may_fail
    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._path(path) if fh is None else fh, length)
        return 0

    @_may_fail
    def flush(self, path: str, fh: int) -> int:
        return 0

    @_may_fail
    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    @_may_fail
    def rename(self, old: str, new: str) -> int:
        os.rename(self._path(old), self._path(new))
        return 0

    @_may_fail
    def link(self, target: str, source: str) -> int:
        os.link(self._path(source), self._path(target), follow_symlinks=False)
        return 0

    @_may_fail
    def symlink(self, target: str, source: str) -> int:
        os.symlink(source, self._path(target))
        return 0

    @_may_fail
    def unlink(self, path: str) -> int:
        os.unlink(self._path(path))
        return 0

    @_may_fail
    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._path(path), mode)
        return 0

    @_may_fail
    def rmdir(self, path: str) -> int:
        os.rmdir(self._path(path))
        return 0

    @_may_fail
    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._path(path), mode)
        return 0

    @_may_fail
    def chown(self, path: str, uid: int, gid: int) -> int:
        os.lchown(self._path(path), uid, gid)
        return 0

    @_may_fail
    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        if times is None or times[1] == _UTIME_NOW:
            times = (time.time_ns(),) * 2
        os.utime(self._path(path), ns=times, follow_symlinks=False)
        return 0

    @_may_fail
    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._path(path))
        return {f"f_{name}": getattr(found, f"f_{name}") for name in _SPACE}


if __name__ == "__main__":
    folder, mount, control_file = map(Path, sys.argv[1:])
    mfusepy.FUSE(
        FailingFiles(folder, control_file),
        str(mount),
        foreground=True,
        # nothing is answered from what was seen before
        attr_timeout=0,
        entry_timeout=0,
        default_permissions=True,
        allow_other=True,
    )
