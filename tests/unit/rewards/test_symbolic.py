"""The symbolic comparison: results are right, and no answer can hang, kill or slow down a run."""

import asyncio
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megadapo.errors import InfraError
from megadapo.rewards.verifier import MAX_CHARS, MAX_DEPTH, SymbolicCounts, SymbolicPool, refusal
from megadapo.rewards.workers import processes
from tests.support.processes.running import is_running, run_python, wait_until

RIGHT_AND_WRONG = [
    (("42", "42"), True),
    (("42.", "42"), True),
    (("**42**", "42"), True),
    ((r"\frac{1}{2}", "0.5"), True),
    (("$x = 42$", "42"), True),
    ((r"\boxed{42}", "42"), True),
    (("1,000", "1000"), True),
    ((r"\sqrt{12}", r"2\sqrt{3}"), True),
    (("(1,2)", "(1, 2)"), True),
    (("7", "42"), False),
    (("-7", "7"), False),
    (("0.33", r"\frac{1}{3}"), False),
    (("(2,1)", "(1,2)"), False),
]
HARMFUL = (
    "9**9**9",
    "10^{10^{10}}",
    "100000000!",
    "((9!)!)!",
    r"\binom{10000000}{5000000}",
    r"\sum_{i=1}^{1000000000} i",
    r"\prod_{i=1}^{99} \prod_{j=1}^{99} i^j",
    "(1+x)^{100000}",
    "(1+x)^{999}",
    "7^7^7^7 mod 100",
    "(99^{999})^{999}",
    "(" * 3000 + ")" * 3000,
    "(" * 30 + "1" + ")" * 30,
    "{" * 100,
    "9" * 41,
    "1," * 10_000,
    "\x00" * 10,
)
SLOW = "(x+y+z+w)^{99}"
"""Answer that is not refused, and keeps sympy busy for longer than any limit here."""


def start_pool(**options: float) -> SymbolicPool:
    defaults = {"num_workers": 1, "timeout_s": 30.0, "seconds_per_minute": 60.0}
    return SymbolicPool(**(defaults | {"memory_bytes": 1 << 30} | options))


@pytest.fixture(scope="module")
def pool() -> Iterator[SymbolicPool]:
    pool = start_pool(num_workers=2)
    yield pool
    pool.close()


def test_known_answers_get_the_right_result(pool: SymbolicPool) -> None:
    pairs = [pair for pair, _ in RIGHT_AND_WRONG]
    assert pool.check_batch(pairs) == [expected for _, expected in RIGHT_AND_WRONG]
    assert pool.check_batch([]) == []


def test_repeated_pair_is_compared_once(pool: SymbolicPool) -> None:
    before = pool.counts.num_checked
    assert pool.check_batch([("17", "17"), ("18", "17")] * 500) == [True, False] * 500
    assert pool.counts.num_checked - before == 2


def test_unparsable_text_is_counted(pool: SymbolicPool) -> None:
    before = pool.counts.num_unparsed
    assert pool.check_batch([("\\frac{", "42"), ("", "42")]) == [None] * 2
    assert pool.counts.num_unparsed - before == 2


@pytest.mark.parametrize("answer", HARMFUL, ids=lambda answer: answer[:20].encode().hex())
def test_harmful_answers_and_golds_are_refused(pool: SymbolicPool, answer: str) -> None:
    before = pool.counts
    assert pool.check_batch([(answer, "42"), ("42", answer)]) == [None, None]
    assert pool.counts == dataclasses.replace(before, num_refused=before.num_refused + 2)


@pytest.mark.parametrize(
    "answer",
    ["42", "x^2+1", "2^{10}", r"\frac{a^2+b^2}{c^2}", "10!", "e^{2\\pi i}", "f(g(h(x)))", "9" * 40]
    + ["x" * MAX_CHARS, "(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH],
)
def test_ordinary_answers_are_not_refused(answer: str) -> None:
    assert refusal(answer) is None


def test_refusal_takes_no_time() -> None:
    for unit in ("(", "^", "1", "!", "^1", "1^{", "\\", " ", "{1}", "**(", "1 "):
        for text in ((unit * MAX_CHARS)[:MAX_CHARS], unit * 10**6):
            started = time.process_time()
            refusal(text)
            assert time.process_time() - started < 0.1, unit


def test_code_in_answer_does_not_run(pool: SymbolicPool, tmp_path) -> None:
    target = tmp_path / "written"
    for call in ("__import__('os').system('touch {}')", "open('{}','w')", "exec('open(\"{}\",1)')"):
        pool.check_batch([(call.format(target), "42"), (f"${call.format(target)}$", "42")])
    assert not target.exists()


@pytest.mark.fault
def test_slow_comparison_is_killed_and_the_rest_completes() -> None:
    pool = start_pool(timeout_s=1.0)
    first = pool.process_ids
    started = time.perf_counter()
    results = pool.check_batch([("1", "1"), (SLOW, "42"), ("2", "2"), ("3", "4")])
    elapsed = time.perf_counter() - started
    assert results == [True, None, True, False]
    assert elapsed < 20
    assert pool.counts.num_timeouts == 1
    assert pool.counts.num_checked == 3
    assert pool.process_ids != first and not is_running(first[0])
    pool.close()


@pytest.mark.fault
def test_slow_answers_are_limited_per_minute() -> None:
    """Otherwise a policy that learns to write them makes every step take an hour."""
    pool = start_pool(timeout_s=0.5, seconds_per_minute=1.5)
    started = time.perf_counter()
    for batch in range(20):
        pairs = [(SLOW, str(10 * batch + i)) for i in range(10)]
        assert pool.check_batch(pairs) == [None] * 10
    assert time.perf_counter() - started < 10
    counts = pool.counts
    assert counts.num_timeouts >= 1 and counts.num_skipped >= 150
    assert counts.num_timeouts + counts.num_skipped == 200
    pool.close()


@pytest.mark.fault
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSEGV])
def test_killed_worker_costs_one_result_and_is_replaced(kill: signal.Signals) -> None:
    pool = start_pool()
    os.kill(pool.process_ids[0], kill)
    results = pool.check_batch([("1", "1"), ("2", "2"), ("3", "3")])
    assert results == [None, True, True]
    assert pool.counts == SymbolicCounts(num_checked=2, num_crashes=1)
    pool.close()


@pytest.mark.fault
def test_stopped_worker_is_replaced() -> None:
    pool = start_pool(timeout_s=1.0)
    os.kill(pool.process_ids[0], signal.SIGSTOP)
    assert pool.check_batch([("1", "1"), ("2", "2")]) == [None, True]
    assert pool.counts.num_timeouts == 1
    pool.close()


@pytest.mark.fault
def test_idle_workers_have_lowest_priority_and_cpu_limits() -> None:
    """With wall-clock limits, a busy machine would look like an endless answer."""
    pool = start_pool(timeout_s=0.5, idle=True)
    pid = pool.process_ids[0]
    assert pool.check_batch([("1", "1")]) == [True]
    assert os.sched_getscheduler(pid) == os.SCHED_IDLE
    os.kill(pid, signal.SIGSTOP)
    resume = threading.Timer(2.0, os.kill, (pid, signal.SIGCONT))
    resume.start()
    assert pool.check_batch([("2", "2")]) == [True]
    assert pool.check_batch([(SLOW, "42"), ("3", "3")]) == [None, True]
    assert pool.counts == SymbolicCounts(num_checked=3, num_timeouts=1)
    pool.close()


@pytest.mark.fault
def test_close_ends_batch_in_progress() -> None:
    pool = start_pool(timeout_s=300.0)
    with ThreadPoolExecutor(1) as threads:
        batch = threads.submit(pool.check_batch, [(SLOW, "42"), ("3", "3")])
        time.sleep(0.5)
        started = time.perf_counter()
        pool.close()
        assert batch.result() == [None, None]
        assert time.perf_counter() - started < 5


def test_memory_is_limited() -> None:
    with pytest.raises(InfraError, match=r'reward\.symbolic = "off"'):
        start_pool(memory_bytes=40 << 20)


def test_failed_worker_start_gives_its_reason(monkeypatch) -> None:
    without_packages = {"PYTHONPATH": str(Path(processes.__file__).parents[3])}
    without_packages["PYTHONNOUSERSITE"] = "1"
    monkeypatch.setattr(processes, "worker_environment", lambda: without_packages)
    monkeypatch.setattr(sys, "executable", os.path.realpath(sys.executable))
    with pytest.raises(InfraError, match="cannot start: ModuleNotFoundError: .*math_verify"):
        start_pool()


def test_workers_see_no_secrets(monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    pool = start_pool()
    environment = Path(f"/proc/{pool.process_ids[0]}/environ").read_bytes()
    assert b"secret" not in environment and b"HOME" not in environment
    pool.close()


def test_workers_have_no_network_privileges_or_children(pool: SymbolicPool) -> None:
    """They parse text that a model wrote, so a hole in the parser must not lead anywhere."""
    assert pool.exposed == ""
    proc = Path(f"/proc/{pool.process_ids[0]}")
    for namespace in ("net", "mnt", "ipc"):
        assert os.readlink(proc / "ns" / namespace) != os.readlink(f"/proc/self/ns/{namespace}")
    (limit,) = [line for line in (proc / "limits").read_text().splitlines() if "process" in line]
    assert limit.split()[2:4] == ["0", "0"]
    status = dict(line.split(":\t") for line in (proc / "status").read_text().splitlines())
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert os.getuid() != 0 or "0" not in status["Uid"].split()


INTRUDER = r"""
import os, socket, subprocess, sys
from pathlib import Path
from megadapo.rewards.workers import seccomp, symbolic_worker

seccomp.install(seccomp.program(sys.argv[3:]))
exposed = symbolic_worker.isolate()
print(bool(exposed))

def attempt(what):
    try:
        what()
    except (OSError, PermissionError) as error:
        return type(error).__name__
    return "done"

def fork():
    if os.fork() == 0:
        os._exit(0)

server = ("127.0.0.1", int(sys.argv[1]))
print(attempt(lambda: socket.create_connection(server, timeout=5)))
print(attempt(fork))
print(attempt(lambda: subprocess.run(["/bin/true"])))
print(attempt(lambda: Path(sys.argv[2]).read_text()))
print(attempt(lambda: os.kill(os.getppid(), 0)))
print(symbolic_worker.compare(r"\frac{3}{6}", "0.5"))
"""


@pytest.mark.parametrize("forbidden", [(), ("unshare",)], ids=["namespaces", "container"])
def test_code_inside_a_worker_reaches_nothing(tmp_path, forbidden) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        result = run_python(INTRUDER, port, str(secret), *forbidden)
    exposed, connected, forked, started, read, signalled, result_text = result.stdout.split()
    assert connected != "done" and started != "done" and result_text == "equal", result.stderr
    if exposed == "False":
        assert "done" not in (forked, read, signalled)


def test_results_do_not_depend_on_the_thread(pool: SymbolicPool) -> None:
    """Outside of the main thread math-verify's own time limit makes every answer wrong."""
    pairs = [pair for pair, _ in RIGHT_AND_WRONG]
    expected = [right for _, right in RIGHT_AND_WRONG]
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(pool.check_batch, pairs) for _ in range(8)]
        assert all(future.result() == expected for future in asked)

    async def ask() -> list[bool | None]:
        return pool.check_batch(pairs)

    assert asyncio.run(ask()) == expected


def test_pool_starts_in_a_thread() -> None:
    def work() -> list[bool | None]:
        pool = start_pool()
        results = pool.check_batch([("1/2", "0.5"), ("1", "2")])
        pool.close()
        return results

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(work).result() == [True, False]


def test_close_ends_processes_and_later_use_fails() -> None:
    pool = start_pool(num_workers=2)
    running = pool.process_ids
    assert all(is_running(pid) for pid in running)
    pool.close()
    pool.close()
    assert not any(is_running(pid) for pid in running)
    with pytest.raises(InfraError, match="closed"):
        pool.check_batch([("1", "1")])


@pytest.mark.fault
def test_busy_workers_do_not_outlive_a_killed_run() -> None:
    program = (
        "import json, threading, time\n"
        "from megadapo.rewards.verifier import SymbolicPool\n"
        "options = {'timeout_s': 2, 'seconds_per_minute': 60, 'memory_bytes': 1 << 30}\n"
        "pool = SymbolicPool(num_workers=2, **options)\n"
        f"pairs = [({SLOW!r}, '1')]\n"
        "threading.Thread(target=pool.check_batch, args=(pairs,)).start()\n"
        "print(json.dumps(pool.process_ids), flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment, text=True
    )
    workers = json.loads(run.stdout.readline())
    time.sleep(0.3)
    run.kill()
    run.wait()
    run.stdout.close()
    wait_until(lambda: not any(is_running(pid) for pid in workers), timeout_s=20)
