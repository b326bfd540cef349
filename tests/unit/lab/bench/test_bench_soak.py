"""The verdict on a long run: what grows or gets slower must not pass."""

from __future__ import annotations

import os

import pytest

from megadapo.lab.bench import soak
from megadapo.lab.bench.soak import Soak


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """MiB of the only two processes there are, to be changed as a run goes on."""
    mib = {os.getpid(): 400.0, os.getppid(): 1000.0}
    monkeypatch.setattr(soak, "descendants", lambda pid: [os.getppid()])
    monkeypatch.setattr(soak, "private_bytes", lambda pid: int(mib[pid] * 2**20))
    return mib


def soaked(
    memory: dict[int, float],
    growth: float,
    seconds: tuple[float, float],
    *,
    save_s: float = 0.0,
) -> Soak:
    """120 steps, in the first 30 of which the driver takes 300 MiB that it keeps.

    `save_s`: what the step after every tenth takes longer.
    """
    found = Soak(num_steps=120, save_every=10)
    for step in range(1, 121):
        memory[os.getpid()] += 10.0 if step <= 30 else 0.0
        memory[os.getppid()] += growth
        beside_save = save_s if step % 10 == 1 and step > 1 else 0.0
        found.look({"step": step, "time/step_s": seconds[step > 60] + beside_save})
    return found


def test_a_process_that_grows_step_after_step_is_told_and_one_that_has_grown_is_not(memory):
    """Caches that fill up at the beginning are no leak, and a leak is not hidden by them."""
    grown = soaked(memory, 0.2, (2.0, 2.0))
    first, second = grown.processes()
    assert (first.pid, second.pid) == (os.getppid(), os.getpid())
    assert first.growth_mib == pytest.approx(20.0)
    assert (second.mib, second.growth_mib) == (700.0, pytest.approx(0.0))
    assert not grown.holds
    assert "DOES NOT HOLD" in soak.table(grown)
    assert soaked(memory, 0.05, (2.0, 2.0)).holds


def test_steps_that_get_slower_do_not_hold(memory):
    assert soaked(memory, 0.0, (2.0, 2.05)).holds
    slower = soaked(memory, 0.0, (2.0, 2.1))
    assert slower.slowdown == pytest.approx(1.05)
    assert not slower.holds
    assert soak.report(slower)["holds"] is False


def test_steps_that_saves_make_slower_do_not_hold(memory):
    """The step after a save, not the one before it."""
    assert soaked(memory, 0.0, (2.0, 2.0), save_s=0.08).holds
    slower = soaked(memory, 0.0, (2.0, 2.0), save_s=0.2)
    assert (slower.beside_save, slower.slowdown) == (pytest.approx(1.1), pytest.approx(1.0))
    assert not slower.holds
    assert "beside a save over the steps around it: 1.100" in soak.table(slower)


def test_a_process_that_came_or_went_meanwhile_is_left_out(memory, monkeypatch):
    """A verifier's worker that is started anew would look like one that grows or shrinks."""
    found = Soak(num_steps=12, save_every=10)
    for step in range(1, 13):
        if step == 10:
            monkeypatch.setattr(soak, "descendants", lambda pid: [])
        found.look({"step": step, "time/step_s": 1.0})
    assert [one.pid for one in found.processes()] == [os.getpid()]
    assert found.beside_save is None and found.holds
