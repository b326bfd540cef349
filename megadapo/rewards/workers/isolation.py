"""A process of its own world: no network, no home folder, no other processes, no privileges.

What Linux calls namespaces. Root of a machine uses them directly, other users through a user
namespace, where the system allows one. The file system is a small one in memory with Python and the
system's libraries in it, read only.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILES_BYTES = 64 << 20
"""Room for what is written to files."""
MAX_PROCESSES = 32
MAX_OPEN_FILES = 128

_NEW_MOUNTS, _NEW_IPC, _NEW_NAMES = 0x00020000, 0x08000000, 0x04000000
_NEW_USERS, _NEW_PROCESSES, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_NAMESPACES = _NEW_MOUNTS | _NEW_IPC | _NEW_NAMES | _NEW_PROCESSES | _NEW_NETWORK
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC = 1, 2, 4, 8
_REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 32, 4096, 16384, 1 << 18
_DETACH = 2
_SET_DEATH_SIGNAL, _SET_DUMPABLE, _DROP_BOUND, _NO_NEW_PRIVILEGES = 1, 4, 24, 38
_CAPABILITY_VERSION = 0x20080522
_INNER_USER = 1000
_FIRST_FREE_USER = 0x70000000
"""Users from here on have no name anywhere; one for each sandbox, so that its processes can be
counted."""

_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_MOUNT_POINTS = ("/mnt", "/media", "/srv", "/opt", "/tmp", "/var")

_libc = ctypes.CDLL(None, use_errno=True)


def enter() -> int:
    """Go on as the first process of a world of its own; the caller's process waits for its end.

    Returns:
        The user that `drop_privileges` is to be given.

    Raises:
        OSError: the system does not allow it.
    """
    user = _unshare(_NAMESPACES)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    # whoever kills the process that waits kills this one, and with it everything in this world
    _check(_libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))
    _check(_libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0))
    # the first process gets only the signals that it handles
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _enter_own_files()
    return user


def enter_alone() -> int:
    """Go on in a world of its own, as the same process: for one that is to start no others.

    It has no network and sees no files of others. Where it is no user of its own, as without root,
    it could still signal this user's processes.

    Returns:
        The user that `drop_privileges` is to be given.

    Raises:
        OSError: the system does not allow it.
    """
    user = _unshare(_NAMESPACES & ~_NEW_PROCESSES)
    _enter_own_files()
    return user


def drop_privileges(user: int, *, max_processes: int = MAX_PROCESSES) -> None:
    """Become a user without any rights, for good; what is started later has none either.

    `max_processes`: of this user, this one included; with 0 nothing more is started.
    """
    limits = (
        (resource.RLIMIT_NPROC, max_processes),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    )
    for limit, value in limits:
        resource.setrlimit(limit, (value, value))
    for capability in range(64):
        _libc.prctl(_DROP_BOUND, capability, 0, 0, 0)
    if user != _INNER_USER:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()))
    _check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))


def _unshare(namespaces: int) -> int:
    outer_user, outer_group = os.geteuid(), os.getegid()
    if outer_user == 0 and _libc.unshare(namespaces) == 0:
        return _FIRST_FREE_USER + os.getpid()
    _check(_libc.unshare(namespaces | _NEW_USERS))
    for file, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{_INNER_USER} {outer_user} 1"),
        ("gid_map", f"{_INNER_USER} {outer_group} 1"),
    ):
        Path("/proc/self", file).write_text(line)
    return _INNER_USER


def _enter_own_files() -> None:
    """Put a file system in memory into the place of all others."""
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    sources = list(_sources())
    root = next(
        point
        for point in _MOUNT_POINTS
        if os.path.isdir(point) and not any(source.startswith(f"{point}/") for source in sources)
    )
    _mount("sandbox", root, "tmpfs", _NO_SUID | _NO_DEVICES, f"size={MAX_FILES_BYTES},mode=755")
    for source in sources:
        _show(source, root + source)
    # Python itself may lie in there
    os.makedirs(f"{root}/tmp", exist_ok=True)
    os.chmod(f"{root}/tmp", 0o1777)
    os.chdir(root)
    _check(_libc.pivot_root(b".", b"."))
    _check(_libc.umount2(b".", _DETACH))
    os.chdir("/tmp")


def _sources() -> Iterator[str]:
    """What is shown of the system's files: Python, its packages and what they are linked with."""
    shown: list[str] = []
    for path in (*_SYSTEM, *_DEVICES, sys.base_prefix, sys.prefix):
        path = os.path.abspath(path)
        if os.path.lexists(path) and not any(path.startswith(f"{one}/") for one in shown):
            shown.append(path)
            yield path


def _show(source: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        Path(target).touch()
    _mount(source, target, None, _BIND | _RECURSIVE)
    # flags that the source has may not be taken away
    kept = os.statvfs(target).f_flag & (_NO_SUID | _NO_DEVICES | _NO_EXEC)
    devices = 0 if source in _DEVICES else _NO_DEVICES
    flags = _BIND | _REMOUNT | _READ_ONLY | _NO_SUID | devices | kept
    _mount("none", target, None, flags)


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    kind_bytes = None if kind is None else kind.encode()
    done = _libc.mount(
        source.encode(), target.encode(), kind_bytes, ctypes.c_ulong(flags), data.encode() or None
    )
    _check(done, target)


def _check(result: int, what: str = "") -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)} {what}".strip())
