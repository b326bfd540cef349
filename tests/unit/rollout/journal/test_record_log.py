"""The record log: changed or lost records, and files that cannot be continued after a kill."""

import errno
import os
from pathlib import Path

import pytest

from megadapo.rollout.journal.record_log import RecordLog

PAYLOADS = [b"", b"one", bytes(range(256)), b"last\x00"]
IDENTITY = {"format": 1, "weights": "a"}


def opened(path: Path, **changed: object) -> tuple[RecordLog, list[bytes]]:
    seen: list[bytes] = []

    def read(_: int, payload: bytes) -> None:
        seen.append(payload)

    return RecordLog(path, IDENTITY | changed, read, loss="they are lost"), seen


def written(path: Path) -> list[int]:
    """Write all payloads, and return the ends of all records, the first one's included."""
    log, _ = opened(path)
    assert not path.exists()
    offsets = [log.append(payload) for payload in PAYLOADS]
    log.close()
    return [0, *offsets, path.stat().st_size]


def test_torn_tail_is_cut_off_at_any_byte(tmp_path, caplog):
    path = tmp_path / "log"
    ends = written(path)
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        caplog.clear()
        log, seen = opened(path)
        num_whole = max(0, sum(end <= size for end in ends) - 2)
        assert seen == PAYLOADS[:num_whole]
        assert bool(caplog.text) == (size not in ends) and "damaged" not in caplog.text
        log.append(b"next")
        log.close()
        assert opened(path)[1] == [*PAYLOADS[:num_whole], b"next"]


def test_flipped_byte_ends_the_log(tmp_path, caplog):
    path = tmp_path / "log"
    ends = written(path)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
        )
        caplog.clear()
        log, seen = opened(path)
        damaged = sum(end <= place for end in ends) - 1
        assert seen == PAYLOADS[: max(0, damaged - 1)], f"byte {place}"
        problem = f"a damaged record at byte {ends[damaged]} of {len(whole)}"
        assert caplog.messages == [f"{path}: {problem}; they are lost"]
        assert path.stat().st_size == ends[max(1, damaged)]
        log.close()


def test_damage_is_detected_while_open(tmp_path):
    path = tmp_path / "log"
    ends = written(path)
    log, _ = opened(path)
    assert log.read(ends[2]) == PAYLOADS[1]
    with path.open("r+b") as file:
        file.seek(ends[3] - 1)
        file.write(b"X")
    assert log.read(ends[2]) is None
    assert log.read(ends[3]) == PAYLOADS[2]
    os.truncate(path, 5)
    assert log.read(ends[3]) is None
    log.close()


def test_failing_close_ends_nothing(tmp_path):
    """A file server that is away reports it when a file is closed; the run ended."""
    path = tmp_path / "log"
    written(path)
    log, seen = opened(path)
    files = (int(number) for number in os.listdir("/proc/self/fd"))
    os.close(next(file for file in files if _target(file) == str(path)))
    log.close()
    assert opened(path)[1] == seen


def _target(file: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{file}")
    except FileNotFoundError:
        return ""


@pytest.mark.parametrize("num_written", [0, 1, 30])
def test_failed_write_leaves_no_trace(tmp_path, monkeypatch, num_written):
    """A full disk accepts part of a write; the records before must still be readable."""
    path = tmp_path / "log"
    written(path)
    log, seen = opened(path)
    real, left = os.pwrite, [num_written]

    def full(file, data, place):
        # threads of other tests may still write
        if os.readlink(f"/proc/self/fd/{file}") != str(path):
            return real(file, data, place)
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = real(file, data[: left[0]], place)
        left[0] -= done
        return done

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert log.append(b"x" * 100) is None
    assert log.append(b"fits") is None, "a file with a gap"
    log.close()
    assert opened(path)[1] == seen


def test_clear(tmp_path):
    written(tmp_path / "log")
    log, _ = opened(tmp_path / "log")
    log.clear()
    log.append(b"first")
    log.close()
    assert opened(tmp_path / "log")[1] == [b"first"]


@pytest.mark.parametrize("name", ["format", "weights"])
def test_records_of_another_identity_are_discarded(tmp_path, caplog, name):
    path = tmp_path / "log"
    written(path)
    assert opened(path, **{name: 2})[1] == []
    assert caplog.messages == [f"{path}: differs in {name}; they are lost"]
    assert opened(path, **{name: 2})[1] == [] and len(caplog.messages) == 1


def test_file_without_an_identity_is_of_another_format(tmp_path, caplog):
    """Logs of earlier versions begin with a record."""
    path = tmp_path / "log"
    written(path)
    first = path.read_bytes().index(PAYLOADS[2]) - 28
    path.write_bytes(path.read_bytes()[first:])
    assert opened(path)[1] == [] and "differs in format" in caplog.text
