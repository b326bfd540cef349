"""The host of environments: calls of engines that repeat, differ or come out of order."""

import asyncio
import errno
import os
import signal
import time

import pytest

from megadapo.rollout.episodes.host import EpisodeHost
from megadapo.rollout.journal import record_log
from tests.support.rollout.hosts import (
    ANSWERS,
    RECOVERIES,
    TURNS,
    actions,
    all_counting,
    config_of,
    content_of,
    counting,
    digests,
    first_life,
    play,
    recorded,
    task_of,
    turn_of,
    with_host,
)


def test_step_that_was_done_is_answered_and_not_repeated(tmp_path):
    async def run(host):
        for index, name in enumerate(RECOVERIES):
            await host.open(name, index, task_of(name))
            assert await play(host, 0, 3, name) == ANSWERS[:3]
            assert await play(host, 0, 4, name) == ANSWERS[:4]
            known = await host.open(name, index, task_of(name), digests(1))
            assert recorded(known) == ANSWERS[1:4]
            assert len(actions(tmp_path, name)) == 4

    with_host(all_counting(tmp_path, *RECOVERIES), run)


def test_host_without_a_trainer_needs_no_weights(tmp_path):
    """Catches `megadapo rollout` and evaluations before an update, whose episodes all fail."""

    async def run():
        host = EpisodeHost([counting(tmp_path)], tmp_path / "journal")
        try:
            await host.start()
            await host.open("a", 0, task_of("a"))
            assert await play(host, 0, 2) == ANSWERS[:2]
            host.begin(7, "weights")
            assert await play(host, 2, 3) == ANSWERS[2:3]
        finally:
            await host.stop()

    asyncio.run(run())


def test_open_waits_for_a_step_whose_engine_died(tmp_path):
    options = {"path": str(tmp_path / "actions.txt"), "seconds": 0.3}

    async def run(host):
        await host.open("a", 0, task_of("a"))
        dead = asyncio.create_task(host.step("a", 0, TURNS[0]))
        await asyncio.sleep(0.1)
        dead.cancel()
        return recorded(await host.open("a", 0, task_of("a")))

    assert with_host([config_of("Counting", options=options)], run) == ANSWERS[:1]
    assert len(actions(tmp_path)) == 1


def test_other_tokens_of_a_done_turn_replace_it_and_what_followed(tmp_path):
    names = ("replay", "state")

    async def run(host):
        for index, name in enumerate(names):
            await host.open(name, index, task_of(name))
            await host.step(name, 0, TURNS[0])
            await host.step(name, 1, turn_of("act 70"))
            await host.step(name, 2, turn_of("act 71"))
            assert await play(host, 1, 3, name) == ANSWERS[1:3]
            assert recorded(await host.open(name, index, task_of(name))) == ANSWERS[:3]

    async def again(host):
        for index, name in enumerate(names):
            assert recorded(await host.open(name, index, task_of(name))) == ANSWERS[:3]

    for life in (run, again):
        with_host(all_counting(tmp_path, *names), life, tmp_path / "journal")


def test_other_tokens_of_a_done_turn_fail_once(tmp_path):
    async def run(host):
        await host.open("a", 0, task_of("a"))
        await play(host, 0, 2)
        changed = await host.step("a", 1, turn_of("act 70"))
        after = await host.step("a", 2, TURNS[2])
        assert len(actions(tmp_path)) == 2
        return changed.failure, after.failure

    failures = with_host([counting(tmp_path, recovery="once")], run)
    assert set(failures) == {
        'interrupted: turn 1 was done with other tokens, and recovery = "once"'
    }


def test_action_that_ends_its_process_is_tried_a_bounded_number_of_times():
    async def run(host):
        await host.open("a", 0, task_of("a"))
        return (await host.step("a", 0, turn_of("exit 3"))).failure

    assert with_host([config_of("Obedient")], run) == "lost process: exit code 3"


def test_repeated_action_with_another_answer_fails(tmp_path):
    async def run(host):
        await host.open("a", 0, task_of("a"))
        await host.step("a", 0, TURNS[0])
        await host.step("a", 1, TURNS[1])
        for pid in host.process_ids:
            os.kill(pid, signal.SIGKILL)
        return (await host.step("a", 2, TURNS[2])).failure

    failure = with_host([counting(tmp_path, "Changing")], run)
    assert failure == "not repeatable: turn 0 was answered differently before"


@pytest.mark.parametrize("recovery", ["replay", "once"])
def test_full_disk_fails_only_episodes_with_effects_outside(tmp_path, monkeypatch, recovery):
    real, calls = os.pwrite, []

    def full(descriptor, data, offset):
        # threads of other tests may still write
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(tmp_path)):
            return real(descriptor, data, offset)
        calls.append(offset)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    async def run(host):
        await host.open("a", 0, task_of("a"))
        monkeypatch.setattr(record_log.os, "pwrite", full)
        outcomes = [await host.step("a", n, TURNS[n]) for n in range(3)]
        monkeypatch.undo()
        (warning,) = host.drain_warnings()
        assert "environments-version-1.log: cannot be written: No space left" in warning
        host.begin(2, "weights")
        await host.open("b", 0, task_of("b"))
        assert content_of(await host.step("b", 0, TURNS[0])) == ANSWERS[0]
        return [outcome.failure for outcome in outcomes]

    config = counting(tmp_path, recovery=recovery)
    failures = with_host([config], run, tmp_path / "journal")
    if recovery == "replay":
        assert failures == [None] * 3
    else:
        assert failures[0] is None
        assert failures[1:] == ["journal: No space left on device"] * 2
        assert len([one for one in actions(tmp_path) if one.startswith("a ")]) == 1


def test_other_task_under_a_known_name_is_another_episode(tmp_path):
    first_life(tmp_path, {"a": "replay"}, 2)

    async def run(host):
        opened = await host.open("a", 0, task_of("a", seed=6))
        assert opened.recorded == ()
        wrong = await host.open("a", 0, task_of("a", seed=7))
        assert wrong.failure == "wrong call: a is open with another task"
        return opened.observation.messages[0]["content"]

    assert with_host([counting(tmp_path)], run, tmp_path / "journal") == "begin at 6"


def test_branch_of_a_repeated_group_follows_its_new_parent(tmp_path):
    """It has the name of the first try's, whose turns it would be said to have lost."""

    async def run(host):
        await host.open("a", 0, task_of("a"))
        await host.open("c", 0, task_of("a"))
        await play(host, 0, 2, "a")
        await host.step("c", 0, turn_of("act 90"))
        await host.open("b", 0, task_of("a"), digests(2), parent="a")
        await host.step("b", 2, TURNS[2])
        assert (await host.open("b", 0, task_of("a"), ["act 90"], parent="c")).failure is None
        return content_of(await host.step("b", 1, TURNS[1]))

    async def again(host):
        assert (await host.open("b", 0, task_of("a"), digests(1), parent="a")).failure is None
        return content_of(await host.step("b", 1, turn_of("act 71")))

    configs = [counting(tmp_path, recovery="replay")]
    other = 31 * (31 * 5 + 90) + 1
    assert with_host(configs, run, tmp_path / "journal") == f"now {other}"
    assert with_host(configs, again, tmp_path / "journal") == f"now {31 * 155 + 71}"


def test_calls_out_of_order_fail_and_nothing_is_done(tmp_path):
    async def run(host):
        early = await host.step("a", 0, TURNS[0])
        await host.open("a", 0, task_of("a"))
        skipped = await host.step("a", 1, TURNS[1])
        assert not (tmp_path / "actions.txt").exists()
        assert await play(host, 0, 1) == ANSWERS[:1]
        return early.failure, skipped.failure

    failures = with_host([counting(tmp_path)], run)
    assert failures == ("wrong call: a is not open", "wrong call: turn 1 comes after 0 turns")


def test_journal_writes_calls_of_the_same_time_together(tmp_path, monkeypatch):
    real, num_syncs = os.fsync, []

    def sync(descriptor):
        num_syncs.append(descriptor)
        time.sleep(0.01)
        real(descriptor)

    async def run(host):
        monkeypatch.setattr(record_log.os, "fsync", sync)
        names = [f"{number}" for number in range(100)]
        await asyncio.gather(*(host.open(one, 0, task_of(one)) for one in names))
        await asyncio.gather(*(host.step(one, 0, TURNS[0]) for one in names))

    with_host([counting(tmp_path)], run, tmp_path / "journal")
    assert len(num_syncs) < 100, "300 records"
