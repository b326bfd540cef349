"""The host of environments: every action is done once, whichever process dies."""

import asyncio
import errno
import os
import signal
import time

import pytest

from megadapo.rollout.episodes.journal import MAX_COPIES, EpisodeJournal, EpisodeRecord
from megadapo.rollout.journal import record_log
from tests.support.rollout.groups import payloads
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
            assert opened.failure.startswith("interrupted:")
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
                assert outcome.failure.startswith(("interrupted:", "lost process:"))
                assert len(actions(tmp_path, name)) == 2
            else:
                assert content_of(outcome) == ANSWERS[2]
        assert host.drain_warnings() == [
            "environment Counting: lost process: signal SIGKILL" for _ in ("replay", "state")
        ]

    with_host(all_counting(tmp_path, *RECOVERIES), run)


def test_lost_process_in_an_action_with_effects_outside(tmp_path):
    """Catches an action that another process does again because the first one gave no answer."""
    options = {"path": str(tmp_path / "actions.txt"), "seconds": 0.5}

    async def run(host):
        await host.open("a", 0, task_of("a"))
        acting = asyncio.create_task(host.step("a", 0, TURNS[0]))
        while not (tmp_path / "actions.txt").exists():
            await asyncio.sleep(0.01)
        for pid in host.process_ids:
            os.kill(pid, signal.SIGKILL)
        return (await acting).failure

    failure = with_host([config_of("Counting", options=options, recovery="once")], run)
    assert failure.startswith("lost process:") and len(actions(tmp_path)) == 1


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


@pytest.mark.parametrize("call", ["pread", "listdir"])
def test_journal_that_cannot_be_read_at_first_is_read_later(tmp_path, monkeypatch, call):
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

    monkeypatch.setattr(record_log.os, call, fail)
    failure = with_host([counting(tmp_path, recovery="once")], run, tmp_path / "journal")
    assert failure.startswith("interrupted:")
    assert len(actions(tmp_path)) == 1


async def test_folder_that_cannot_be_listed_keeps_known_episodes(tmp_path, monkeypatch):
    """Otherwise a second error loses what the files say of open episodes."""

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    journal = EpisodeJournal(tmp_path / "journal")
    journal.begin(1, {})
    await journal.write("open", "a", EpisodeRecord("known", is_reset=True))
    monkeypatch.setattr(record_log.os, "pwrite", fail)
    with pytest.raises(OSError):
        await journal.write("open", "b", EpisodeRecord("lost", is_reset=True))
    monkeypatch.setattr(record_log.os, "listdir", fail)
    journal.begin(2, {})
    assert journal.find("a").identity == "known"
    monkeypatch.undo()
    await journal.close()


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


def test_episodes_dropped_in_the_middle_of_an_action_are_not_kept(tmp_path):
    """Catches records that each file of later weights copies until the run ends."""
    folder = tmp_path / "journal"
    options = {"path": str(tmp_path / "actions.txt"), "seconds": 0.5}

    async def run(host):
        for index, name in enumerate(RECOVERIES):
            await host.open(name, index, task_of(name))
        playing = [asyncio.create_task(host.step(one, 0, TURNS[0])) for one in RECOVERIES]
        await asyncio.sleep(0.2)
        closing = asyncio.create_task(host.close(RECOVERIES))
        await asyncio.sleep(0.1)
        host.begin(2, "newer")
        await asyncio.gather(*playing, closing)
        host.begin(3, "newest")

    configs = [config_of("Counting", options=options, recovery=how) for how in RECOVERIES]
    with_host(configs, run, folder)
    assert len(payloads(folder / "environments-version-3.log")) == 1, "what identifies the file"


def test_episodes_that_no_restart_continues_are_forgotten(tmp_path):
    """Catches a journal that grows with every restart, and one that forgets at once."""
    folder = tmp_path / "journal"
    first_life(tmp_path, {"a": "replay"}, 2)

    def num_records(version):
        return len(payloads(folder / f"environments-version-{version}.log")) - 1

    async def run(host):
        for version in range(2, MAX_COPIES + 10):
            host.begin(version, "weights")
        assert [num_records(one) for one in (3, MAX_COPIES - 1, MAX_COPIES + 9)] == [1, 1, 0]

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


@pytest.mark.parametrize(("share", "num_known"), [(0.0, 0), (0.6, 1), (0.99, 2)])
def test_damaged_journal_loses_turns_and_invents_none(tmp_path, share, num_known):
    """A response with turns that are lost fails."""
    first_life(tmp_path, {"a": "replay"}, 3)
    path = tmp_path / "journal" / "environments-version-1.log"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])

    async def run(host):
        known = recorded(await host.open("a", 0, task_of("a")))
        assert known == ANSWERS[:num_known]
        assert await play(host, num_known, 4) == ANSWERS[num_known:4]
        failure = (await host.open("lost", 0, task_of("lost"), digests(1))).failure
        assert failure.startswith("lost records:")

    with_host([counting(tmp_path)], run, tmp_path / "journal")


def away(tmp_path, num_resets: int):
    options = {"path": str(tmp_path / "resets.txt"), "num_resets": num_resets}
    return [config_of("Away", options=options)]


@pytest.mark.parametrize("num_resets", [3, 100])
def test_reset_waits_for_a_server_that_is_away_for_a_bounded_time(
    tmp_path, monkeypatch, num_resets
):
    """Catches a restart that fails all episodes, and a server away for good that holds the run."""
    monkeypatch.setattr("megadapo.rollout.episodes.host.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("megadapo.rollout.episodes.host.LONGEST_PAUSE_S", 0.32)

    async def run(host):
        opened = await host.open("a", 0, task_of("a"))
        assert len(host.drain_warnings()) == 1
        return opened.failure

    failure = with_host(away(tmp_path, num_resets), run)
    assert (failure is None) == (num_resets == 3), failure
    num_attempts = (tmp_path / "resets.txt").read_text().count("reset")
    assert num_attempts == (4 if num_resets == 3 else 7)


@pytest.mark.parametrize("ends", ["close", "stop"])
def test_end_does_not_wait_for_a_server_that_is_away(tmp_path, monkeypatch, ends):
    """A stopped run would hang for a minute."""
    monkeypatch.setattr("megadapo.rollout.episodes.host.FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr("megadapo.rollout.episodes.host.LONGEST_PAUSE_S", 60.0)

    async def run(host):
        opening = asyncio.create_task(host.open("a", 0, task_of("a")))
        while not host.drain_warnings():
            await asyncio.sleep(0.01)
        start = time.monotonic()
        await (host.close(["a"]) if ends == "close" else host.stop())
        assert time.monotonic() - start < 30
        assert "no server" in (await opening).failure

    with_host(away(tmp_path, 100), run)
