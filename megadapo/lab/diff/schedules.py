"""The schedules of two runs: they know every group and every publication, saved or not."""

from __future__ import annotations

from pathlib import Path

from megadapo.errors import DataError
from megadapo.rollout.journal.record_log import read_records
from megadapo.rollout.sampling.schedule import SCHEDULE_FILE
from megadapo.rollout.sampling.schedule_records import decode_record, describe_difference


def about_schedules(folder_a: Path, folder_b: Path) -> str:
    """Return sentences about where the schedules of A and B part; empty if one has none."""
    paths = [folder / SCHEDULE_FILE for folder in (folder_a, folder_b)]
    if not all(path.is_file() for path in paths):
        return ""
    (a, damage_a), (b, damage_b) = map(_payloads, paths)
    damage = "".join(
        f" {path}: record {len(payloads)} is not whole ({problem}), and no later one is compared."
        for path, payloads, problem in zip(paths, (a, b), (damage_a, damage_b), strict=True)
        if problem
    )
    if a and b and a[0] != b[0]:
        parts = "The schedules have other rules: data, rewards, seed, sampling or rollout keys."
        return parts + damage
    for one, two in zip(a[1:], b[1:], strict=False):
        if one != two:
            found = describe_difference(decode_record(one), decode_record(two), "A", "B")
            return f"The schedules part at {found}.{damage}"
    num_common = max(0, min(len(a), len(b)) - 1)
    agree = f"The schedules agree in {num_common} takes and publications, with all their tokens."
    return agree + damage


def _payloads(path: Path) -> tuple[list[bytes], str]:
    """Return the intact records of a file, and what is wrong after them."""
    found: list[bytes] = []
    try:
        problem = read_records(path, lambda offset, payload: found.append(payload))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return found, problem
