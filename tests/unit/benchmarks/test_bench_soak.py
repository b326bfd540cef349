"""A run whose processes grow or whose steps slow down fails the soak test."""

import os

import pytest
import soak
from soak import Soak


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    mib = {os.getpid(): 400.0, os.getppid(): 1000.0}
    monkeypatch.setattr(soak, "descendants", lambda pid: [os.getppid()])
    monkeypatch.setattr(soak, "private_bytes", lambda pid: int(mib[pid] * 2**20))
    return mib


def soaked(memory, growth, seconds, *, save_s=0.0):
    """Return a soak of 120 steps; in the first 30 the driver takes 300 MiB that it keeps.

    Every step after a tenth takes `save_s` longer.
    """
    found = Soak(num_steps=120, save_every=10)
    for step in range(1, 121):
        memory[os.getpid()] += 10.0 if step <= 30 else 0.0
        memory[os.getppid()] += growth
        beside_save = save_s if step % 10 == 1 and step > 1 else 0.0
        found.observe({"step": step, "time/step_s": seconds[step > 60] + beside_save})
    return found


def test_steady_growth_fails_and_early_growth_does_not(memory):
    grown = soaked(memory, 0.2, (2.0, 2.0))
    first, second = grown.processes()
    assert (first.pid, second.pid) == (os.getppid(), os.getpid())
    assert first.growth_mib == pytest.approx(20.0)
    assert (second.mib, second.growth_mib) == (700.0, pytest.approx(0.0))
    assert not grown.holds
    assert "DOES NOT HOLD" in soak.table(grown)
    assert soaked(memory, 0.05, (2.0, 2.0)).holds


def test_slower_steps_fail(memory):
    assert soaked(memory, 0.0, (2.0, 2.05)).holds
    slower = soaked(memory, 0.0, (2.0, 2.1))
    assert slower.slowdown == pytest.approx(1.05)
    assert not slower.holds
    assert soak.report(slower)["holds"] is False


def test_steps_slowed_by_saves_fail(memory):
    assert soaked(memory, 0.0, (2.0, 2.0), save_s=0.08).holds
    slower = soaked(memory, 0.0, (2.0, 2.0), save_s=0.2)
    assert (slower.beside_save, slower.slowdown) == (pytest.approx(1.1), pytest.approx(1.0))
    assert not slower.holds
    assert "during a save over the steps around it: 1.100" in soak.table(slower)


def test_processes_that_start_or_end_are_left_out(memory, monkeypatch):
    found = Soak(num_steps=12, save_every=10)
    for step in range(1, 13):
        if step == 10:
            monkeypatch.setattr(soak, "descendants", lambda pid: [])
        found.observe({"step": step, "time/step_s": 1.0})
    assert [one.pid for one in found.processes()] == [os.getpid()]
    assert found.beside_save is None and found.holds
