"""Generated code in its sandbox: scores are right, and every known escape fails."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from megadapo.data.group import Score
from megadapo.data.prompts import Prompt
from megadapo.errors import DataError, RewardOutageError
from megadapo.rewards.config import RewardConfig, RewardFunction
from megadapo.rewards.function_runners import Runner, start_runner
from megadapo.rewards.unit_tests import UnitTests, program_of, read_tests, same_output
from tests.support.processes.running import wait_until

ADDS = json.dumps({"inputs": ["1 2", "30 4"], "outputs": ["3\n", "34"]})
READS = "a, b = map(int, input().split())\n"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Runner]:
    runner = start_runner(
        RewardFunction(
            function="python_tests",
            timeout_s=4.0,
            memory_mib=256,
            output_kib=64,
            num_workers=2,
            options={"seconds_per_test": 1.0},
        )
    )
    yield runner
    runner.close()


def run(sandbox: Runner, programs: list[str], tests: str = ADDS) -> list[Score]:
    texts = [f"Here it is:\n```python\n{program}\n```\n" for program in programs]
    prompt = Prompt("id", (("user", "?"),), tests, "code")
    ids = [np.arange(1, dtype=np.int32)] * len(texts)
    return sandbox.score_group(prompt, texts, ids)


def output(sandbox: Runner, program: str) -> str:
    """Return the output of a program, from the private pool: scores do not contain it."""
    (reply,) = sandbox._pool.run([request(program)], 8.0)
    return reply["runs"][0]["output"]


def request(program: str) -> dict[str, object]:
    """Return the request to run a program once, without tests."""
    limits = {"seconds_per_run": 2.0, "seconds": 4.0, "stops_early": False}
    return {"code": program, "tests": None, "names": [], "inputs": [""], **limits}


def test_programs_are_compared_by_output(sandbox: Runner) -> None:
    programs = [READS + "print(a + b, '')", READS + "print(a - b)", "def", "print(3)"]
    scores = run(sandbox, programs)
    assert [(one.reward, one.correct) for one in scores] == [(1.0, True)] + [(0.0, False)] * 3
    assert dict(scores[3].parts)["passed"] == 0.5
    assert all(one.failure is None for one in scores)
    (none,) = sandbox.score_group(
        Prompt("id", (("user", "?"),), ADDS, "code"), ["no program"], [np.arange(1)]
    )
    assert (none.reward, dict(none.parts)["no_program"]) == (0.0, 1.0)


def test_assertions_run_after_the_program(sandbox: Runner) -> None:
    tests = "assert double(2) == 4\nassert double('a') == 'aa'"
    programs = ["def double(x): return 2 * x", "def double(x): return x + 2", "double = 3"]
    assert [one.correct for one in run(sandbox, programs, tests)] == [True, False, False]


def test_module_with_a_main_program_is_imported(sandbox: Runner) -> None:
    """Its demonstration is no part of the solution, and its annotations are its own."""
    tests = "assert double(2) == 4 and types() == {'x': int}"
    double = (
        "import sys\ndef double(x: int): return 2 * x\ndef types(): return double.__annotations__\n"
    )
    demo = f"{double}if __name__ == '__main__':\n    print(double(int(input())))"
    assert [one.correct for one in run(sandbox, [demo, f"{double}sys.exit(0)"], tests)] == [
        True
    ] * 2


@pytest.mark.parametrize(
    "program",
    [
        "import threading, time\n"
        "def main(): time.sleep(0.1); print(a + b)\nthreading.Thread(target=main).start()",
        "import atexit, io, sys\nsys.stdout = io.StringIO()\n"
        "atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))\nprint(a + b)",
        "import sys\nprint(a + b)\nsys.stdout.close()",
        "import pickle\nclass A: pass\npickle.loads(pickle.dumps(A()))\nprint(a + b)",
        "import typing\nclass A: pass\nclass B:\n    a: 'A'\n"
        "typing.get_type_hints(B)\nprint(a + b)",
    ],
    ids=["thread", "atexit", "closed", "pickle", "hints"],
)
def test_program_runs_as_in_plain_python(sandbox: Runner, program: str) -> None:
    """A right program that only the sandbox fails would teach the model to avoid it."""
    (score,) = run(sandbox, [READS + program])
    assert score.correct


def test_input_may_exceed_the_output_limit(sandbox: Runner) -> None:
    """Applying the output limit to stdin would fail programs that read all of it."""
    numbers = "1\n" * 300_000
    tests = json.dumps({"inputs": [numbers], "outputs": ["300000"]})
    programs = ["print(sum(map(int, open(0))))", f"print({numbers!r})"]
    assert [one.correct for one in run(sandbox, programs, tests)] == [True, False]


def test_expected_outputs_are_not_in_the_sandbox(sandbox: Runner) -> None:
    secret = json.dumps({"inputs": [""], "outputs": ["7391" + "5264"]})
    program = (
        "import gc\n"
        "found = [o for o in gc.get_objects() if isinstance(o, (list, dict, tuple))]\n"
        "text = ' '.join(repr(o)[:10000] for o in found)\n"
        "print('7391' + '5264' if '7391' + '5264' in text.replace(open(0).read(), '') else 'none')"
    )
    assert not run(sandbox, [program.replace("'7391' + '5264'", "chr(55)*2")], secret)[0].correct


@pytest.mark.fault
def test_home_and_run_folders_are_unreadable(sandbox: Runner, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    home = Path.home()
    for path in (home, tmp_path, Path.cwd(), Path("/proc"), Path("/sys"), Path("/etc/passwd")):
        shown = output(
            sandbox, f"import os; p = {str(path)!r}; print(os.path.exists(p) and os.listdir(p))"
        )
        # if Python is installed inside, only the path to it is visible
        ways = [Path(way) for way in (sys.base_prefix, sys.prefix)]
        names = {way.relative_to(path).parts[0] for way in ways if way.is_relative_to(path)}
        assert shown == "False\n" or set(re.findall(r"'([^']*)'", shown)) <= names
    shown = output(sandbox, f"import os; print(os.listdir({str(home)!r}))")
    assert not shown or len(re.findall(r"'", shown)) <= 2
    assert output(sandbox, f"print(open({str(secret)!r}).read())") == ""
    written = "\n".join(
        f"try: open({str(path / 'x')!r}, 'w')\nexcept OSError: print('refused')"
        for path in (Path("/usr"), Path(sys.base_prefix), Path("/"), home, Path("/tmp"))
    )
    assert output(sandbox, written) == "refused\n" * 5


@pytest.mark.fault
def test_network_is_unreachable(sandbox: Runner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        port = server.getsockname()[1]
        program = (
            "import socket\n"
            f"for address in (('127.0.0.1', {port}), ('1.1.1.1', 53)):\n"
            "    try: socket.create_connection(address, timeout=1); print('reached')\n"
            "    except OSError as error: print('unreachable')\n"
        )
        assert output(sandbox, program) == "unreachable\n" * 2
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.fault
def test_no_process_outlives_its_run(sandbox: Runner) -> None:
    """A daemon in its own session that ignores all signals it can."""
    mark = f"outlives-{os.getpid()}"
    program = (
        "import os, signal, sys, time\n"
        "for number in range(1, 60):\n"
        "    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        sleep = 'import time; time.sleep(60)'\n"
        f"        os.execv(sys.executable, ['python', '-c', sleep, {mark!r}])\n"
        "    os._exit(0)\n"
        "while True: pass\n"
    )
    started = time.perf_counter()
    (score,) = run(sandbox, [program])
    assert time.perf_counter() - started < 40.0
    assert dict(score.parts)["timeouts"] == 1.0 and score.failure is None
    lines = subprocess.run(["ps", "ax", "-o", "args"], capture_output=True, text=True).stdout
    assert "pytest" in lines and mark not in lines


@pytest.mark.fault
@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True: os.fork()",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "while True: print('x' * 100000)",
        "n = 0\nwhile True: open(f'/tmp/{n}', 'w').write('x' * 60000); n += 1",
        "import os\nos.kill(1, 9); os.kill(1, 2); os.kill(-1, 9)",
        "import os\nos.kill(os.getppid(), 9); os.abort()",
        "import ctypes; ctypes.string_at(0)",
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "assert libc.mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0",
        "import os\nos.setuid(0)",
        "raise BaseException",
        "class E(Exception):\n    def __str__(self): 1 / 0\nraise E",
        "def f(): f()\nf()",
        "import sys; sys.stdout = None; print(1)",
    ],
    ids=lambda program: re.sub(r"\W+", "-", program)[:30],
)
def test_harmful_program_fails_and_the_next_is_scored(sandbox: Runner, program: str) -> None:
    started = time.perf_counter()
    harmful, right = run(sandbox, [program, READS + "print(a + b)"])
    assert (harmful.correct, right.correct) == (False, True)
    assert harmful.failure is None
    assert time.perf_counter() - started < 40.0


@pytest.mark.fault
@pytest.mark.parametrize(("memory_mib", "is_lost"), [(1024, False), (80, True)])
def test_program_output_never_fails_the_function(memory_mib: int, is_lost: bool) -> None:
    """Each NUL takes six bytes in a reply, which eleven runs exceed."""
    function = RewardFunction(
        function="python_tests",
        timeout_s=20.0,  # a busy machine needs more than 6 s for eleven floods
        memory_mib=memory_mib,
        options={"partial": True},
        on_failure="stop",
    )
    runner = start_runner(function)
    tests = json.dumps({"inputs": [""] * 11, "outputs": ["0"] * 11})
    try:
        floods, right = run(runner, ["print('\\0' * 1048000)", "print(0)"], tests)
    finally:
        runner.close()
    assert (floods.reward, floods.failure, right.reward) == (0.0, None, 1.0)
    assert dict(floods.parts)["lost_sandboxes"] == float(is_lost)


SPINS = "import time\nwhile time.process_time() < {}: pass\n" + READS + "print(a + b)"


@pytest.mark.parametrize(
    ("program", "is_right"),
    [
        (SPINS.format(0.6), True),
        (SPINS.format(1.2), False),
        ("import time\ntime.sleep(1.5)\n" + READS + "print(a + b)", True),
        ("import os\nif os.fork(): os.wait()\n" + SPINS.format(0.7), False),
    ],
    ids=["below", "above", "asleep", "child"],
)
def test_limit_is_of_cpu_time(sandbox: Runner, program: str, is_right: bool) -> None:
    """Catches a limit that is rounded up, waits that count, and work given to another process."""
    (score,) = run(sandbox, [program], json.dumps({"inputs": ["1 2"], "outputs": ["3"]}))
    assert (score.correct, dict(score.parts)["timeouts"]) == (is_right, float(not is_right))


def test_verdict_does_not_depend_on_other_processes() -> None:
    """With a limit of wall-clock time right programs fail while trainer or engines use the CPUs."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    burn = [sys.executable, "-c", "while True: pass"]
    burners: list[subprocess.Popen[bytes]] = []
    try:
        options = {"seconds_per_test": 0.3}
        runner = start_runner(RewardFunction(function="python_tests", options=options))
        burners += [subprocess.Popen(burn) for _ in range(20)]
        started = time.perf_counter()
        scores = run(runner, [SPINS.format(0.25), SPINS.format(0.4)], ADDS)
        taken = time.perf_counter() - started
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
        os.sched_setaffinity(0, cpus)
    runner.close()
    assert taken > 1.5, "the programs had the CPU for themselves"
    assert [(one.correct, one.failure) for one in scores] == [(True, None), (False, None)]


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("def test_f():\n    assert f(3) == 5", "they call nothing of the program"),
        ("class A: pass\nassert f(A()) == 5", "cannot get an object of type A"),
        ("class A: pass\ntry:\n    f([A()])\nexcept Exception:\n    pass\nassert f(3)", "type A"),
    ],
)
def test_unusable_tests_are_no_wrong_program(sandbox: Runner, tests: str, message: str) -> None:
    """Otherwise all programs fail such tests, or pass if they never run, without a word."""
    scores = run(sandbox, ["def f(x): return 5", "def f(x): return x + 2"], tests)
    assert all(message in one.failure.reason for one in scores)


@pytest.mark.fault
def test_sandbox_that_is_killed_is_no_wrong_program() -> None:
    """Catches right programs that count as wrong because the host was short of memory."""
    options = {"seconds_per_test": 30.0}
    runner = start_runner(RewardFunction(function="python_tests", timeout_s=40.0, options=options))

    def kill(*, first: bool) -> None:
        """Kill a sandbox, or the process outside that waits for it, while a program runs."""
        # a sandbox that starts runs an empty program, and whoever kills it then gets another one
        wait_until(lambda: any(runner._pool._workers[0]._calls))
        outside = psutil.Process(runner._pool.process_ids[0])
        wait_until(lambda: len(outside.children(recursive=True)) == 2)
        (outside.children()[0] if first else outside).kill()

    try:
        for first in (False, True):
            killing = threading.Thread(target=kill, kwargs={"first": first})
            killing.start()
            with pytest.raises(RewardOutageError, match="its sandbox was killed: "):
                run(runner, ["import time; time.sleep(25)"])
            killing.join()
        (right,) = run(runner, [READS + "print(a + b)"])
        assert right.correct
    finally:
        runner.close()


def test_python_below_tmp_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox has its own /tmp, in which Python may have to be mounted."""
    environment = tmp_path / "env"
    venv.create(environment, symlinks=True, with_pip=False)
    monkeypatch.setattr(sys, "executable", str(environment / "bin" / "python"))
    runner = start_runner(RewardFunction(function="python_tests", num_workers=1, timeout_s=4.0))
    try:
        assert run(runner, [READS + "print(a + b)"])[0].correct
    finally:
        runner.close()


def test_unprivileged_user_gets_the_same_sandbox() -> None:
    """Root without the right to mount uses a user namespace, like other users."""
    program = "import json\nfrom megadapo.rewards.workers.sandbox_worker import main\nmain()"
    settings = {"memory_bytes": 1 << 28, "output_bytes": None, "idle": False}
    settings |= {"isolation": "auto", "run_output_bytes": 1 << 16}
    code = "import os, socket\nprint(os.getuid(), os.path.exists('/etc/passwd'))\n"
    command = [sys.executable, "-c", program]
    if os.geteuid() == 0:
        command = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", *command]
    done = subprocess.run(
        command,
        input=f"{json.dumps(settings)}\n{json.dumps({'number': 1, 'request': request(code)})}\n",
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=30,
    )
    _, reply = [json.loads(text) for text in done.stdout.splitlines()]
    assert reply["value"]["runs"] == [{"ending": "done", "output": "1000 False\n"}]


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ("", "no unit tests"),
        ("assert (", "not Python"),
        ("x = 3", "assert nothing"),
        ("def check(f):\n    assert f(3) == 5", "no name that a program must define"),
        ("assert max(1, 2) == len('ab')", r"several that Python defines \(len, max\)"),
        ("{", "cannot be read"),
        ('{"inputs": []}', "cannot be read"),
        ('{"inputs": [1], "outputs": ["1"]}', "lists of texts"),
        ('{"inputs": ["1", "2"], "outputs": ["1"]}', "2 inputs for 1 outputs"),
        ('{"fn_name": "f", "inputs": ["1"], "outputs": ["1"]}', "have fn_name"),
        ('{"inputs": [], "outputs": []}', "0 inputs for 0"),
    ],
)
def test_invalid_unit_tests_fail_at_load(gold: str, message: str) -> None:
    config = RewardConfig(functions=("python_tests",))
    assert config.check_gold("assert f() == 1", "code") == "assert f() == 1"
    with pytest.raises(DataError, match=message):
        config.check_gold(gold, "code")


@pytest.mark.parametrize(
    "response",
    [
        "```text\n3\n```\n```python\na\n```",
        "```python\na\n```\nIt prints:\n```\n1\n```\n",
        "```Python3\na\n```",
        '```py title="a.py"\r\na\r\n```\r\n',
        "1. So:\n   ```python\n   a\n   ```\n",
    ],
)
def test_program_is_found_among_other_blocks(response: str) -> None:
    """Otherwise a right program is scored as none, or as the text between two blocks."""
    assert program_of(response) == "a\n"


def test_fences_inside_a_program_do_not_end_it() -> None:
    """Otherwise a program that prints a fence, or has one in a docstring, is cut off."""
    program = "print('```')\ndef f():\n    '''\n    ```\n    '''\n"
    assert program_of(f"```python\n{program}```") == program


def test_programs_tests_and_outputs_are_read() -> None:
    assert program_of("```python\na\n```\n```py\nb\n```") == "b\n"
    assert program_of("```\na\n```") == "a\n" and program_of("a") is None
    adds = json.dumps({"inputs": ["1 2", "30 4"], "outputs": ["3\n", "34"]})
    assert read_tests(adds) == UnitTests(None, ("1 2", "30 4"), ("3\n", "34"))
    assert read_tests("assert math.sqrt(f(4)) == 2 == abs(f(x=-2))") == UnitTests(
        "import math\nassert math.sqrt(f(4)) == 2 == abs(f(x=-2))", names=("f",)
    )


@pytest.mark.parametrize(
    ("printed", "expected", "is_same"),
    [
        ("1 \n2\n\n", "1\n2", True),
        ("1\n\n2", "1 2", True),
        ("1 2", "12", False),
        ("", "", True),
        ("a", "", False),
        ("", "a", False),
        ("0.333333", "0.333333333333", True),
        ("1e-05", "0.00001", True),
        ("1", "1.0", True),
        ("1.0", "1", False),
        ("007", "7", False),
        ("123456.0", "123456.7", False),
        ("0.0", "0.0000001", False),
        ("nan", "0.5", False),
        ("nan", "nan", True),
        ("2e999", "1e999", False),
        ("inf", "1e999", False),
        ("1_0.0", "10.0", False),
        ("1.5a", "1.5", False),
        ("e.", "e.e", False),
        ("yes", "Yes", False),
    ],
)
def test_outputs_are_compared_token_by_token(printed: str, expected: str, is_same: bool) -> None:
    """Texts fail other numbers of digits; numbers alone pass names like 007 and e."""
    assert same_output(printed, expected) == is_same


def test_long_outputs_are_compared_fast() -> None:
    """The driver compares, with all its threads."""
    started = time.process_time()
    for long in ("1" * 10_000_000, "1 " * 5_000_000, "1." + "1" * 10_000_000):
        assert not same_output(long, "1.5") and not same_output("1.5", long)
    assert time.process_time() - started < 5.0


def test_exact_outputs_are_texts() -> None:
    function = RewardFunction(function="python_tests", options={"exact": True, "partial": True})
    runner = start_runner(function)
    tests = json.dumps({"inputs": ["", ""], "outputs": ["0.50 a\n", "0.5 a"]})
    try:
        (score,) = run(runner, ["print('0.5 a ')"], tests)
    finally:
        runner.close()
    assert score.reward == 0.5
