"""Ways out of the sandbox: each must fail, for root and other users, with namespaces or without."""

import ctypes
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megadapo.rewards.workers import landlock, seccomp
from tests.support.processes.running import run_python

LAUNCHER = """
import ctypes, sys
from megadapo.rewards.workers import sandbox_worker, seccomp

ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # other users install filters with PR_SET_NO_NEW_PRIVS
seccomp.install(seccomp.program(sys.argv[1:]))
sandbox_worker.main()
"""
NOBODY = 65534

PRELUDE = r"""
import ctypes, errno, mmap, os, resource, signal, socket, struct, sys
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.shmat.restype = ctypes.c_void_p

def show(name, result):
    print(name, "done" if result != -1 else errno.errorcode[ctypes.get_errno()])

def attempt(name, function):
    try:
        function()
    except OSError as error:
        print(name, errno.errorcode.get(error.errno, error))
    else:
        print(name, "done")
"""
NAMESPACES = (
    PRELUDE
    + r"""
show("unshare user, net, mnt", libc.unshare(0x10000000 | 0x40000000 | 0x00020000))
show("unshare time", libc.unshare(0x80))
for flag in (0x02000000, 0x04000000, 0x08000000, 0x20000000):
    show(f"unshare {flag:x}", libc.unshare(flag))
    show(f"clone {flag:x}", libc.syscall(CLONE, flag | 17, 0, 0, 0, 0))
show("mount", libc.mount(b"x", b"/tmp", b"tmpfs", 0, None))
show("umount", libc.umount2(b"/tmp", 2))
show("chroot", libc.chroot(b"/tmp"))
attempt("netlink", lambda: socket.socket(16, socket.SOCK_RAW, 12))
attempt("inet", lambda: socket.create_connection(("127.0.0.1", PORT), 1))
attempt("unix", lambda: socket.socket(socket.AF_UNIX))
attempt("datagram pair", lambda: socket.socketpair(type=socket.SOCK_DGRAM))
"""
)
DENIED = (
    PRELUDE
    + r"""
for name, number in NUMBERS.items():
    show(name, libc.syscall(number, 0, 0, 0, 0, 0, 0))
show("x32 getpid", libc.syscall(0x40000000 + 39))
show("clone3", libc.syscall(435, 0, 0))
"""
)
KEYS = (
    PRELUDE
    + r"""
key = libc.syscall(KEYCTL, 10, -3, b"user", b"driver-secret", 0)
show("search", key)
buffer = ctypes.create_string_buffer(64)
show("read", libc.syscall(KEYCTL, 11, SECRET, buffer, 64))
show("add", libc.syscall(ADD_KEY, b"user", b"n", b"x", 1, -3))
segment = libc.shmget(0, 64 << 20, 0o1600)
show("System V memory", segment)
"""
)
FILES = (
    PRELUDE
    + r"""
for path in ("/etc/passwd", "/home", "/proc/self/environ", "/sys/kernel", FOLDER + "/secret"):
    attempt(f"read {path}", lambda: os.listdir(path) if os.path.isdir(path) else open(path).read())
for path in ("/usr/x", FOLDER + "/new", FOLDER + "/open"):
    attempt(f"write {path}", lambda: open(path, "w"))
attempt("truncate", lambda: os.truncate(FOLDER + "/open", 0))
attempt("chmod", lambda: os.chmod(FOLDER + "/open", 0o600))
attempt("remove", lambda: os.remove(FOLDER + "/open"))
attempt("rename", lambda: os.rename(FOLDER + "/open", FOLDER + "/other"))
attempt("link", lambda: os.link(FOLDER + "/open", FOLDER + "/other"))
attempt("folder", lambda: os.mkdir(FOLDER + "/other"))
attempt("times", lambda: os.utime(FOLDER + "/open"))
attempt("signal the parent", lambda: os.kill(DRIVER, 0))
attempt("limit the parent", lambda: resource.prlimit(DRIVER, resource.RLIMIT_CPU, (1, 1)))
attempt("renice the parent", lambda: os.setpriority(os.PRIO_PROCESS, DRIVER, 19))
attempt("become root", lambda: os.setuid(0) if os.getuid() else os.setuid(1))
"""
)
WORKS = r"""
import asyncio, ctypes, decimal, json, multiprocessing, os, sys, threading
done = []
thread = threading.Thread(target=done.append, args=(1,))
thread.start(); thread.join()
asyncio.run(asyncio.sleep(0))
ends = multiprocessing.Pipe()
ends[0].send(2)
done.append(ends[1].recv())
open("/dev/null", "w").write("x"); os.urandom(4)
import sqlite3, ssl, xml.dom.minidom  # shared libraries, read in the sandbox
print(done, input())
"""
UNCONFINED = """
import json, sys
from megadapo.rewards.workers import landlock, sandbox_worker, seccomp, symbolic_worker
from megadapo.rewards.workers.worker import CannotStart

seccomp.install(seccomp.program(["unshare"]))
if sys.argv[1] == "none":
    landlock.version = lambda: 0
try:
    sandbox_worker._prepare({"isolation": "auto", "run_output_bytes": 1 << 16})
    print("ready")
except CannotStart as error:
    print(error)
print(symbolic_worker.isolate())
print(symbolic_worker.compare("1/2", "0.5"))
try:
    print(open("/etc/passwd").read(4))
except OSError as error:
    print(error.strerror)
"""
IN_CONTAINER = """
from megadapo.errors import ConfigError
from megadapo.rewards.config import RewardConfig, RewardFunction
from megadapo.rewards.function_runners import start_runner
from megadapo.rewards.verifier import Verifier
from megadapo.rewards.workers import seccomp

seccomp.install(seccomp.program(["unshare"]))
for isolation in ("auto", "require"):
    try:
        with Verifier(RewardConfig(isolation=isolation)) as verifier:
            print(verifier.drain_warnings())
    except ConfigError as error:
        print(error)
    try:
        start_runner(RewardFunction(function="python_tests"), isolation=isolation).close()
        print("started")
    except ConfigError as error:
        print(error)
"""


class Setting:
    """A user, and whether the system allows it namespaces."""

    def __init__(self, *, as_root: bool, namespaces: bool) -> None:
        if as_root and os.geteuid() != 0:
            pytest.skip("needs root")
        if not namespaces and landlock.version() < landlock.MIN_VERSION:
            pytest.skip("the kernel has no Landlock")
        self.namespaces = namespaces
        self._python = sys.executable
        self._prefix: list[str] = []
        if not as_root and os.geteuid() == 0:
            self._prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
            self._python = _python_of(self._prefix)
        self._denied = [] if namespaces else ["unshare"]

    def run(self, code: str, text: str = "", seconds: float = 8.0) -> dict[str, str]:
        """Run a program in the sandbox; return its ending and output."""
        _, ((run,),) = self.start(code, text, seconds)
        return run

    def start(
        self, code: str, text: str = "", seconds: float = 8.0, isolation: str = "auto"
    ) -> tuple[dict[str, object], list[list[dict[str, str]]]]:
        """Return the worker's first message, and the runs of the program."""
        settings = {"memory_bytes": 1 << 29, "output_bytes": None, "idle": False}
        settings |= {"isolation": isolation, "run_output_bytes": 1 << 16}
        limits = {"seconds_per_run": seconds, "seconds": seconds, "stops_early": False}
        request = {"code": code, "tests": None, "names": [], "inputs": [text], **limits}
        command = [self._python, "-c", LAUNCHER, *self._denied]
        done = subprocess.run(
            [*self._prefix, *command],
            input=f"{json.dumps(settings)}\n{json.dumps({'number': 1, 'request': request})}\n",
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(Path(seccomp.__file__).parents[3])},
            timeout=60,
        )
        first, *replies = [json.loads(line) for line in done.stdout.splitlines()]
        return first, [reply["value"]["runs"] for reply in replies]

    def check_escapes(self, code: str, num_ways: int, **values: object) -> None:
        """Run attempts to escape; all must have been tried, and all must fail."""
        constants = "".join(f"{name} = {value!r}\n" for name, value in values.items())
        run = self.run(constants + code)
        lines = run["output"].splitlines()
        assert run["ending"] == "done" and len(lines) == num_ways, run
        assert [line for line in lines if line.endswith("done")] == []


def _python_of(prefix: list[str]) -> str:
    """Return a Python that another user may start."""
    check = "import sys; assert sys.version_info >= (3, 11)"
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            done = subprocess.run([*prefix, python, "-c", check], capture_output=True)
        except OSError:
            continue
        if done.returncode == 0:
            return python
    pytest.skip("no other user can start a Python")


@pytest.fixture(params=[True, False], ids=["root", "user"])
def as_root(request) -> bool:
    return request.param


@pytest.fixture(params=[True, False], ids=["namespaces", "landlock"])
def setting(request, as_root) -> Setting:
    return Setting(as_root=as_root, namespaces=request.param)


@pytest.mark.fault
def test_no_namespace_mount_or_socket(setting) -> None:
    """In a user namespace of its own a program is root, and can mount and reach netfilter."""
    clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    setting.check_escapes(NAMESPACES, 17, CLONE=clone, PORT=9)


@pytest.mark.fault
def test_denied_system_calls_fail(setting) -> None:
    index = {"x86_64": 0, "aarch64": 1}[platform.machine()]
    calls = seccomp._SYSTEM_CALLS | ({} if setting.namespaces else seccomp._DENIED_ALONE)
    numbers = {name: both[index] for name, both in calls.items() if both[index] is not None}
    setting.check_escapes(DENIED, len(numbers) + 2, NUMBERS=numbers)


@pytest.mark.fault
def test_keys_of_the_driver_are_unreachable(setting) -> None:
    """Session keyrings are inherited and belong to no namespace; they may hold Kerberos tickets."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    keyctl, add_key = seccomp.number("keyctl"), seccomp.number("add_key")
    if libc.syscall(keyctl, 1, None) < 0:  # KEYCTL_JOIN_SESSION_KEYRING
        pytest.skip("no keys in this container")
    secret = libc.syscall(add_key, b"user", b"driver-secret", b"s3cret", 6, -3)
    libc.syscall(keyctl, 5, secret, 0x3F3F3F3F)  # KEYCTL_SETPERM: everybody may read it
    assert secret > 0
    setting.check_escapes(KEYS, 4, KEYCTL=keyctl, ADD_KEY=add_key, SECRET=secret)


@pytest.mark.fault
def test_files_and_processes_of_the_user_are_out_of_reach(setting, tmp_path) -> None:
    for name in ("secret", "open"):
        (tmp_path / name).write_text("secret")
        (tmp_path / name).chmod(0o666)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder != Path("/tmp"):
            folder.chmod(0o777)
    setting.check_escapes(FILES, 19, FOLDER=str(tmp_path), DRIVER=os.getpid())
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["secret"] * 2


def test_ordinary_programs_work(setting) -> None:
    assert setting.run(WORKS, "7") == {"ending": "done", "output": "[1, 2] 7\n"}


@pytest.mark.fault
def test_without_namespaces_a_program_is_one_process(as_root) -> None:
    """Its children would outlive it, since only a PID namespace ends them all."""
    setting = Setting(as_root=as_root, namespaces=False)
    starts = "try:\n    {}\nexcept OSError as error: print(error.errno)\n"
    ways = ("os.fork()", "subprocess.run(['/bin/true'])", "os.setsid()")
    run = setting.run("import os, subprocess\n" + "".join(starts.format(how) for how in ways))
    assert run["output"] == "1\n" * 3
    run = setting.run("import signal, time\nsignal.alarm(0)\nwhile True: time.sleep(9)", "", 1.0)
    assert run["ending"] == "timeout"


def test_isolation_can_be_required(as_root) -> None:
    required = {"isolation": "require"}
    without = Setting(as_root=as_root, namespaces=False)
    ready, runs = without.start("print(1)", **required)
    assert 'isolation = "require"' in ready["error"] and runs == []
    ready, runs = Setting(as_root=as_root, namespaces=True).start("print(1)", **required)
    assert "value" in ready and len(runs) == 1
    assert "value" in without.start("print(1)")[0]


@pytest.mark.parametrize("kernel", ["landlock", "none"])
def test_worker_says_how_it_is_isolated(kernel: str) -> None:
    """Generated code never runs unisolated; comparisons do, and say so."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    sandbox, exposed, result, read = run_python(UNCONFINED, kernel).stdout.splitlines()
    assert result == "equal"
    if kernel == "none":
        assert "Landlock needs Linux 6.2): allow user namespaces" in sandbox
        assert "Landlock needs Linux 6.2" in exposed and read == "root"
    else:
        assert (sandbox, exposed, read) == ("ready", "", "Permission denied")


@pytest.mark.slow
def test_run_in_a_container_starts_unless_namespaces_are_required() -> None:
    """Docker and Kubernetes forbid unshare by default."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    exposed, started, *refusals = run_python(IN_CONTAINER).stdout.splitlines()
    assert (exposed, started) == ("[]", "started")
    assert [one.count('isolation = "require"') for one in refusals] == [1, 1]


def test_numbers_of_system_calls_are_those_of_the_kernel() -> None:
    """A wrong number would leave a call open and deny another one."""
    headers = {
        0: Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        1: Path("/usr/include/asm-generic/unistd.h"),
    }
    known = seccomp._SYSTEM_CALLS | seccomp._DENIED_ALONE | seccomp._CHECKED | seccomp._SELF_ONLY
    for index, header in headers.items():
        if not header.exists():
            pytest.skip("needs the kernel's headers")
        defined = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
        numbers = {name: int(number) for name, number in defined}
        assert {name: numbers.get(name) for name in known} == {
            name: both[index] for name, both in known.items()
        }
        later = [name for name, number in numbers.items() if number >= seccomp._FIRST_UNKNOWN]
        assert not set(later) & set(known)


def test_landlock_handles_all_that_a_kernel_can() -> None:
    """Accesses that a ruleset does not handle stay allowed; unknown bits are refused."""
    assert landlock.ruleset(3) == b"\xff\x7f" + bytes(6)
    assert landlock.ruleset(4) == b"\xff\x7f" + bytes(6) + b"\x03" + bytes(7)
    assert landlock.ruleset(5) == b"\xff\xff" + bytes(6) + b"\x03" + bytes(7)
    assert landlock.ruleset(7) == b"\xff\xff" + bytes(6) + (b"\x03" + bytes(7)) * 2
