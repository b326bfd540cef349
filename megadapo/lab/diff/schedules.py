"""The schedules of two runs: they know every group and every publication, saved or not."""

from __future__ import annotations

from pathlib import Path

from megadapo.errors import DataError
from megadapo.rollout.journal.record_log import read_records
from megadapo.rollout.sampling.schedule import SCHEDULE_FILE
from megadapo.rollout.sampling.schedule_records import decode_record, describe_difference


def about_schedules(folder_a: Path, folder_b: Path) -> str:
    """Return one sentence about where the schedules of A and B part; empty if one has none.

    Raises:
        DataError: a schedule cannot be read.
    """
    paths = [folder / SCHEDULE_FILE for folder in (folder_a, folder_b)]
    if not all(path.is_file() for path in paths):
        return ""
    (header_a, *a), (header_b, *b) = map(_payloads, paths)
    if header_a != header_b:
        return "The schedules have other rules: data, rewards, seed, sampling or rollout keys."
    for one, two in zip(a, b, strict=False):
        if one != two:
            found = describe_difference(decode_record(one), decode_record(two), "A", "B")
            return f"The schedules part at {found}."
    num_common = min(len(a), len(b))
    return f"The schedules agree in {num_common} takes and publications, with all their tokens."


def _payloads(path: Path) -> list[bytes]:
    found: list[bytes] = []
    try:
        read_records(path, lambda offset, payload: found.append(payload))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return found or [b""]
