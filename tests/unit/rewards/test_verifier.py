"""Scores of a batch and the symbolic comparison, which no answer can hang, kill or slow down."""

import asyncio
import dataclasses
import json
import logging
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

from megadapo.data.group import Score
from megadapo.errors import InfraError
from megadapo.observe.metrics.reflection import reflection_shares
from megadapo.rewards import verifier as verifier_module
from megadapo.rewards.builtin import format_reward
from megadapo.rewards.config import RewardConfig
from megadapo.rewards.dapo_math import extract_answer, score
from megadapo.rewards.steps import split_steps
from megadapo.rewards.unit_tests import program_of, same_output
from megadapo.rewards.verifier import (
    CHUNK,
    MAX_CHARS,
    MAX_DEPTH,
    CrossCheck,
    SymbolicPool,
    Verifier,
    VerifierCounts,
    refusal,
)
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
SIZE = 10**6
HOSTILE = {
    "spaces after a fence": "```" + " " * SIZE,
    "blank lines after a fence": "```" + "\n" * SIZE,
    "language and tabs": "```python" + "\t" * SIZE,
    "fences": "```" * (SIZE // 3),
    "open fences": "```\n" + "`` ```py" * (SIZE // 8),
    "backticks and a line": "`" * SIZE + "\n",
    "answers": "Answer:" * (SIZE // 7),
    "answer and spaces": "Answer" + " " * SIZE,
    "phrases": "let  " * (SIZE // 5),
}
READERS = {
    "program": program_of,
    "rule": lambda text: score(text, "42", "answer_or_boxed"),
    "answer": lambda text: extract_answer(text, "answer_or_boxed"),
    "symbolic": refusal,
    "json": lambda text: format_reward(text, json_keys=["x"]),
    "steps": lambda text: split_steps(text, ["\n\n", "\n"]),
    "output": lambda text: same_output(text, "42"),
    "reflection": lambda text: reflection_shares([text], ["let me check"]),
}
RESPONSES = ["Answer: 42", "Answer: 42.", "so \\boxed{42}", "Answer: 7", "no idea"]
GOLDS = ["42"] * 5
SOON_S = 60.0


def start_pool(**options: float) -> SymbolicPool:
    defaults = {"num_workers": 1, "timeout_s": 30.0, "seconds_per_minute": 60.0}
    return SymbolicPool(**(defaults | {"memory_bytes": 1 << 30} | options))


@pytest.fixture(scope="module")
def pool() -> Iterator[SymbolicPool]:
    pool = start_pool(num_workers=2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def losing() -> Iterator[SymbolicPool]:
    """A pool whose worker is killed and replaced."""
    pool = start_pool(timeout_s=2.0)
    yield pool
    pool.close()


@pytest.fixture
def one_worker(monkeypatch) -> None:
    """Each start of a worker takes seconds; the shared pool has two."""
    monkeypatch.setattr(verifier_module, "NUM_SYMBOLIC_WORKERS", 1)


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


def test_other_units_bases_and_words_are_not_compared(pool: SymbolicPool) -> None:
    """math-verify finds each of these pairs equal."""
    other = [
        ("5 cm", "5 km"),
        ("12_{16}", "12_8"),
        ("east", "seat"),
        ("5 meters", "5 seconds"),
    ]
    assert pool.check_batch(other) == [None] * 4
    same = [("5 cm", "5"), ("xy", "yx"), (r"\sin x\cos x", r"\cos x\sin x"), ("5cm", "5 cm")]
    assert pool.check_batch(same) == [True] * 4


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
def test_slow_comparison_is_killed_and_the_rest_completes(losing: SymbolicPool) -> None:
    (first,), before = losing.process_ids, losing.counts
    started = time.perf_counter()
    results = losing.check_batch([("1", "1"), (SLOW, "42"), ("2", "2"), ("3", "4")])
    assert time.perf_counter() - started < 20
    assert results == [True, None, True, False]
    assert losing.counts == VerifierCounts(
        num_checked=before.num_checked + 3,
        num_timeouts=before.num_timeouts + 1,
        num_crashes=before.num_crashes,
    )
    assert losing.process_ids != [first] and not is_running(first)


@pytest.mark.fault
def test_slow_answers_are_limited_per_minute() -> None:
    """Otherwise a policy that learns to write them makes every step take an hour."""
    pool = start_pool(timeout_s=0.5, seconds_per_minute=0.8)
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
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_worker_costs_one_result_and_is_replaced(losing: SymbolicPool, number: int) -> None:
    before, is_stopped = losing.counts, number == signal.SIGSTOP
    os.kill(losing.process_ids[0], number)
    results = losing.check_batch([("1", "1"), ("2", "2"), ("3", "3")])
    assert results == [None, True, True]
    assert losing.counts == VerifierCounts(
        num_checked=before.num_checked + 2,
        num_timeouts=before.num_timeouts + is_stopped,
        num_crashes=before.num_crashes + (not is_stopped),
    )


@pytest.mark.fault
@pytest.mark.slow
def test_idle_workers_have_lowest_priority_and_cpu_limits() -> None:
    """With wall-clock limits, a busy machine would look like an endless answer."""
    pool = start_pool(timeout_s=0.5, idle=True)
    pid = pool.process_ids[0]
    assert pool.check_batch([("1", "1")]) == [True]
    assert os.sched_getscheduler(pid) == os.SCHED_IDLE
    os.kill(pid, signal.SIGSTOP)
    resume = threading.Timer(1.0, os.kill, (pid, signal.SIGCONT))
    resume.start()
    assert pool.check_batch([("2", "2")]) == [True]
    assert pool.check_batch([(SLOW, "42"), ("3", "3")]) == [None, True]
    assert pool.counts == VerifierCounts(num_checked=3, num_timeouts=1)
    pool.close()


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


@pytest.mark.fault
def test_pool_that_a_thread_started_ends_batch_and_processes_when_closed() -> None:
    with ThreadPoolExecutor(1) as threads:
        pool = threads.submit(start_pool, num_workers=2, timeout_s=300.0).result()
        results = threads.submit(pool.check_batch, [("1/2", "0.5"), ("1", "2")]).result()
        assert results == [True, False]
        running = pool.process_ids
        assert all(is_running(pid) for pid in running)
        batch = threads.submit(pool.check_batch, [(SLOW, "42"), (SLOW, "43"), ("3", "3")])
        time.sleep(0.5)
        started = time.perf_counter()
        pool.close()
        assert batch.result() == [None] * 3
        assert time.perf_counter() - started < 5
    pool.close()
    assert not any(is_running(pid) for pid in running)
    with pytest.raises(InfraError, match="closed"):
        pool.check_batch([("1", "1")])


@pytest.mark.slow
@pytest.mark.fault
def test_busy_workers_do_not_outlive_a_killed_run() -> None:
    program = (
        "import json, threading, time\n"
        "from megadapo.rewards.verifier import SymbolicPool\n"
        "options = {'timeout_s': 1, 'seconds_per_minute': 60, 'memory_bytes': 1 << 30}\n"
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


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", HOSTILE)
def test_a_megabyte_is_read_in_a_moment(reader: str, text: str) -> None:
    """A pattern of quadratic time takes minutes, in which a supervisor kills the driver."""
    started = time.thread_time()
    READERS[reader](HOSTILE[text])
    assert time.thread_time() - started < (0.1 if reader == "program" else 2.0)


def compare(verifier: Verifier) -> None:
    """Cross-check the pairs scored so far, and wait for the results."""
    verifier.ask_cross_check()
    verifier.finish_cross_check(SOON_S)


def test_cross_check_follows_the_rule_and_counts_disagreements(monkeypatch, one_worker) -> None:
    compared, ask = [], CrossCheck.ask

    def watched(self, pairs):
        compared.extend(pairs)
        return ask(self, pairs)

    monkeypatch.setattr(CrossCheck, "ask", watched)
    with Verifier(RewardConfig(), symbolic_timeout_s=30.0) as verifier:
        assert verifier.score_batch(RESPONSES, GOLDS) == [
            Score(1.0, True, "42"),
            Score(-1.0, False, "42."),
            Score(-1.0, False, "[INVALID]"),
            Score(-1.0, False, "7"),
            Score(-1.0, False, "[INVALID]"),
        ]
        assert verifier.cross_checks(RESPONSES, "42") == [None] * 5
        # the rule removes "cm", the symbolic comparison does not know it
        verifier.score_batch(["Answer: x cm", "Answer: 42."], ["x", "42"])
        verifier.ask_cross_check([("Answer: 42.", "42"), ("not scored", "1")])
        verifier.finish_cross_check(SOON_S)
        assert verifier.cross_checks(RESPONSES, "42") == [True, True, None, False, None]
        counts = verifier.counts
        assert (counts.num_scored, counts.num_unanswered) == (7, 2)
        assert counts.num_disagreements == counts.num_only_rule + counts.num_only_symbolic
        assert counts.num_only_symbolic == 2
        # of the scored pairs only, and once for both of its responses
        assert compared[0] == ("42.", "42") and len(compared) == len(set(compared)) == 4
        # seven responses: two of them are equal, and two have no answer at the rule's place
        assert counts.num_checked == 4
        # a known answer is counted again, but not compared again
        verifier.score_batch(["Answer: 42."], ["42"])
        verifier.finish_cross_check(SOON_S)
        assert verifier.counts.num_only_symbolic == 3
        assert verifier.counts.num_checked == 4


@pytest.mark.fault
def test_slow_cross_check_drops_and_counts_pairs(one_worker) -> None:
    config = RewardConfig()
    with Verifier(config, symbolic_timeout_s=300.0) as verifier:
        started = time.perf_counter()
        for step in range(3):
            slow = [f"Answer: (x+y+z+w)^{{{90 + i}}}" for i in range(30)]
            scores = verifier.score_batch(slow, [str(step)] * 30)
            assert not any(score.correct for score in scores)
            verifier.ask_cross_check()
        assert time.perf_counter() - started < 2.0
        left_out = verifier.counts.num_left_out
        # the first two batches, except for chunks that the workers already had
        assert 2 * 30 - 2 * CHUNK <= left_out <= 2 * 30
        verifier.finish_cross_check(0.1)
        assert verifier.counts.num_scored == 90
    assert time.perf_counter() - started < 10.0


@pytest.mark.fault
@pytest.mark.parametrize(
    ("executable", "reason"),
    [
        ("/bin/false", "not be started 3 times in a row: exit code 1"),
        ("/does/not/exist", "No such file"),
    ],
)
def test_irreplaceable_workers_only_stop_the_cross_check(
    monkeypatch, one_worker, executable, reason
) -> None:
    """The cross-check only observes, so it must not end a long run, but must report its end."""
    with Verifier(RewardConfig(), symbolic_timeout_s=30.0) as verifier:
        monkeypatch.setattr(sys, "executable", executable)
        for pid in verifier._pool.process_ids:
            os.kill(pid, signal.SIGKILL)
        # more answers than processes: the last ones need new processes
        golds = [str(number) for number in range(10, 14)]
        verifier.score_batch([f"Answer: {gold}" for gold in golds], golds)
        compare(verifier)
        (note,) = verifier.drain_warnings()
        assert "not compared symbolically" in note and "cannot start: " in note
        assert reason in note
        assert verifier.score_batch(["Answer: 3"], ["3"])[0].correct
        compare(verifier)
        assert verifier.cross_checks(["Answer: 3"], "3") == [None]
        assert verifier.drain_warnings() == []
        assert verifier.counts.num_left_out == 1


@pytest.mark.fault
def test_hung_workers_delay_nothing(one_worker) -> None:
    """All of them hang, also after they are replaced."""
    with Verifier(RewardConfig(), symbolic_timeout_s=1.0) as verifier:
        started = time.perf_counter()
        for _ in range(3):
            for pid in verifier._pool.process_ids:
                os.kill(pid, signal.SIGSTOP)
            assert verifier.score_batch(["Answer: 1"], ["1"])[0].correct
            verifier.ask_cross_check()
            verifier.finish_cross_check(0.1)
        closing = time.perf_counter()
        assert closing - started < 5
    assert time.perf_counter() - closing < 5


def test_cross_check_is_optional_but_a_deciding_comparison_is_not(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Verifier(RewardConfig()) as verifier:
        assert verifier.score_batch(["Answer: 1"], ["1"])[0].correct
        compare(verifier)
        assert verifier.cross_checks(["Answer: 1"], "1") == [None]
        (note,) = verifier.drain_warnings()
        assert "not compared symbolically" in note and 'reward.symbolic = "off"' in note
    with pytest.raises(InfraError, match=r'reward\.symbolic = "off"'):
        Verifier(RewardConfig(symbolic="decide"))


def test_symbolic_decides_if_chosen_with_the_rule_as_fallback(one_worker) -> None:
    """Only an answer at the place of reward.rule counts, and symbolic overrules also a yes."""
    config = RewardConfig(symbolic="decide")
    more = {"Answer: 1,2": "12", "Answer: 9!!!": "9!!!"}
    assert all(config.score(*pair).correct for pair in more.items())
    with Verifier(config, symbolic_timeout_s=30.0) as verifier:
        scores = verifier.score_batch([*RESPONSES, *more], [*GOLDS, *more.values()])
    assert [v.correct for v in scores] == [True, True, False, False, False, False, True]
    assert [v.reward for v in scores] == [1.0, 1.0, -1.0, -1.0, -1.0, -1.0, 1.0]
    assert [v.symbolic_correct for v in scores[-2:]] == [False, None]


def test_without_cross_check_no_process_starts() -> None:
    with Verifier(RewardConfig(symbolic="off")) as verifier:
        scores = verifier.score_batch(RESPONSES, GOLDS)
        assert [v.correct for v in scores] == [True, False, False, False, False]
        assert all(v.symbolic_correct is None for v in scores)
        compare(verifier)
        assert verifier.cross_checks(RESPONSES, "42") == [None] * 5
        assert verifier._pool is None
        assert verifier.counts.num_scored == 5 and verifier.counts.num_disagreements == 0


def test_configured_rule_scores() -> None:
    for rule, expected in (
        ("answer", [True, False, False]),
        ("boxed", [False, False, True]),
        ("answer_or_boxed", [True, False, True]),
    ):
        with Verifier(RewardConfig(rule=rule, symbolic="off")) as verifier:
            assert [v.correct for v in verifier.score_batch(RESPONSES[:3], GOLDS[:3])] == expected


@pytest.mark.fault
def test_lost_comparisons_warn_and_keep_the_reward(caplog, one_worker) -> None:
    """Without a warning, every reward could be 0."""
    config = RewardConfig()
    texts = [f"Answer: {SLOW}", "Answer: 42"]
    with caplog.at_level(logging.WARNING), Verifier(config, symbolic_timeout_s=1.0) as verifier:
        assert [v.correct for v in verifier.score_batch(texts, ["42", "42"])] == [False, True]
        verifier.finish_cross_check(SOON_S)
        assert verifier.cross_checks(texts, "42") == [None, True]
    assert "crashes: 1 for the last 2 answers" in caplog.text
