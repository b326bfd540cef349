"""Isolates a process with Linux namespaces: no network, home folder, other processes or privileges.

Root uses namespaces directly, other users through a user namespace, if the system allows one. The
file system is a small one in memory, with Python and the system's libraries mounted read-only.
Where a container forbids namespaces, Landlock limits the files and seccomp the rest.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from megadapo.rewards.workers import landlock, seccomp
from megadapo.rewards.workers.worker import PR_SET_PDEATHSIG, CannotStart

MAX_PROCESSES = 32
MAX_OPEN_FILES = 128

# constants of unshare(2), mount(2), umount2(2), keyctl(2), prctl(2) and capset(2)
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
KEYCTL_JOIN_SESSION_KEYRING = 1
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 24, 38
_LINUX_CAPABILITY_VERSION_3 = 0x20080522

_NAMESPACES = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID | CLONE_NEWNET
_INNER_USER = 1000
_FIRST_FREE_USER = 0x70000000
"""First of the user ids that no system assigns. Each sandbox has its own, so that its processes can
be counted."""

_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_MOUNT_POINTS = ("/mnt", "/media", "/srv", "/opt", "/tmp", "/var")

_libc = ctypes.CDLL(None, use_errno=True)


def refusal() -> str:
    """Return why the system does not allow the namespaces; empty if it does.

    A child process tries, because a refusal can come after some namespaces are entered.
    """
    child = os.fork()
    if child == 0:
        number = errno.EPERM
        try:
            _unshare(_NAMESPACES)
            _mount("none", "/", None, MS_REC | MS_PRIVATE)
            number = 0
        except OSError as error:
            number = error.errno or number
        finally:
            os._exit(number)
    _, status = os.waitpid(child, 0)
    number = os.waitstatus_to_exitcode(status)
    return f"user {os.geteuid()}: {os.strerror(number)}" if number else ""


def enter(isolation: str, *, alone: bool = False) -> int | None:
    """Enter new namespaces, in which this process has no network, and no files but read-only ones.

    Args:
        isolation: "require", or "auto", with which Landlock can replace the namespaces.
        alone: stay the same process, which then starts no others. Otherwise, continue as the first
            process of the namespaces, for whose end the caller's process waits.

    Returns:
        The user id for `drop_privileges`; None without namespaces.

    Raises:
        CannotStart: the system allows no isolation, or not the one that is required.
    """
    refused = refusal()
    if refused and isolation == "require":
        raise CannotStart(f'isolation = "require", and the system allows no namespaces ({refused})')
    if refused and landlock.version() < landlock.MIN_VERSION:
        raise CannotStart(
            f"this system does not isolate processes ({refused}; Landlock needs Linux 6.2): allow "
            "user namespaces, or use another machine"
        )
    if refused:
        return None
    user = _unshare(_NAMESPACES & ~CLONE_NEWPID if alone else _NAMESPACES)
    if not alone:
        _become_first()
    _enter_own_files()
    return user


def _become_first() -> None:
    """Continue as the first process of a new PID namespace."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    # killing the waiting process kills this one, and with it all processes of the namespace
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    _check(_libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
    # a signal to the process group must not reach the waiting process
    os.setsid()
    # the first process of a namespace gets only the signals that it handles
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def drop_privileges(user: int | None, *, max_processes: int = MAX_PROCESSES) -> None:
    """Become a user without privileges, permanently and for all children.

    Args:
        user: id from `enter`; None outside of namespaces. Then the process keeps its user id, and
            has no child processes, no signals to others and no files that it may write.
        max_processes: limit for this user, including this process; 0 allows no new process, and no
            signal to another one.
    """
    # Leave the session keyring of the run's user, which no namespace hides: file systems could use
    # its keys. A container may forbid this, and the user's quota may be used up; the seccomp filter
    # denies every other use of keys.
    _libc.syscall(seccomp.number("keyctl"), KEYCTL_JOIN_SESSION_KEYRING, None)
    limits = {resource.RLIMIT_NOFILE: MAX_OPEN_FILES, resource.RLIMIT_CORE: 0}
    # outside of namespaces all processes of the user count
    if user is not None or max_processes == 0:
        limits[resource.RLIMIT_NPROC] = max_processes
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    for capability in range(64):
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if user not in (None, _INNER_USER):
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    # only now, because a change of the user id clears it
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    header = (ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()))
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if user is None:
        landlock.restrict(_sources(), writable=["/dev/null"])
    seccomp.restrict(alone=user is None or max_processes == 0)


def _unshare(namespaces: int) -> int:
    outer_user, outer_group = os.geteuid(), os.getegid()
    if outer_user == 0 and _libc.unshare(namespaces) == 0:
        return _FIRST_FREE_USER + os.getpid()
    _check(_libc.unshare(namespaces | CLONE_NEWUSER))
    for file, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{_INNER_USER} {outer_user} 1"),
        ("gid_map", f"{_INNER_USER} {outer_group} 1"),
    ):
        Path("/proc/self", file).write_text(line)
    return _INNER_USER


def _enter_own_files() -> None:
    """Replace all file systems with one in memory, which is read-only."""
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    sources = list(_sources())
    root = next(
        point
        for point in _MOUNT_POINTS
        if os.path.isdir(point) and not any(source.startswith(f"{point}/") for source in sources)
    )
    _mount("sandbox", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    for source in sources:
        _show(source, root + source)
    # may exist already, if Python is installed below it
    os.makedirs(f"{root}/tmp", exist_ok=True)
    os.chdir(root)
    _check(_libc.pivot_root(b".", b"."))
    _check(_libc.umount2(b".", MNT_DETACH))
    _mount("none", "/", None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir("/tmp")


def _sources() -> Iterator[str]:
    """Yield the visible system files: Python, its packages and their shared libraries."""
    shown: list[str] = []
    python = (sys.base_prefix, sys.prefix)
    # an environment may be a link
    for path in (*_SYSTEM, *_DEVICES, *python, *map(os.path.realpath, python)):
        path = os.path.abspath(path)
        if os.path.lexists(path) and not any(f"{path}/".startswith(f"{one}/") for one in shown):
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
    _mount(source, target, None, MS_BIND | MS_REC)
    # the kernel refuses to remove flags that the source has
    kept = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
    devices = 0 if source in _DEVICES else MS_NODEV
    flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | devices | kept
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
