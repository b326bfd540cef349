"""Sentences about where two schedules part, though no run saved its groups."""

from dataclasses import replace

import pytest

from megadapo.errors import DataError
from megadapo.lab.diff.compare import about_schedules
from megadapo.rollout.sampling.schedule import SCHEDULE_FILE, SamplingSchedule
from tests.support.rollout.groups import make_group

BATCH = [make_group(index) for index in (3, 5)]


def write(folder, batch=BATCH, counts=(7, 0), rules="rules", num_records=3):
    """Write a schedule with a batch between two publications."""
    folder.mkdir()
    schedule = SamplingSchedule(folder / SCHEDULE_FILE, rules)
    schedule.pause(0, "00" * 32, 0, {})
    if num_records > 1:
        schedule.take(1, 8, [4], batch)
        schedule.pause(1, "aa" * 32, 9, {4: counts})
    schedule.close()
    return folder


OTHER = [BATCH[0], replace(BATCH[1], scores=(replace(BATCH[1].scores[0], reward=0.5),))]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "The schedules agree in 3 takes and publications, with all their tokens."),
        ({"num_records": 1}, "The schedules agree in 1 takes and publications"),
        ({"rules": "other"}, "The schedules have other rules"),
        ({"batch": OTHER}, "part at step 1, group 5: its tokens, log-probs, versions or rewards"),
        ({"batch": BATCH[:1]}, "part at step 1, group 5: it is in the batch of A alone."),
        (
            {"counts": (7, 2)},
            "version 1, group 4, response 1: it has 0 tokens at the pause in A, and",
        ),
        # responses that one run has not begun have no counts
        (
            {"counts": ()},
            "version 1, group 4, response 0: it has 7 tokens at the pause in A, and 0",
        ),
    ],
)
def test_first_difference_is_named_by_step_and_group(tmp_path, changes, told):
    """Catches two asynchronous runs that differ for no reason that anyone can see."""
    assert told in about_schedules(write(tmp_path / "a"), write(tmp_path / "b", **changes))


def test_runs_without_a_schedule_have_nothing_to_tell(tmp_path):
    write(tmp_path / "a")
    (tmp_path / "b").mkdir()
    assert about_schedules(tmp_path / "a", tmp_path / "b") == ""
    (tmp_path / "b" / SCHEDULE_FILE).write_bytes(b"")
    assert "agree in 0 takes" in about_schedules(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(("damaged", "num_left"), [("a", 2), ("b", 0)])
def test_damage_is_named(tmp_path, damaged, num_left):
    """Catches two runs that are said to agree, although one of the files cannot be read on."""
    for name in ("a", "b"):
        write(tmp_path / name)
    path = tmp_path / damaged / SCHEDULE_FILE
    data = bytearray(path.read_bytes())
    data[-1 if num_left else 30] ^= 1
    path.write_bytes(data)
    told = about_schedules(tmp_path / "a", tmp_path / "b")
    assert told.startswith(f"The schedules agree in {num_left} takes and publications, with all")
    record = num_left + 1 if num_left else 0
    assert f" {path}: record {record} is not whole (a damaged record at byte " in told


def test_schedule_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def fail(path, read):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("megadapo.lab.diff.compare.read_records", fail)
    with pytest.raises(DataError, match="schedule.log cannot be read: Input/output error"):
        about_schedules(write(tmp_path / "a"), write(tmp_path / "b"))
