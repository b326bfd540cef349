"""Forbids system calls with a seccomp filter: the kernel's features that isolated code never needs.

The filter is classic BPF (seccomp(2)), for x86-64 and 64-bit Arm. It denies new namespaces, mounts,
keys, io_uring, tracing, sockets and memory that no limit counts. It holds for all children.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Any

_SYSTEM_CALLS = {
    # namespaces and mounts
    **{"unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39)},
    **{"pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428)},
    **{"move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431)},
    **{"fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442)},
    # keys of other processes
    **{"keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218)},
    # interfaces with a history of kernel bugs
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "bpf": (321, 280)},
    **{"io_uring_register": (427, 427), "userfaultfd": (323, 282), "perf_event_open": (298, 241)},
    # other processes
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)},
    **{"process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272)},
    **{"pidfd_getfd": (438, 438), "move_pages": (279, 239), "migrate_pages": (256, 238)},
    # memory that RLIMIT_AS does not count
    **{"shmget": (29, 194), "shmat": (30, 196), "shmdt": (67, 197), "shmctl": (31, 195)},
    **{"msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187)},
    **{"semget": (64, 190), "semop": (65, 193), "semtimedop": (220, 192), "semctl": (66, 191)},
    **{"mq_open": (240, 180), "mq_unlink": (241, 181)},
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447)},
    # the network, and services behind sockets in files
    **{"socket": (41, 198)},
    # the machine
    **{"kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105)},
    **{"finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142)},
    **{"swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "syslog": (103, 116)},
    **{"quotactl": (179, 60), "quotactl_fd": (443, 443), "personality": (135, 92)},
    **{"open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264)},
    **{"fanotify_init": (300, 262), "fanotify_mark": (301, 263)},
}
"""Denied calls, with their numbers on x86-64 and on 64-bit Arm; None: it lacks this call."""

_DENIED_ALONE = {
    # processes of the same user, and leaving the process group that ends with the worker
    **{"setpgid": (109, 154), "setsid": (112, 157)},
    **{"fork": (57, None), "vfork": (58, None), "tkill": (200, 130), "pidfd_open": (434, 434)},
    **{"rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240)},
    **{"pidfd_send_signal": (424, 424), "setpriority": (141, 140), "ioprio_set": (251, 30)},
    # files of the same user: Landlock does not limit these calls
    **{"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None)},
    **{"lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "setxattr": (188, 5)},
    **{"lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14)},
    **{"lremovexattr": (198, 15), "fremovexattr": (199, 16), "utime": (132, None)},
    **{"utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88)},
    **{"inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27)},
}
"""Calls that `alone` denies as well."""

_CHECKED = {
    **{"clone": (56, 220), "clone3": (435, 435), "socketpair": (53, 199), "kill": (62, 129)},
    **{"tgkill": (234, 131), "fcntl": (72, 25), "ioctl": (16, 29), "prctl": (157, 167)},
}
_SELF_ONLY = {
    **{"prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274)},
    **{"sched_setparam": (142, 118), "sched_setscheduler": (144, 119)},
}
"""Calls that `alone` allows with the pid 0 only, which is the process itself."""
_CAN_KILL_CALLER = {"setrlimit": (160, 164), "timer_create": (222, 107)}
"""Calls by which the kernel may kill the process itself, and that most programs may use."""
_FIRST_UNKNOWN = 452
"""Numbers from here on, those of x32 included, give ENOSYS, so that libraries use older calls."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Index in the tables, and AUDIT_ARCH_... of linux/audit.h."""

# linux/sched.h: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET; CLONE_THREAD
_CLONE_NEW, _CLONE_THREAD = 0x7E020000, 0x00010000
_ANY = 0xFFFFFFFF
_SOCKET_TYPE = 0xF
# prctl(2): PR_SET_PDEATHSIG, by which a process ends with the one that has started it
_SET_DEATH_SIGNAL = 1
# fcntl(2): F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE; ioctl(2): FIOSETOWN, SIOCSPGRP
_SIGNALLING_FCNTL, _SIGNALLING_IOCTL = (8, 10, 15, 1024), (0x8901, 0x8902)

# linux/bpf_common.h, linux/seccomp.h and prctl(2)
_LOAD, _AND, _JEQ, _JGE, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_RET_ALLOW, _RET_ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2

_Check = tuple[int, int, int, bool]
"""Index of an argument, its mask, a value, and whether the argument must equal it or differ."""

_libc = ctypes.CDLL(None, use_errno=True)


def restrict(*, alone: bool = False) -> None:
    """Forbid system calls for this process and its children, permanently.

    Needs PR_SET_NO_NEW_PRIVS or privileges.

    Args:
        alone: also forbid child processes, signals to other processes, and changes to permissions
            and times of files. Namespaces do this where they are allowed.
    """
    checks: dict[str, list[_Check]] = {
        "prctl": [(0, _ANY, _SET_DEATH_SIGNAL, False)],
        "clone": [(0, _CLONE_NEW, 0, True)],
        # connected pairs only: a datagram socket could send to any address
        "socketpair": [
            (0, _ANY, socket.AF_UNIX, True),
            (1, _SOCKET_TYPE, socket.SOCK_STREAM, True),
        ],
    }
    if alone:
        checks["clone"].append((0, _CLONE_THREAD, _CLONE_THREAD, True))
        checks["kill"] = checks["tgkill"] = [(0, _ANY, os.getpid(), True)]
        checks |= {name: [(0, _ANY, 0, True)] for name in _SELF_ONLY}
        checks["fcntl"] = [(1, _ANY, command, False) for command in _SIGNALLING_FCNTL]
        checks["ioctl"] = [(1, _ANY, command, False) for command in _SIGNALLING_IOCTL]
    install(program([*_SYSTEM_CALLS, *(_DENIED_ALONE if alone else ())], checks))


def program(denied: Iterable[str], checks: dict[str, list[_Check]] | None = None) -> bytes:
    """Return a filter that denies calls with EPERM, some of them only with certain arguments."""
    index, audit = _architecture()
    calls = _SYSTEM_CALLS | _DENIED_ALONE | _CHECKED | _SELF_ONLY | _CAN_KILL_CALLER
    numbers: dict[str, Any] = {name: both[index] for name, both in calls.items()}
    denial = _RET_ERRNO | errno.EPERM
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JEQ, 1, 0, audit),
        (_RETURN, 0, 0, denial),
        (_LOAD, 0, 0, _NUMBER),
        # an x32 call has bit 30 set
        (_JGE, 0, 1, _FIRST_UNKNOWN),
        (_RETURN, 0, 0, _RET_ERRNO | errno.ENOSYS),
        # its flags are in memory, where a filter cannot look
        (_JEQ, 0, 1, numbers["clone3"]),
        (_RETURN, 0, 0, _RET_ERRNO | errno.ENOSYS),
    ]
    for name in denied:
        if (denied_number := numbers[name]) is not None:
            lines += [(_JEQ, 0, 1, denied_number), (_RETURN, 0, 0, denial)]
    for name, required in (checks or {}).items():
        checked = [line for check in required for line in _checked(check, denial)]
        lines += [(_JEQ, 0, len(checked) + 1, numbers[name]), *checked]
        lines.append((_RETURN, 0, 0, _RET_ALLOW))
    lines.append((_RETURN, 0, 0, _RET_ALLOW))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def number(name: str) -> int:
    """Return the number of a denied call on this architecture."""
    found = _SYSTEM_CALLS[name][_architecture()[0]]
    assert found is not None, name
    return found


def install(filter_program: bytes) -> None:
    """Install a filter of `program` in this process.

    Raises:
        OSError: the kernel refuses it.
    """
    instructions = ctypes.create_string_buffer(filter_program, len(filter_program))
    # struct sock_fprog: a length and an aligned pointer
    pointer = struct.pack("HP", len(filter_program) // 8, ctypes.addressof(instructions))
    if _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, pointer, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def _architecture() -> tuple[int, int]:
    try:
        return _ARCHITECTURES[platform.machine()]
    except KeyError:
        raise OSError(errno.ENOSYS, f"no seccomp filter for {platform.machine()}") from None


def _checked(check: _Check, denial: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the lines that compare an argument; both architectures store its low half first."""
    index, mask, value, equal = check
    yield (_LOAD, 0, 0, _ARGUMENTS + 8 * index)
    yield (_AND, 0, 0, mask)
    yield (_JEQ, int(equal), int(not equal), value)
    yield (_RETURN, 0, 0, denial)
