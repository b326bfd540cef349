"""Forbids access to files with Landlock, which needs no privileges, also in containers.

It is a part of Linux since 5.13 (landlock(7)); this module needs the third version, of Linux 6.2,
because the first two do not limit the truncation of files.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable

MIN_VERSION = 3

# numbers of system calls, the same on x86-64 and 64-bit Arm
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
# linux/landlock.h: LANDLOCK_CREATE_RULESET_VERSION, LANDLOCK_RULE_PATH_BENEATH
_VERSION, _PATH_BENEATH = 1, 1
# LANDLOCK_ACCESS_FS_...: EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, ..., TRUNCATE, IOCTL_DEV
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_ALL_FILES, _ALL_FILES_OF_5 = (1 << 15) - 1, (1 << 16) - 1
# LANDLOCK_ACCESS_NET_BIND_TCP and CONNECT_TCP; LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET and SIGNAL
_ALL_NETWORK, _ALL_SCOPES = 3, 3

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def version() -> int:
    """Return the kernel's version of Landlock; 0 if it has none or does not allow it."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)))


def restrict(readable: Iterable[str], writable: Iterable[str] = ()) -> None:
    """Forbid this process and its children all files but some, permanently.

    Needs PR_SET_NO_NEW_PRIVS or privileges. Names, permissions and times of files can still be
    asked for. Where the kernel can, signals to other processes and TCP are forbidden too.

    Args:
        readable: files and folders that may be read and executed.
        writable: files that may be read and written.

    Raises:
        OSError: the kernel has no such version of Landlock, or does not allow it.
    """
    found = version()
    if found < MIN_VERSION:
        raise OSError(errno.ENOSYS, "Landlock needs Linux 6.2, with landlock in its lsm= list")
    attributes = ruleset(found)
    rules = _check(_libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0))
    try:
        for paths, access in (
            (readable, _EXECUTE | _READ_FILE | _READ_DIR),
            (writable, _READ_FILE | _WRITE_FILE),
        ):
            for path in paths:
                _allow(rules, path, access)
        _check(_libc.syscall(_RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)


def ruleset(kernel_version: int) -> bytes:
    """Return the `landlock_ruleset_attr` that handles all that a version can handle."""
    files = _ALL_FILES_OF_5 if kernel_version >= 5 else _ALL_FILES
    if kernel_version >= 6:
        return struct.pack("=QQQ", files, _ALL_NETWORK, _ALL_SCOPES)
    if kernel_version >= 4:
        return struct.pack("=QQ", files, _ALL_NETWORK)
    return struct.pack("=Q", files)


def _allow(rules: int, path: str, access: int) -> None:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            access &= ~_READ_DIR
        # struct landlock_path_beneath_attr is packed
        rule = struct.pack("=Qi", access, opened)
        _check(_libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0))
    finally:
        os.close(opened)


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock: {os.strerror(number)}")
    return result
