"""Environments that hang, crash, print and fill the memory, in real processes."""

import asyncio
import os
import signal
import sys
import time

import pytest

from megadapo.environments.processes import EnvironmentProcesses
from megadapo.rewards.workers.processes import CallError
from tests.support.rollout.hosts import config_of, content_of, task_of, turn_of, with_host

REFUSED = "its process could not be started 3 times in a row: exit code 4, with 1024 MiB of memory"


def answers(texts, name="Obedient", **fields):
    """Return the outcome of one step of each text, each in an episode of its own."""

    async def play(host):
        outcomes = []
        for number, text in enumerate(texts):
            await host.open(f"{number}", 0, task_of("a"))
            outcomes.append(await host.step(f"{number}", 0, turn_of(text)))
        return outcomes

    return with_host([config_of(name, **fields)], play)


def failures(texts, **fields):
    return [outcome.failure for outcome in answers(texts, **fields)]


def test_failures_of_a_step_have_stable_causes_and_the_process_stays():
    texts = {
        "raise no table": "exception: ValueError: no table",
        "fail the server is full": "failure: the server is full",
        "hide failure": "failure: <exception str() failed>",
        "hide exception": "exception: Hidden: <exception str() failed>",
        "sys_exit now": "exception: SystemExit: 3",
        "stop_iteration": "exception: RuntimeError: coroutine raised StopIteration",
        "fill": "no capacity: out of memory, by rollout.environments.memory_mib = 1024",
        "huge": "wrong result: returned 9,437,",
        "fork": "exception: PermissionError: forks; use subprocess",
        "socket": "exception: PermissionError: opens a socket, and rollout.environments.network",
        "unknown": "exception: AttributeError",
    }

    async def play(host):
        before = host.process_ids
        for number in range(len(texts)):
            await host.open(f"{number}", 0, task_of("a"))
        calls = (host.step(f"{n}", 0, turn_of(text)) for n, text in enumerate(texts))
        outcomes = await asyncio.gather(*calls)
        assert host.process_ids == before
        return [outcome.failure for outcome in outcomes]

    found = with_host([config_of("Obedient")], play)
    for expected, failure in zip(texts.values(), found, strict=True):
        assert failure.startswith(expected)


def test_printing_and_reading_leave_requests_and_replies_alone(tmp_path):
    texts = ["print many words", "read", "say hello"]
    assert [content_of(one) for one in answers(texts)] == ["printed", "read ''", "hello 1 of 5"]


def test_only_named_variables_are_visible(monkeypatch):
    monkeypatch.setenv("GAME_KEY", "key")
    monkeypatch.setenv("SECRET", "secret")
    outcomes = answers(["variable GAME_KEY", "variable SECRET"], variables=["GAME_KEY", "ABSENT"])
    assert [content_of(one) for one in outcomes] == ["key", "hidden"]


@pytest.mark.parametrize("name", ["Obedient", "ObedientCoroutine"])
def test_64_slow_episodes_of_one_process_overlap(name):
    async def play(host):
        names = [f"{number}" for number in range(64)]
        await asyncio.gather(*(host.open(one, 0, task_of(one)) for one in names))
        start = time.monotonic()
        outcomes = await asyncio.gather(*(host.step(one, 0, turn_of("sleep 0.2")) for one in names))
        return [content_of(one) for one in outcomes], time.monotonic() - start

    contents, seconds = with_host([config_of(name)], play)
    assert contents == ["slept"] * 64
    assert seconds < 64 * 0.2 / 8, "one after another they take 12.8 s"


def test_time_limit_fails_one_episode_and_leaves_the_process_to_others():
    async def play_in(host, index):
        names = slow, other = f"slow {index}", f"other {index}"
        for one in names:
            await host.open(one, index, task_of(one))
        failed = await host.step(slow, 0, turn_of("sleep 60"))
        assert content_of(await host.step(other, 0, turn_of("say hello"))) == "hello 1 of 5"
        again = await host.step(slow, 0, turn_of("sleep 60"))
        await host.close(names)
        assert failed.failure == again.failure == "timeout: step took longer than 1 s"

    async def play(host):
        before = host.process_ids
        await asyncio.gather(play_in(host, 0), play_in(host, 1))
        assert host.process_ids == before

    names = ("Obedient", "ObedientCoroutine")
    with_host([config_of(name, timeout_s=1.0) for name in names], play)


def test_object_is_closed_when_a_step_that_missed_its_limit_ends(tmp_path):
    """Catches what an episode holds, such as a container, that is kept for the whole run."""
    notes, awaited = tmp_path / "notes", tmp_path / "awaited"
    config = config_of("Noting", options={"path": str(notes)}, timeout_s=1.0)

    async def play(host):
        notes.unlink()  # of the object that described itself
        await host.open("slow", 0, task_of("slow"))
        failed = await host.step("slow", 0, turn_of(f"wait {awaited}"))
        await host.close(["slow"])
        assert failed.failure.startswith("timeout") and not notes.exists()
        awaited.touch()
        for _ in range(500):
            if notes.exists() and "closed" in notes.read_text():
                break
            await asyncio.sleep(0.01)

    with_host([config], play)
    assert notes.read_text().splitlines() == ["waited", "closed"]


def test_process_with_many_hanging_threads_is_replaced(monkeypatch):
    monkeypatch.setattr("megadapo.environments.processes.MAX_STUCK", 2)

    async def play(host):
        before = host.process_ids
        for one in ("a", "b", "stays"):
            await host.open(one, 0, task_of(one))
        await asyncio.gather(*(host.step(one, 0, turn_of("sleep 60")) for one in ("a", "b")))
        await host.open("new", 0, task_of("new"))
        assert content_of(await host.step("new", 0, turn_of("say x"))) == "x 1 of 5"
        assert content_of(await host.step("stays", 0, turn_of("say x"))) == "x 1 of 5"
        assert host.process_ids != before
        await host.close(["a", "b", "stays"])
        return before

    (before,) = with_host([config_of("Obedient", timeout_s=1.0)], play)
    assert not _runs(before)


def test_process_without_free_threads_is_replaced():
    """Catches threads of coroutines that hang for good: nothing of the process works any more."""

    async def play(host):
        names = [f"{number}" for number in range(60)]
        await asyncio.gather(*(host.open(one, 0, task_of(one)) for one in names))
        hanging = (host.step(one, 0, turn_of("thread 300")) for one in names)
        failures = {outcome.failure for outcome in await asyncio.gather(*hanging)}
        assert failures == {"timeout: step took longer than 1 s"}
        opened = await host.open("new", 0, task_of("new"))
        assert opened.failure is None
        return content_of(await host.step("new", 0, turn_of("thread 0")))

    # 32 threads, and 8 that may hang
    config = config_of("ObedientCoroutine", timeout_s=1.0, memory_mib=1024)
    assert with_host([config], play) == "slept in a thread"


def test_process_that_answers_nothing_is_replaced(monkeypatch):
    """`9**9**9` is one instruction: no thread of the process runs any more."""
    monkeypatch.setattr("megadapo.environments.processes.PING_S", 0.5)

    async def play(host):
        before = host.process_ids
        await host.open("spins", 0, task_of("spins"))
        await host.open("other", 0, task_of("other"))
        assert content_of(await host.step("other", 0, turn_of("say x"))) == "x 1 of 5"
        failed = await host.step("spins", 0, turn_of("spin"))
        other = await host.step("other", 1, turn_of("say y"))
        assert host.process_ids != before
        return failed.failure, content_of(other), before

    failure, other, (before,) = with_host([config_of("Obedient", timeout_s=1.0)], play)
    assert failure == "timeout: step took longer than 1 s"
    assert other == "y 2 of 5"
    assert not _runs(before)


def test_lost_process_says_how_it_ended_and_what_it_printed():
    (failure,) = failures(["exit 7"], recovery="once")
    assert failure == "lost process: exit code 7"


@pytest.mark.parametrize(
    "text", ["nonsense", "3", "deep", "empty", "large", "[]", '{"number": []}']
)
def test_nonsense_among_replies_ends_the_process_and_not_the_host(text):
    """Catches a reader that stops at an exception: calls would wait, with no new process."""

    async def play(host):
        await host.open("a", 0, task_of("a"))
        start = time.monotonic()
        failure = (await host.step("a", 0, turn_of(f"reply {text}"))).failure
        await host.open("b", 0, task_of("b"))
        assert content_of(await host.step("b", 0, turn_of("say x"))) == "x 1 of 5"
        return failure, time.monotonic() - start

    failure, seconds = with_host([config_of("Obedient", recovery="once")], play)
    assert failure.startswith("lost process: its reply cannot be read") and seconds < 30


def test_environment_that_closes_all_pipes_is_a_lost_process():
    start = time.monotonic()
    (failure,) = failures(["close"], recovery="once")
    assert failure.startswith("lost process") and time.monotonic() - start < 30


def test_environment_that_closes_the_pipe_of_requests_is_replaced():
    """Catches a process that reads nothing more, whose episodes all exceed their time limit."""

    async def play(host):
        await host.open("a", 0, task_of("a"))
        start = time.monotonic()
        outcomes = [await host.step("a", 0, turn_of("close requests"))]
        outcomes += [await host.step("a", turn, turn_of("say x")) for turn in range(1, 4)]
        assert time.monotonic() - start < 30
        return [outcome.failure for outcome in outcomes]

    found = with_host([config_of("Obedient", recovery="once")], play)
    assert found[0] is None and found[-1].startswith(("lost process", "interrupted"))


@pytest.fixture
def fragile(tmp_path, monkeypatch):
    """Return an environment that starts while a file exists, and the file."""
    monkeypatch.setattr("megadapo.environments.processes.FIRST_PAUSE_S", 0.2)
    python, allowed = tmp_path / "python", tmp_path / "allowed"
    python.write_text(f'#!/bin/sh\n[ -e {allowed} ] || exit 4\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    allowed.touch()
    return config_of("Obedient", python=str(python), num_workers=2), allowed


def test_process_that_cannot_be_started_is_tried_again_after_a_pause(fragile):
    """Catches a shortage of a moment that costs the run its environment for good."""
    config, allowed = fragile

    async def play():
        processes = EnvironmentProcesses(config)
        try:
            await processes.start()
            first, _ = await processes.new_object()
            allowed.unlink()
            os.kill(processes.process_ids[1], signal.SIGKILL)
            while len(processes.process_ids) > 1:
                await asyncio.sleep(0.01)
            with pytest.raises(CallError, match="started 3 times in a row: exit code 4"):
                await processes.new_object()
            other, _ = await processes.new_object()
            assert other is first, "it can play meanwhile"
            allowed.touch()
            await asyncio.sleep(0.2)
            assert (await processes.new_object())[0] is not first
            lost, refused = processes.warnings
            assert "SIGKILL" in lost and "trying again with pauses" in refused
        finally:
            await processes.stop()

    asyncio.run(play())


def test_starts_that_wait_end_together_with_a_failed_one_or_the_run(fragile, monkeypatch):
    """Episodes would wait one after another, and a stopped run for each of them."""
    config, allowed = fragile
    allowed.unlink()

    async def new_objects(processes):
        return await asyncio.gather(
            *(processes.new_object() for _ in range(9)), return_exceptions=True
        )

    async def play():
        processes = EnvironmentProcesses(config)
        assert {type(one) for one in await new_objects(processes)} == {CallError}
        start = time.monotonic()
        assert {str(one) for one in await new_objects(processes)} == {f"lost process: {REFUSED}"}
        assert 0.1 < time.monotonic() - start < 20, "one after another they take 100 s"
        monkeypatch.setattr("megadapo.environments.processes.FIRST_PAUSE_S", 60.0)
        await new_objects(processes)
        waiting = asyncio.create_task(new_objects(processes))
        await asyncio.sleep(0.05)
        await processes.stop()
        assert {"stopped" in str(one) for one in await asyncio.wait_for(waiting, 10)} == {True}

    asyncio.run(play())


def test_children_of_an_environment_end_with_it(tmp_path):
    (outcome,) = answers([f"start {tmp_path / 'pid'}"])
    assert content_of(outcome) == "started"
    assert not _runs(int((tmp_path / "pid").read_text()))


def test_processes_end_with_a_killed_host(tmp_path):
    """Their host cannot kill them any more, so they notice the end of their pipe."""
    program = f"""
import asyncio, os
from tests.support.rollout.hosts import *
async def play(host):
    await host.open("a", 0, task_of("a"))
    await host.step("a", 0, turn_of("start {tmp_path / "child"}"))
    open({str(tmp_path / "worker")!r}, "w").write(str(host.process_ids[0]))
    os._exit(1)
with_host([config_of("Obedient")], play)
"""

    async def run():
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
        await process.wait()

    asyncio.run(run())
    for name in ("worker", "child"):
        assert not _runs(int((tmp_path / name).read_text()))


def _runs(process_id: int) -> bool:
    """Return whether a process still runs after a moment; a zombie does not."""
    for _ in range(50):
        try:
            with open(f"/proc/{process_id}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return False
            os.kill(process_id, 0)
        except (FileNotFoundError, ProcessLookupError):
            return False
        time.sleep(0.1)
    return True
