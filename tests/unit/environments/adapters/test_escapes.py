"""Ways out of the Python tool's interpreter: each must fail, for any user, in any isolation."""

import json
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from megadapo.rewards.workers import seccomp
from tests.unit.rewards.workers.test_escapes import DENIED, FILES, NAMESPACES, Setting

LAUNCHER = """
import asyncio, ctypes, json, resource, sys
from megadapo.environments.adapters.python_tool import PythonTool
from megadapo.environments.environment import EnvironmentFailure
from megadapo.rewards.workers import landlock, seccomp

request = json.load(sys.stdin)
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # other users install filters with PR_SET_NO_NEW_PRIVS
seccomp.install(seccomp.program(request["denied"]))
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))

async def main():
    tool = PythonTool(**request["options"])
    try:
        print(json.dumps([await tool.python(code) for code in request["codes"]]))
    except EnvironmentFailure as error:
        print(json.dumps(str(error)))
    await tool.close()

asyncio.run(main())
"""


ORDINARY = "import decimal, json, random, sqlite3, ssl, os\nos.urandom(4)\njson.dumps([1])"
CALLS = seccomp._SYSTEM_CALLS | seccomp._DENIED_ALONE
KINDS = [(True, True), (True, False), (False, True), (False, False)]


@pytest.fixture(params=[True, False], ids=["root", "user"])
def as_root(request) -> bool:
    return request.param


def call(setting: Setting, *codes: str, **options: object) -> object:
    """Return the results of calls in one interpreter, or the reason why it does not start."""
    request = {"codes": codes, "options": {"seconds": 30.0, "max_chars": 20_000, **options}}
    request["denied"] = setting._denied
    done = subprocess.run(
        [*setting._prefix, _python_of(tuple(setting._prefix)), "-c", LAUNCHER],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(seccomp.__file__).parents[3])},
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@cache
def _python_of(prefix: tuple[str, ...]) -> str:
    """Return a Python that a user can start, and that finds itself to start another."""
    start = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''])"
    check = f"import asyncio; asyncio.timeout; {start}"
    for python in (sys.executable, "/usr/bin/python3"):
        if subprocess.run([*prefix, python, "-c", check], capture_output=True).returncode == 0:
            return python
    pytest.skip("the other user has no such Python")


@pytest.fixture(scope="module", params=KINDS, ids=[f"root {a}, namespaces {b}" for a, b in KINDS])
def outputs(request, tmp_path_factory) -> dict[str, str]:
    """Outputs of several codes in one interpreter, whose user may read and write a folder."""
    as_root, namespaces = request.param
    folder = tmp_path_factory.mktemp("files")
    for name in ("secret", "open"):
        (folder / name).write_text("secret")
        (folder / name).chmod(0o666)
    for parent in (folder, *folder.parents[:3]):
        if parent != Path("/tmp"):
            parent.chmod(0o777)
    index = {"x86_64": 0, "aarch64": 1}[platform.machine()]
    values = {
        "CLONE": {"x86_64": 56, "aarch64": 220}[platform.machine()],
        "PORT": 9,
        "NUMBERS": {name: both[index] for name, both in CALLS.items() if both[index] is not None},
        "FOLDER": str(folder),
        "DRIVER": os.getpid(),
    }
    constants = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    codes = {"namespaces": NAMESPACES, "denied": DENIED, "files": FILES, "ordinary": ORDINARY}
    setting = Setting(as_root=as_root, namespaces=namespaces)
    results = call(setting, *(constants + code for code in codes.values()))
    found = dict(zip(codes, results, strict=True))
    left = ",".join(path.read_text() for path in sorted(folder.iterdir()))
    return found | {"left": left}


def check_escapes(output: str, num_ways: int) -> None:
    """All ways must have been tried, and all must have failed."""
    lines = output.splitlines()
    assert len(lines) == num_ways, output
    assert [line for line in lines if line.endswith("done")] == []


@pytest.mark.fault
def test_no_namespace_mount_or_socket(outputs) -> None:
    check_escapes(outputs["namespaces"], 17)


@pytest.mark.fault
def test_denied_system_calls_fail(outputs) -> None:
    index = {"x86_64": 0, "aarch64": 1}[platform.machine()]
    check_escapes(outputs["denied"], sum(both[index] is not None for both in CALLS.values()) + 2)


@pytest.mark.fault
def test_files_and_processes_of_the_user_are_out_of_reach(outputs) -> None:
    check_escapes(outputs["files"], 19)
    assert outputs["left"] == "secret,secret"


def test_ordinary_code_works(outputs) -> None:
    assert outputs["ordinary"] == "'[1]'"


def test_a_sandbox_that_the_system_or_the_options_refuse_does_not_start(as_root) -> None:
    """No code may run unisolated, or beside a limit that is not the option's."""
    without = Setting(as_root=as_root, namespaces=False)
    assert 'isolation = "require", and the' in call(without, "1", isolation="require")
    above = "memory_mib = 4096 is above the memory_mib of the environment's own"
    assert above in call(without, "1", memory_mib=4096)


def test_namespaces_are_enough_if_they_are_required() -> None:
    setting = Setting(as_root=os.geteuid() == 0, namespaces=True)
    assert call(setting, "1", isolation="require", memory_mib=64) == ["1"]
