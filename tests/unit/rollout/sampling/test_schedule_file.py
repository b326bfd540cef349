"""The schedule's file: damage that is not noticed, records that are lost, and its size."""

import errno
import io
import json
import os
import random
import tracemalloc

import pytest

from megadapo.errors import ConfigError, OracleError
from megadapo.rollout.journal import record_log
from megadapo.rollout.journal.record_log import read_records
from megadapo.rollout.sampling.schedule import SamplingSchedule, Take, WeightPause
from tests.support.rollout.groups import BATCH, COUNTS, payloads, read_schedule, write_schedule


def test_records_survive(tmp_path):
    first, take, pause = read_schedule(write_schedule(tmp_path / "a"))
    assert first == WeightPause(0, "0" * 16, 0, {})
    assert (take.step, take.next_index, take.open) == (1, 8, {4, 6, 7})
    assert take.digests.keys() == {3, 5}
    assert pause == WeightPause(1, "a" * 16, 9, COUNTS)


def test_file_names_its_format_and_rules(tmp_path):
    """A later version must not read records of another kind."""
    for name, rules in (("a", ()), ("b", ("some",))):
        schedule = SamplingSchedule(tmp_path / name, *rules)
        schedule.pause(0, "00" * 32, 0, {})
        schedule.close()
        header, _ = payloads(tmp_path / name)
        assert json.loads(header) == {"format": 1, "rules": "".join(rules)}


def test_own_records_come_before_those_to_repeat(tmp_path):
    """A run that repeats another one was killed and resumes."""
    known = read_schedule(write_schedule(tmp_path / "a"))
    own = SamplingSchedule(tmp_path / "b", "rules")
    own.pause(0, "00" * 32, 0, {})
    own.close()
    schedule = SamplingSchedule(tmp_path / "b", "rules", source=tmp_path / "a")
    for position, record in enumerate([*known, None]):
        schedule.resume_at(position)
        assert schedule.next == record


def test_only_a_new_cut_counts(tmp_path):
    """A resumed run publishes its weights again, and no token is made twice for it."""
    schedule = SamplingSchedule(tmp_path / "a", "rules")
    assert schedule.pause(0, "00" * 32, 0, {}) is True
    assert schedule.pause(0, "00" * 32, 0, {}) is False
    assert schedule.pause(1, "00" * 32, 0, {}) is True
    schedule.close()
    assert len(read_schedule(tmp_path / "a")) == 2


def test_until_is_of_the_next_cut_only(tmp_path):
    schedule = SamplingSchedule(None, "rules", source=write_schedule(tmp_path / "a"))
    assert [schedule.stop_at_tokens(4), schedule.stop_at_tokens(99)] == [(), ()]
    for position in (1, 2):
        schedule.resume_at(position)
        assert [schedule.stop_at_tokens(4), schedule.stop_at_tokens(99)] == [(7, 0, 12), ()]
    schedule.resume_at(3)
    assert schedule.stop_at_tokens(4) == ()


def test_source_that_is_not_whole_is_refused(tmp_path):
    """A run would repeat it up to the damage, and then decide without a word."""
    data = write_schedule(tmp_path / "a").read_bytes()
    header_end, path = read_ends(tmp_path / "a")[0], tmp_path / "b"
    flipped = bytearray(data)
    flipped[-1] ^= 1
    for damaged, problem in (
        (data[:-1], r"record 3 is not whole \(a torn record at byte .* resume that run"),
        (bytes(flipped), r"record 3 is not whole \(a damaged record at byte .* from a copy"),
        (data[: header_end + 1], r"record 1 is not whole \(a torn record"),
        (data[:header_end], "has no records; its run ended before the first publication"),
        (b"", "has no records"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=f"^--schedule: {path}:? {problem}"):
            SamplingSchedule(None, "rules", source=path)


@pytest.mark.parametrize("resumes", [False, True])
def test_end_of_the_source_is_named_once(tmp_path, caplog, resumes):
    """From there on the run follows the speed of its engines, which its user must know."""
    schedule = SamplingSchedule(tmp_path / "b", "rules", source=write_schedule(tmp_path / "a"))
    schedule.pause(0, "00" * 32, 0, {})
    schedule.take(1, 8, [4, 6, 7], BATCH)
    schedule.pause(1, "aa" * 32, 9, COUNTS)
    assert caplog.messages == []
    for step in (2, 3):
        schedule.take(step, 12, [], BATCH)
        if resumes:
            schedule.close()
            schedule = SamplingSchedule(tmp_path / "b", "rules", source=tmp_path / "a")
            schedule.resume_at(2 + step)
    ends = f"--schedule: {tmp_path / 'a'} ends before step 2: from there on the run decides itself"
    assert caplog.messages == [ends]


def read_ends(path):
    offsets = []
    read_records(path, lambda offset, payload: offsets.append(offset))
    return offsets[1:]


def test_damaged_end_is_named_and_decided_again(tmp_path, caplog):
    data = write_schedule(tmp_path / "a").read_bytes()
    assert caplog.messages == []
    (tmp_path / "a").write_bytes(data[:-1])
    schedule = SamplingSchedule(tmp_path / "a", "rules")
    whole = (tmp_path / "a").stat().st_size
    problem = f"a torn record at byte {whole} of {len(data) - 1}"
    loss = "steps that it lacks cannot be repeated"
    assert caplog.messages == [f"{tmp_path / 'a'}: {problem}; {loss}"]
    schedule.resume_at(2)
    schedule.pause(1, "cc" * 32, 9, COUNTS)
    schedule.close()
    assert [one.next_index for one in read_schedule(tmp_path / "a")] == [0, 8, 9]


def test_schedule_of_other_rules_is_refused_and_an_own_one_begins_again(tmp_path, caplog):
    before = write_schedule(tmp_path / "a").read_bytes()
    with pytest.raises(ConfigError, match="another|other data"):
        SamplingSchedule(None, "other rules", source=tmp_path / "a")
    with pytest.raises(ConfigError, match="cannot be read"):
        SamplingSchedule(None, "rules", source=tmp_path / "missing")
    assert SamplingSchedule(tmp_path / "a", "other rules").next is None
    (aside,) = (tmp_path / "aside").iterdir()
    assert aside.read_bytes() == before and aside.name.endswith("-a")
    told = f"{tmp_path / 'a'}: differs in rules, and is copied to {tmp_path / 'aside'}; steps that "
    assert caplog.messages == [f"{told}it lacks cannot be repeated"]
    with pytest.raises(ConfigError, match="other data"):
        SamplingSchedule(None, "rules", source=tmp_path / "a")


def test_resumed_run_with_another_configuration_decides_again(tmp_path, caplog):
    """It could not wait for what its own schedule says, and must not end."""
    before = write_schedule(tmp_path / "a").read_bytes()
    schedule = SamplingSchedule(tmp_path / "a", "rules")
    schedule.resume_at(2)
    schedule.pause(1, "cc" * 32, 9, COUNTS)
    (aside,) = (tmp_path / "aside").iterdir()
    assert aside.read_bytes() == before
    c, a = "c" * 16, "a" * 16
    assert schedule.next is None
    assert caplog.messages == [
        f"version 1: the weights differ ({a} and {c}): the resumed run cannot repeat what "
        f"{tmp_path / 'a'} says next and decides again (was the configuration changed?)"
    ]
    schedule.take(2, 12, [], BATCH)
    schedule.close()
    found = read_schedule(tmp_path / "a")
    assert [type(one) for one in found] == [WeightPause, Take, WeightPause, Take]
    assert found[2].weights == "c" * 16


@pytest.mark.parametrize("is_strict", [True, False])
def test_resumed_run_that_repeats_another_one_ends_at_a_difference(tmp_path, is_strict):
    """It decided again without an error, because its own file has the record too."""
    write_schedule(tmp_path / "a")
    before = write_schedule(tmp_path / "b").read_bytes()
    schedule = SamplingSchedule(tmp_path / "b", "rules", source=tmp_path / "a", is_strict=is_strict)
    schedule.resume_at(2)
    if is_strict:
        with pytest.raises(OracleError, match="^version 1: the weights differ"):
            schedule.pause(1, "cc" * 32, 9, COUNTS)
    else:
        schedule.pause(1, "cc" * 32, 9, COUNTS)
        assert schedule.num_differences == 1
    assert (tmp_path / "b").read_bytes() == before


def test_file_without_the_records_of_its_checkpoint_is_left_alone(tmp_path, caplog):
    before = write_schedule(tmp_path / "a").read_bytes()
    schedule = SamplingSchedule(tmp_path / "a", "rules")
    schedule.resume_at(9)
    schedule.take(5, 60, [], BATCH)
    assert caplog.messages == [
        f"{tmp_path / 'a'} has lost records: the run cannot be repeated from there on"
    ]
    assert (tmp_path / "a").read_bytes() == before


def test_file_gets_records_that_it_lost_from_the_source(tmp_path, caplog):
    """A file with a gap is not repeated by any other run."""
    known = read_schedule(write_schedule(tmp_path / "a"))
    own = SamplingSchedule(tmp_path / "b", "rules")
    own.pause(0, "00" * 32, 0, {})
    own.close()
    schedule = SamplingSchedule(tmp_path / "b", "rules", source=tmp_path / "a")
    schedule.resume_at(2)
    schedule.pause(1, "aa" * 32, 9, COUNTS)
    schedule.close()
    assert read_schedule(tmp_path / "b") == known and caplog.messages == []


def test_mode_without_a_schedule_resumes_a_run_that_had_one(caplog):
    """It warned that a file named None had lost records."""
    schedule = SamplingSchedule()
    schedule.resume_at(5)
    assert schedule.position == 0 and schedule.next is None and caplog.messages == []


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FailingFile(io.FileIO):
    """A file that cannot be made shorter."""

    truncate = full


@pytest.mark.parametrize(("fails", "num_left"), [("pwrite", 0), ("fsync", 2), ("truncate", 3)])
def test_full_disk_ends_the_schedule_and_not_the_run(
    tmp_path, monkeypatch, caplog, fails, num_left
):
    """A file with a gap could not be repeated, so nothing more is written."""
    path = write_schedule(tmp_path / "a")
    schedule = SamplingSchedule(path, "rules")
    with monkeypatch.context() as patch:
        if fails == "truncate":
            schedule._log._file = FailingFile(path, "r+")
        else:
            patch.setattr(record_log.os, fails, full)
        schedule.resume_at(2)
        schedule.pause(1, "cc" * 32, 9, COUNTS)
    schedule.take(2, 60, [], BATCH)
    problem = "cannot be written: No space left on device"
    assert caplog.messages[1:] == [f"{path}: {problem}; steps that it lacks cannot be repeated"]
    assert schedule.position == 4
    assert len(read_ends(path)) == num_left


def random_counts(source, num_groups):
    counts = {}
    for index in range(num_groups):
        running = source.randint(0, 20_000)
        ended = [source.randint(1, 20_000) for _ in range(source.randint(0, 12))]
        counts[2 * index] = tuple(ended + [running] * (16 - len(ended)))
    return counts


def test_a_group_takes_few_bytes(tmp_path):
    """Sixteen counts of up to 20,480 tokens for each open group of the paper's recipe."""
    schedule, num_groups = SamplingSchedule(tmp_path / "a"), 800
    counts = random_counts(random.Random(0), num_groups)
    schedule.pause(1, "aa" * 32, 2 * num_groups, counts)
    assert (tmp_path / "a").stat().st_size / num_groups <= 40


def test_past_records_take_few_bytes_of_memory(tmp_path):
    """Decoded, those of ten thousand steps filled 2 GB of the driver's memory."""
    source, num_groups, num_steps = random.Random(0), 256, 12
    schedule = SamplingSchedule(tmp_path / "a")
    tracemalloc.start()
    for step in range(num_steps):
        schedule.pause(step, "aa" * 32, 2 * num_groups, random_counts(source, num_groups))
        schedule.take(step + 1, 2 * num_groups, range(num_groups), [])
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / num_steps <= 40 * 1024
