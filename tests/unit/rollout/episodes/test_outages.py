"""A server that is away is waited for when an episode begins, and not for ever."""

import asyncio
import time

import pytest

from tests.support.rollout.hosts import config_of, task_of, with_host


def away(tmp_path, num_resets: int):
    options = {"path": str(tmp_path / "resets.txt"), "num_resets": num_resets}
    return [config_of("Away", options=options)]


@pytest.mark.parametrize("num_resets", [3, 100])
def test_reset_waits_for_a_server_that_is_away_for_a_bounded_time(
    tmp_path, monkeypatch, num_resets
):
    """A server that starts again would fail every open episode, and one that never comes would
    hold up the run."""
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
