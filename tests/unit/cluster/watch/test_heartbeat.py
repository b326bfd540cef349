"""Would catch: a hung process that is waited for, a slow one ended, another one blamed."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from megadapo.cluster.watch import heartbeat
from megadapo.cluster.watch.heartbeat import Heart, Pulse, PulseWatch, all_beat, read_pulse
from megadapo.errors import ProcessHungError

LIMIT_S = 60.0


class Ranks:
    """Two processes whose pulses are what the test says, and a clock that it turns."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.pulses = {"rank 0": Pulse(), "rank 1": Pulse()}
        self._paths = [folder / f"{name}.pulse" for name in self.pulses]
        self.watch = PulseWatch(
            list(self.pulses),
            self._paths,
            [folder / f"{name}.log" for name in self.pulses],
            in_pieces=["update"],
            limit_s=LIMIT_S,
            limit="some.key",
            clock=lambda: self.now,
        )

    def live(self, seconds: float, *, dead: str = "", busy: tuple[str, ...] = ()) -> None:
        """Let time pass with a beat and a look every 2 s; who is busy does a piece in each."""
        until = self.now + seconds
        while self.now < until:
            self.now += 2.0
            for (name, pulse), path in zip(self.pulses.items(), self._paths, strict=True):
                fields = asdict(pulse)
                fields["beats"] += name != dead
                fields["pieces"] += name in busy
                self.pulses[name] = Pulse(**fields)
                path.write_text(json.dumps(fields))
            self.watch.look()

    def say(self, **fields: object) -> None:
        self.pulses = {name: Pulse(**asdict(one) | fields) for name, one in self.pulses.items()}


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


def test_who_is_silent_is_named_alone_in_whatever_it_does(ranks: Ranks, tmp_path: Path) -> None:
    ranks.live(3 * LIMIT_S)
    ranks.say(doing="update")
    ranks.live(10, busy=("rank 0", "rank 1"))
    with pytest.raises(ProcessHungError) as caught:
        ranks.live(LIMIT_S + 4, dead="rank 1")
    assert str(caught.value) == (
        f"rank 1 gave no sign of life for 60 s in update (some.key); stacks: {tmp_path}/rank 1.log"
    )


def test_who_is_behind_is_named_where_all_wait(ranks: Ranks) -> None:
    ranks.say(doing="update")
    ranks.live(10, busy=("rank 0", "rank 1"))
    ranks.live(10, busy=("rank 0",))
    with pytest.raises(ProcessHungError, match="^rank 1 did not get on for 60 s in update"):
        ranks.live(LIMIT_S + 4)


def test_all_are_named_where_none_is_behind(ranks: Ranks) -> None:
    ranks.say(doing="update")
    with pytest.raises(ProcessHungError, match="^rank 0, rank 1 did not get on"):
        ranks.live(LIMIT_S + 4)


def test_a_slow_one_may_take_ten_times_its_slowest_piece(ranks: Ranks) -> None:
    ranks.say(doing="update", slowest_s=30.0)
    ranks.live(290)
    with pytest.raises(ProcessHungError, match="for 300 s"):
        ranks.live(20)


def test_what_is_not_done_in_pieces_may_take_its_time_and_an_idle_one_any(ranks: Ranks) -> None:
    ranks.say(doing="load")
    ranks.live(10 * LIMIT_S)
    ranks.say(doing="")
    ranks.live(10 * LIMIT_S)


def test_a_reader_that_was_stopped_itself_blames_nobody(ranks: Ranks) -> None:
    ranks.say(doing="update")
    ranks.live(10, busy=("rank 0", "rank 1"))
    ranks.now += 100 * LIMIT_S
    ranks.watch.look()
    ranks.live(LIMIT_S / 2)


def test_a_process_whose_pulse_cannot_be_seen_is_named(tmp_path: Path) -> None:
    """As on a node where the run's folder is another one."""
    now = [0.0]
    paths = [tmp_path / "none.pulse"]
    limits = {"in_pieces": [], "limit_s": LIMIT_S, "limit": "key", "clock": lambda: now[0]}
    watch = PulseWatch(["rank 0"], paths, paths, **limits)
    with pytest.raises(ProcessHungError, match="rank 0 gave no sign of life"):
        for _ in range(40):
            now[0] += 2.0
            watch.look()


def test_a_heart_beats_and_says_what_is_done(tmp_path: Path) -> None:
    path = tmp_path / "rank.pulse"
    path.write_text("x" * 1000)
    heart = Heart(path, limit_s=0.04)
    with heart.at("update"):
        for _ in range(3):
            heart.piece()
            time.sleep(0.05)
        wait_for(path, lambda pulse: pulse.pieces == 3 and pulse.doing == "update")
    wait_for(path, lambda pulse: pulse.doing == "" and pulse.beats > 3)
    with heart.at("update"):
        assert heart.pulse().slowest_s > 0.04
    with heart.at("logprobs"):
        assert heart.pulse().slowest_s == 0.0


def wait_for(path: Path, is_so) -> None:
    deadline = time.monotonic() + 20
    while (pulse := read_pulse(path)) is None or not is_so(pulse):
        assert time.monotonic() < deadline, pulse
        time.sleep(0.01)


def test_one_that_hangs_is_told_from_those_that_are_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that a stopped rank has a part in would be waited for until its deadline."""
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.5)
    busy, stopped = tmp_path / "busy", tmp_path / "stopped"
    with Heart(busy, limit_s=0.4).at("begin_save"):
        assert all_beat([busy])
        stopped.write_text(json.dumps(asdict(Pulse(beats=7))))
        assert not all_beat([busy, stopped])


def test_a_process_without_a_heart_may_say_that_it_gets_on() -> None:
    heartbeat.piece_done()
    with heartbeat.at_work("update"):
        heartbeat.piece_done()
