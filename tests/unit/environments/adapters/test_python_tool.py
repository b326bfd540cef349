"""Python as a tool: calls, variables that last, limits, and ways out of the interpreter."""

import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from megadapo.environments.adapters.python_tool import (
    MAX_CODE_BYTES,
    NO_OUTPUT,
    NO_TIME,
    PythonTool,
)
from megadapo.environments.adapters.toolbox import Toolbox
from megadapo.environments.environment import Environment, EnvironmentFailure, ToolCall
from megadapo.rewards.workers import seccomp
from tests.support.processes.running import is_running, wait_until
from tests.unit.environments.adapters.playing import Player, playing, task
from tests.unit.rewards.workers.test_escapes import DENIED, FILES, NAMESPACES, Setting

SETRLIMIT, TIMER = (
    seccomp._CAN_KILL_CALLER[name][platform.machine() == "aarch64"]
    for name in ("setrlimit", "timer_create")
)
LOST = "The interpreter was restarted, and all variables and imports are lost: "
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
    try:
        tool = PythonTool(**request["options"])
        print(json.dumps([await tool.python(code) for code in request["codes"]]))
    except (EnvironmentFailure, ValueError) as error:
        print(json.dumps(str(error)))

asyncio.run(main())
"""
ORDINARY = "import decimal, json, random, sqlite3, ssl, os\nos.urandom(4)\njson.dumps([1])"
CALLS = seccomp._SYSTEM_CALLS | seccomp._DENIED_ALONE
KINDS = [(True, True), (True, False), (False, True), (False, False)]


@pytest.fixture(scope="module")
def shared() -> Iterator[Player]:
    """An interpreter for code that does not end it."""
    with playing(PythonTool(seconds=60.0), task()) as player:
        yield player


@pytest.fixture(scope="module")
def hasty() -> Iterator[Player]:
    """An interpreter for code that never ends."""
    with playing(PythonTool(seconds=0.3), task()) as player:
        yield player


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(1)\n2 + 3", "1\n5"),
        ("x = 4\nx", "4"),
        ("None", NO_OUTPUT),
        ("", NO_OUTPUT),
        ("# nothing", NO_OUTPUT),
        ("'héllo 中文 😀'", "'héllo 中文 😀'"),
        ("print('\ud800')", "?"),
        ("print(1); print(2)", "1\n2"),
        ("import sys; print('e', file=sys.stderr)", "e"),
        ("__name__", "'__main__'"),
        ("import sys\nsys.stdout.close()\nprint(1)", "1"),
        ("object()", "<object object at 0x...>"),
        ("import numpy\nint(numpy.arange(4) @ numpy.arange(4))", "14"),
    ],
)
def test_output_is_what_is_printed_and_the_last_value(
    shared: Player, code: str, output: str
) -> None:
    assert shared.call("python", code=code) == output


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("def f() -> undefined: pass", "NameError: name 'undefined' is not defined"),
        ("x = (", "SyntaxError: '(' was never closed"),
        ("a\0b", "source code string cannot contain null bytes"),
        ("(" * 1000, "SyntaxError: too many nested parentheses"),
        ("-" * 30_000 + "1", "Error"),
        ("print('before')\n1/0", "ZeroDivisionError: division by zero"),
        ("def g(n):\n    return g(n + 1)\ng(0)", "RecursionError: maximum recursion depth"),
        ("class E(Exception):\n    def __str__(self): 1/0\nraise E", "<exception str() failed>"),
        ("exit(3)", "SystemExit: 3"),
        ("input()", "EOFError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("[0] * 10**12", "MemoryError"),
    ],
)
def test_errors_end_the_call_and_not_the_interpreter(shared: Player, code: str, error: str) -> None:
    shared.call("python", code="kept = 1")
    found = shared.call("python", code=code)
    assert error in found.splitlines()[-1] and found.startswith("before\n") == ("before" in code)
    assert shared.call("python", code="kept + 1") == "2"


def test_traceback_shows_the_models_own_lines_only(shared: Player) -> None:
    """Paths of a machine would make a replayed episode differ, and tell the model nothing."""
    found = shared.call("python", code="import json\ndef f(s):\n    return json.loads(s)\nf('{')")
    assert "return json.loads(s)" in found and found.startswith("Traceback")
    assert found.splitlines()[-1].startswith("json.decoder.JSONDecodeError") and "/" not in found


def test_long_output_is_cut_but_the_error_stays() -> None:
    with playing(PythonTool(max_chars=100), task()) as player:
        found = player.call("python", code="for i in range(10**5): print('é' * 10)\n1/0")
        assert found.startswith("éééééééééé\n") and "[1099900 more characters]" in found
        assert found.endswith("ZeroDivisionError: division by zero") and len(found) < 400
        long_line = player.call("python", code="raise ValueError('x' * 10**6)")
        assert len(long_line) < 400
        assert player.call("python", code="'y' * 10**6").count("y") == 99


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("open('/etc/passwd').read()", "Error"),
        ("open(FILE).read()", "Error"),
        ("open(FILE, 'w')", "Error"),
        ("open('/tmp/x', 'w')", "Error"),
        ("import os; os.mkdir('/tmp/x')", "Error"),
        ("import os; os.listdir(FILE.rpartition('/')[0])", "Error"),
        ("open('/proc/self/environ').read()", "Error"),
        ("import socket; socket.create_connection(('127.0.0.1', 22), 1)", "PermissionError"),
        ("import urllib.request as u; u.urlopen('http://1.1.1.1')", "Operation not permitted"),
        ("import os; os.fork()", "PermissionError"),
        ("import os\nwhile True: os.fork()", "PermissionError"),
        ("import subprocess; subprocess.run(['ls'])", "PermissionError"),
        ("import os; os.system('ls') == 0 or 1/0", "ZeroDivisionError"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
        ("import os; os.kill(os.getpid(), 9)", "PermissionError"),
        ("import os; os.killpg(0, 9)", "PermissionError"),
        ("import signal; signal.raise_signal(9)", "Error"),
        ("import os; os.setsid()", "PermissionError"),
        ("import multiprocessing as m; m.Process(target=print).start()", "PermissionError"),
        ("import ctypes\nctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0 or 1/0", "ZeroDivisionError"),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", "ValueError"),
        ("import resource as r; r.setrlimit(r.RLIMIT_CPU, (99, 99))", "ValueError"),
        ("import resource as r; r.prlimit(0, r.RLIMIT_RTTIME, (9, 9))", "PermissionError"),
        ("import ctypes as c\nc.CDLL(None).prctl(1, 0, 0, 0, 0) == 0 or 1/0", "ZeroDivisionError"),
        (
            f"import ctypes as c\nc.CDLL(None).syscall({SETRLIMIT}, 0, b'z' * 16) == 0 or 1/0",
            "Zero",
        ),
        (f"import ctypes as c\nc.CDLL(None).syscall({TIMER}, 0, 0, b'x' * 8) == 0 or 1/0", "Zero"),
    ],
)
def test_nothing_outside_is_reached(shared: Player, code: str, error: str, tmp_path: Path) -> None:
    """Limits and timers would let code end its interpreter in the way of the system's own kills."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    found = shared.call("python", code=f"FILE = {str(secret)!r}\n{code}")
    assert error in found.splitlines()[-1], found
    assert "secret\n" not in found and secret.read_text() == "secret"
    assert shared.call("python", code="2 * 2") == "4"


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "while True: print('x' * 1000)",
        "9**9**9",
        "while True:\n    try: 1/0\n    except BaseException: pass",
    ],
)
def test_endless_code_is_stopped(hasty: Player, code: str) -> None:
    assert hasty.call("python", code=code) == f"{LOST}the code took longer than 0.3 s."


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os._exit(0)", "exit code 0"),
        ("import ctypes; ctypes.string_at(0)", "signal SIGSEGV"),
        ("import os; os.abort()", "signal SIG"),
        ("import os; os.closerange(0, 100)", "the code"),
        ("import os\nos.write(4, b'x' * 10**6)", "its reply cannot be read"),
        ("import builtins\nbuiltins.len = None\nprint('x')", "the code"),
    ],
)
def test_code_that_ends_its_interpreter_gets_another(
    shared: Player, code: str, reason: str
) -> None:
    shared.call("python", code="kept = 1")
    found = shared.call("python", code=code)
    assert found.startswith(LOST) and reason in found
    assert "NameError" in shared.call("python", code="kept")


def test_memory_is_limited_and_can_be_freed() -> None:
    with playing(PythonTool(seconds=60.0, memory_mib=256), task()) as player:
        code = "kept = []\nwhile True: kept.append(bytearray(10**7))"
        assert player.call("python", code=code).endswith("MemoryError")
        assert 5 < int(player.call("python", code="len(kept)")) < 27
        assert player.call("python", code="kept.clear(); len(bytearray(10**8))") == "100000000"


def test_forged_replies_stay_with_their_episode() -> None:
    """A reply that code writes itself counts in place of the interpreter's own one."""
    code = """import os\nos.write(4, b'{"number": %d, %s}\\n')"""
    forged = code % (1, '"value": "ok\\\\ud800"')
    killed = code % (3, '"cause": "lost process", "error": "signal SIGKILL"')
    with playing(PythonTool(seconds=9), task()) as player, playing(PythonTool(), task()) as other:
        assert player.call("python", code=forged) == "ok?"
        assert player.call("python", code="'next'") == "'next'"
        assert player.call("python", code=killed).startswith(LOST), "it is the code's own doing"
        assert player.call("python", code="'after'") == "'after'"
        assert other.call("python", code="'other'") == "'other'"


def test_code_that_waits_for_a_core_is_not_stopped() -> None:
    """Many interpreters share the cores, and the same code must give the same result."""
    with playing(PythonTool(seconds=0.5), task()) as player:
        player.call("python", code="import time")
        assert player.call("python", code="time.sleep(0.8)\n'awake'") == "'awake'"
        assert "longer than 0.5 s" in player.call("python", code="time.sleep(60)")


def test_random_numbers_are_those_of_the_tasks_seed() -> None:
    """Otherwise a replayed episode would observe something else."""
    drawn = []
    for seed in (1, 1, 2):
        with playing(PythonTool(), task(seed=seed)) as player:
            drawn.append(player.call("python", code="import random\nrandom.random()"))
    assert drawn[0] == drawn[1] != drawn[2]


def test_episodes_run_side_by_side() -> None:
    """A slow call must not hold up those of other episodes in the process."""

    async def play() -> tuple[list[str], float]:
        tools = [PythonTool(seconds=60.0) for _ in range(6)]
        await asyncio.gather(*(tool.python("import time") for tool in tools))
        start = time.monotonic()
        found = await asyncio.gather(*(tool.python("time.sleep(0.5)\n1") for tool in tools))
        took_s = time.monotonic() - start
        for tool in tools:
            await tool.close()
        return found, took_s

    found, took_s = asyncio.run(play())
    assert found == ["1"] * 6 and took_s < 6 * 0.5


def test_interpreter_ends_with_the_episode_and_with_its_parent() -> None:
    with playing(PythonTool(), task()) as player:
        player.call("python", code="1")
        process_id = player.environment._interpreter.process_id
        assert is_running(process_id)
    wait_until(lambda: not is_running(process_id), timeout_s=5)
    program = (
        "import asyncio, os, signal\n"
        "from megadapo.environments.adapters.python_tool import PythonTool\n"
        "async def main():\n"
        "    tool = PythonTool(seconds=99)\n"
        "    await tool.python('')\n"
        "    print(tool._interpreter.process_id, flush=True)\n"
        "    asyncio.ensure_future(tool.python('while True: pass'))\n"
        "    await asyncio.sleep(0.2)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True)
    orphan = int(done.stdout)
    wait_until(lambda: not is_running(orphan), timeout_s=5, message="the interpreter is left over")


def test_a_sandbox_killed_from_outside_is_no_fault_of_the_model() -> None:
    with playing(PythonTool(seconds=60.0), task()) as player:
        player.call("python", code="1")
        player.environment._interpreter._process.kill()
        with pytest.raises(EnvironmentFailure, match="killed from outside"):
            player.call("python", code="1")


def test_calls_by_text_are_answered_by_text() -> None:
    with playing(PythonTool(start="<python>", stop="</python>"), task()) as player:
        assert player.environment.tools == () and player.environment.stop == ("</python>",)
        found = player.turn("I compute. <python>\nx = 6 * 7\nx\n</python>")
        assert (found.text, found.done, found.metrics) == (
            "<result>42</result>",
            False,
            {"calls": 1},
        )
        assert player.turn("<python>x").done, "the turn ended within a call"
        assert player.turn("x</python>").text == ""
        assert player.turn("<python></python>").text == f"<result>{NO_OUTPUT}</result>"
        assert player.turn("<python>3</python>\n\n").text == "<result>3</result>"
        assert player.turn("<python>3</python>!").text == "", "the text behind it may be a name"
        assert player.turn("<python>1<python>2</python>").text == "<result>2</result>"
        assert player.turn("The answer is 42.").done


def test_fenced_code_is_a_call() -> None:
    """The stop text must not be the beginning of the next fence."""
    tool = PythonTool(start="```python\n", stop="```\n", output="```output\n{}\n```\n")
    with playing(tool, task()) as player:
        assert player.turn("So:\n```python\n3 * 3\n```\n").text == "```output\n9\n```\n"
        assert player.turn("```python\n4\n```\n\n").text == "```output\n4\n```\n"
        assert player.turn("So:\n```text\n3 * 3\n```\n").text == ""


def test_mistakes_in_calls_are_told() -> None:
    with playing(PythonTool(), task()) as player:
        assert (
            player.call("bash", code="ls") == 'Error: there is no tool "bash"; the tool is python'
        )
        assert player.call("python") == 'Error: python: argument "code" is missing'
        assert 'there is no argument "lang"' in player.call("python", code="1", lang="js")
        assert 'argument "code" must be {"type": "string"}' in player.call("python", code=["1"])
        assert 'argument "code" must be {"type": "string"}' in player.call("python", code=None)
        assert "was not run" in player.call("python", code="#" * (MAX_CODE_BYTES + 1))
        assert player.call("python", code="#" * (MAX_CODE_BYTES - 2) + "\n1") == "1"
        found = player.turn("", [ToolCall(name="python", arguments={"code": c}) for c in "12"])
        assert [message["content"] for message in found.messages] == ["1", "2"]
        assert found.metrics == {"calls": 2.0} and player.turn("42").done
        (message,) = player.turn("", problem="no JSON").messages
        assert message["content"] == "Error: no JSON"


@pytest.mark.parametrize(
    "tool",
    [PythonTool(seconds=0.3), Toolbox(python={"seconds": 0.3})],
    ids=["alone", "with others"],
)
def test_endless_calls_of_a_turn_share_their_time(tool: Environment) -> None:
    """Together they would exceed the time limit of the step: a failure in place of an answer."""
    calls = [ToolCall(name="python", arguments={"code": "while True: pass"})] * 3
    with playing(tool, task()) as player:
        first, *others = [message["content"] for message in player.turn("", calls).messages]
        assert "the code took longer than 0.3 s" in first and others == [NO_TIME] * 2
        assert player.call("python", code="6 * 7") == "42"


def test_a_call_has_the_time_that_others_left() -> None:
    code = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass"
    calls = [ToolCall(name="python", arguments={"code": code})] * 2
    with playing(PythonTool(seconds=0.6), task()) as player:
        _, second = player.turn("", calls).messages
        assert second["content"] != NO_OUTPUT


def test_schema_is_that_of_the_method() -> None:
    (schema,) = PythonTool().tools
    function = schema["function"]
    assert (function["name"], function["parameters"]["required"]) == ("python", ["code"])
    assert function["parameters"]["properties"]["code"]["type"] == "string"
    assert "kept between calls" in function["description"]


@pytest.mark.parametrize("options", [{"start": "<p>"}, {"stop": "</p>"}, {"output": "{} "}])
def test_options_of_calls_by_text_belong_together(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="options? .*(together|leave it out)"):
        PythonTool(**options)


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        ({"isolation": "required"}, '"auto" or "require"'),
        ({"seconds": 0}, "a number above 0"),
        ({"seconds": float("nan")}, "a number above 0"),
        ({"seconds": 1e308}, "a number above 0 and below 1e"),
        ({"seconds": "10"}, "a number above 0"),
        ({"memory_mib": -1}, "a whole number above 0"),
        ({"max_chars": 1.5}, "a whole number above 0"),
    ],
)
def test_wrong_options_are_named(option: dict[str, object], allowed: str) -> None:
    """A misspelled "require" would run code with less isolation than asked for."""
    (name,) = option
    with pytest.raises(ValueError, match=f"option {name} = .* must be {allowed}"):
        PythonTool(**option)


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
