"""The host of environments: every action is done once, whichever process dies."""

import asyncio
import errno
import os
import random
import signal
import time

import pytest

from megadapo.rollout.episodes.host import EpisodeHost
from megadapo.rollout.episodes.journal import MAX_COPIES
from megadapo.rollout.episodes.types import cause_of
from megadapo.rollout.journal import record_log
from tests.support.rollout.hosts import config_of, content_of, task_of, turn_of, with_host

TURNS = [turn_of(f"act {number}") for number in range(5)]
ANSWERS = ["now 155", "now 4806", "now 148988", "now 618619", "now 177136"]


RECOVERIES = ("replay", "state", "once")


def counting(tmp_path, name="Counting", **fields):
    return config_of(name, options={"path": str(tmp_path / "actions.txt")}, **fields)


def all_counting(tmp_path, *recoveries: str):
    return [counting(tmp_path, recovery=recovery) for recovery in recoveries]


def actions(tmp_path, episode: str = "a") -> list[str]:
    """Return the actions of an episode that its environment has done."""
    lines = (tmp_path / "actions.txt").read_text().splitlines()
    return [line for line in lines if line.startswith(f"{episode} ")]


async def play(host, start: int, stop: int, episode: str = "a") -> list[str]:
    return [content_of(await host.step(episode, n, TURNS[n])) for n in range(start, stop)]


def first_life(tmp_path, names: dict[str, str], num_turns: int) -> None:
    """Play some turns of episodes, and stop as a killed run does: nothing is closed.

    `names`: the recovery of each episode by its name.
    """
    recoveries = sorted(set(names.values()))

    async def run(host):
        for name, recovery in names.items():
            await host.open(name, recoveries.index(recovery), task_of(name))
            await play(host, 0, num_turns, name)

    with_host(all_counting(tmp_path, *recoveries), run, tmp_path / "journal")


def digests(num_turns: int) -> list[str]:
    return [turn.digest for turn in TURNS[:num_turns]]


def recorded(opened) -> list[str]:
    assert opened.failure is None, opened.failure
    assert opened.observation.messages[0]["content"] == "begin at 5"
    sampled = [one.sampled for one in opened.recorded]
    assert sampled == [turn.sampled for turn in TURNS if turn.sampled in sampled]
    return [content_of(one.outcome) for one in opened.recorded]


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
    """Catches `megadapo rollout`, or an evaluation that a restart continues before any update,
    whose episodes all fail."""

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


def test_restart_takes_recorded_turns_of_the_same_weights(tmp_path):
    names = {f"{how}-{known}": how for how in ("replay", "state") for known in (0, 2, 3)}
    first_life(tmp_path, names, 3)

    async def run(host):
        for name, how in names.items():
            num_known = int(name[-1])
            index = ("replay", "state").index(how)
            known = await host.open(name, index, task_of(name), digests(num_known))
            assert recorded(known) == ANSWERS[num_known:3]
            assert await play(host, 3, 5, name) == ANSWERS[3:]
            # a replay repeats three actions, and a state none
            assert len(actions(tmp_path, name)) == (8 if how == "replay" else 5)

    with_host(all_counting(tmp_path, "replay", "state"), run, tmp_path / "journal")


def test_restart_with_other_weights_ignores_turns_beyond_the_response(tmp_path):
    names = ("replay", "state")
    first_life(tmp_path, {name: name for name in names}, 3)

    async def run(host):
        for index, name in enumerate(names):
            assert recorded(await host.open(name, index, task_of(name), digests(1))) == []
            assert await play(host, 1, 3, name) == ANSWERS[1:3]

    configs = all_counting(tmp_path, *names)
    with_host(configs, run, tmp_path / "journal", weights="others")


@pytest.mark.parametrize("weights", ["weights", "others"])
def test_restart_fails_an_episode_with_effects_outside(tmp_path, weights):
    names = ("knows-0", "knows-1", "knows-2")
    first_life(tmp_path, dict.fromkeys(names, "once"), 2)

    async def run(host):
        for num_known, name in enumerate(names):
            opened = await host.open(name, 0, task_of(name), digests(num_known))
            stepped = await host.step(name, 2, TURNS[2])
            assert stepped.failure == opened.failure
            assert cause_of(opened.failure) == "interrupted"
            assert len(actions(tmp_path, name)) == 2

    with_host(all_counting(tmp_path, "once"), run, tmp_path / "journal", weights=weights)


def test_restart_continues_an_episode_with_effects_outside_before_its_first_action(tmp_path):
    first_life(tmp_path, {"a": "once"}, 0)

    async def run(host):
        assert recorded(await host.open("a", 0, task_of("a"))) == []
        return await play(host, 0, 2)

    config = counting(tmp_path, recovery="once")
    assert with_host([config], run, tmp_path / "journal", weights="others") == ANSWERS[:2]


def test_restart_keeps_an_ended_episode_with_effects_outside(tmp_path):
    last = turn_of("last 1")

    async def run(host):
        opened = await host.open("a", 0, task_of("a"))
        outcome = await host.step("a", 0, last)
        assert outcome.observation.done
        again = await host.step("a", 1, TURNS[1])
        assert again.failure == "wrong call: the episode has ended"
        await host.close(["a"])
        return len(opened.recorded)

    config = counting(tmp_path, recovery="once")
    assert with_host([config], run, tmp_path / "journal") == 0

    async def second(host):
        opened = await host.open("a", 0, task_of("a"))
        (one,) = opened.recorded
        assert opened.failure is None
        return one.outcome.observation.done

    assert with_host([config], second, tmp_path / "journal")
    assert len(actions(tmp_path)) == 1


def test_restart_in_the_middle_of_an_action(tmp_path):
    """It may have been done or not, so it is repeated only where that is harmless."""
    options = {"path": str(tmp_path / "actions.txt"), "seconds": 0.3}
    configs = [config_of("Counting", options=options, recovery=how) for how in RECOVERIES]

    async def run(host):
        for index, name in enumerate(RECOVERIES):
            await host.open(name, index, task_of(name))
            asyncio.create_task(host.step(name, 0, TURNS[0]))
        path = tmp_path / "actions.txt"
        while not path.exists() or len(path.read_text().splitlines()) < 3:
            await asyncio.sleep(0.01)

    with_host(configs, run, tmp_path / "journal")

    async def again(host):
        for index, name in enumerate(RECOVERIES):
            opened = await host.open(name, index, task_of(name))
            assert opened.recorded == ()
            outcome = await host.step(name, 0, TURNS[0])
            if name == "once":
                begun = 'interrupted: turn 0 was begun before a restart, and recovery = "once"'
                assert outcome.failure == opened.failure == begun
                assert len(actions(tmp_path, name)) == 1
            else:
                assert content_of(outcome) == ANSWERS[0]

    with_host(configs, again, tmp_path / "journal")


def test_lost_processes_between_two_turns(tmp_path):
    async def run(host):
        for index, name in enumerate(RECOVERIES):
            await host.open(name, index, task_of(name))
            await play(host, 0, 2, name)
        for pid in host.process_ids:
            os.kill(pid, signal.SIGKILL)
        for name in RECOVERIES:
            outcome = await host.step(name, 2, TURNS[2])
            if name == "once":
                assert cause_of(outcome.failure) in ("interrupted", "lost process")
                assert len(actions(tmp_path, name)) == 2
            else:
                assert content_of(outcome) == ANSWERS[2]
        assert host.drain_warnings() == [
            "environment Counting: lost process: signal SIGKILL" for _ in ("replay", "state")
        ]

    with_host(all_counting(tmp_path, *RECOVERIES), run)


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


def test_journal_of_new_weights_has_all_of_open_episodes(tmp_path):
    """Older files are deleted with the next checkpoint."""
    folder = tmp_path / "journal"
    names = ("replay", "state")

    async def run(host):
        for index, name in enumerate(names):
            await host.open(name, index, task_of(name))
            await play(host, 0, 2, name)
        host.begin(2, "newer")
        for name in names:
            await play(host, 2, 3, name)
        host.begin(3, "newest")

    with_host(all_counting(tmp_path, *names), run, folder)
    for version in (1, 2):
        (folder / f"environments-version-{version}.log").unlink()

    async def again(host):
        # opened late, under the next weights: the journal keeps it until then
        host.begin(4, "even newer")
        (folder / "environments-version-3.log").unlink()
        for index, name in enumerate(names):
            assert recorded(await host.open(name, index, task_of(name), digests(3))) == []
            assert await play(host, 3, 5, name) == ANSWERS[3:]

    with_host(all_counting(tmp_path, *names), again, folder, version=3, weights="newest")


def test_run_that_goes_back_to_older_weights_repeats_no_action(tmp_path):
    """A run resumes from the checkpoint of version 1; version 2 has done an action already."""
    folder = tmp_path / "journal"
    config = counting(tmp_path, recovery="once")

    async def run(host):
        await host.open("a", 0, task_of("a"))
        host.begin(2, "newer")
        await play(host, 0, 1)

    with_host([config], run, folder)

    async def again(host):
        return (await host.open("a", 0, task_of("a"))).failure

    failure = with_host([config], again, folder)
    assert failure == 'interrupted: turn 0 was begun before a restart, and recovery = "once"'


def test_journal_that_cannot_be_read_at_first_is_read_later(tmp_path, monkeypatch):
    """Otherwise an action with effects outside would be repeated."""
    first_life(tmp_path, {"a": "once"}, 1)

    async def run(host):
        # only the first call of begin fails
        monkeypatch.undo()
        unknown = await host.open("a", 0, task_of("a"))
        assert unknown.failure == "journal: Input/output error"
        await host.close(["a"])
        host.begin(2, "weights")
        return (await host.open("a", 0, task_of("a"))).failure

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(record_log.os, "pread", fail)
    failure = with_host([counting(tmp_path, recovery="once")], run, tmp_path / "journal")
    assert cause_of(failure) == "interrupted"
    assert len(actions(tmp_path)) == 1


def test_episode_without_records_survives_two_restarts(tmp_path):
    """Catches turns that were replayed from the response and are not recorded again."""
    sampled = [turn.action for turn in TURNS]
    left = [2, 3, 4]

    async def run(host):
        known = left.pop(0)
        opened = await host.open("a", 0, task_of("a"), digests(known), None, sampled[:known])
        assert recorded(opened) == []
        assert await play(host, known, known + 1) == ANSWERS[known : known + 1]

    while left:
        with_host([counting(tmp_path)], run, tmp_path / "journal")


@pytest.mark.parametrize("recovery", RECOVERIES)
def test_episode_dropped_in_the_middle_of_an_action_is_not_kept(tmp_path, recovery):
    """Catches records that each file of later weights copies until the run ends."""
    folder = tmp_path / "journal"
    options = {"path": str(tmp_path / "actions.txt"), "seconds": 0.5}

    async def run(host):
        await host.open("a", 0, task_of("a"))
        playing = asyncio.create_task(host.step("a", 0, TURNS[0]))
        await asyncio.sleep(0.2)
        closing = asyncio.create_task(host.close(["a"]))
        await asyncio.sleep(0.1)
        host.begin(2, "newer")
        await asyncio.gather(playing, closing)
        host.begin(3, "newest")

    with_host([config_of("Counting", options=options, recovery=recovery)], run, folder)
    assert (folder / "environments-version-3.log").stat().st_size == 0


def test_episodes_that_no_restart_continues_are_forgotten(tmp_path):
    """Catches a journal that grows with every restart, and one that forgets at once."""
    folder = tmp_path / "journal"
    first_life(tmp_path, {"a": "replay"}, 2)

    def size(version):
        return (folder / f"environments-version-{version}.log").stat().st_size

    async def run(host):
        for version in range(2, MAX_COPIES + 10):
            host.begin(version, "weights")
        assert size(3) > 0 and size(MAX_COPIES - 1) > 0 and size(MAX_COPIES + 9) == 0

    with_host([counting(tmp_path)], run, folder)


def test_weights_that_come_twice_write_no_record_over_another(tmp_path):
    """Catches two threads that append to one file."""

    async def run(host):
        names = [f"{number}" for number in range(200)]
        opening = [asyncio.create_task(host.open(one, 0, task_of(one))) for one in names]
        while not all(one.done() for one in opening):
            host.begin(1, "weights")
            await asyncio.sleep(0.001)

    folder = tmp_path / "journal"
    with_host([counting(tmp_path)], run, folder)

    async def again(host):
        assert host.drain_warnings() == []

    with_host([counting(tmp_path)], again, folder)


def test_damaged_journal_loses_turns_and_invents_none(tmp_path):
    """The file is cut at random bytes; a response with turns that are lost fails."""
    first_life(tmp_path, {"a": "replay"}, 3)
    path = tmp_path / "journal" / "environments-version-1.log"
    whole = path.read_bytes()
    rng = random.Random(0)
    config = counting(tmp_path)

    async def run(host):
        found = []
        for _ in range(12):
            path.write_bytes(whole[: rng.randrange(len(whole))])
            host._journal = type(host._journal)(tmp_path / "journal")
            host.begin(1, "weights")
            known = recorded(await host.open("a", 0, task_of("a")))
            assert known == ANSWERS[: len(known)]
            assert await play(host, len(known), 4) == ANSWERS[len(known) : 4]
            await host.close(["a"])
            failure = (await host.open("lost", 0, task_of("lost"), digests(1))).failure
            assert cause_of(failure) == "lost records"
            await host.close(["lost"])
            found.append(len(known))
        return found

    assert len(set(with_host([config], run, tmp_path / "journal"))) > 1


def test_other_task_under_a_known_name_is_another_episode(tmp_path):
    first_life(tmp_path, {"a": "replay"}, 2)

    async def run(host):
        opened = await host.open("a", 0, task_of("a", seed=6))
        assert opened.recorded == ()
        wrong = await host.open("a", 0, task_of("a", seed=7))
        assert wrong.failure == "wrong call: a is open with another task"
        return opened.observation.messages[0]["content"]

    assert with_host([counting(tmp_path)], run, tmp_path / "journal") == "begin at 6"


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
