"""The records of a schedule: takes and pauses, their bytes, and the first difference of two."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, zip_longest
from typing import Any

from megadapo.data.group import Group

WEIGHTS_DIGITS = 16
"""Digits of a fingerprint of weights that a pause keeps."""
Counts = Mapping[int, tuple[int, ...]]
"""Number of tokens of each response of each open group, by prompt index."""


@dataclass(frozen=True)
class Take:
    """A batch was taken."""

    step: int
    next_index: int
    """Prompt index after the last requested one."""
    open: frozenset[int]
    """Prompt indices of requested groups that were not settled."""
    digests: Mapping[int, int]
    """32-bit digest of each group of the batch, by prompt index."""


@dataclass(frozen=True)
class WeightPause:
    """The engines were stopped and got weights."""

    policy_version: int
    weights: str
    """Fingerprint of the weights."""
    next_index: int
    counts: Counts

    @property
    def open(self) -> Collection[int]:
        """Prompt indices of requested groups that were not settled."""
        return self.counts.keys()


def encode_record(record: Take | WeightPause) -> bytes:
    """Return a record as compressed JSON; prompt indices are differences from the one before."""
    entry: dict[str, Any] = {"next": record.next_index, "open": _gaps(record.open)}
    if isinstance(record, Take):
        digests = [record.digests[index] for index in sorted(record.digests)]
        entry |= {"step": record.step, "batch": _gaps(record.digests), "digests": digests}
    else:
        counts = [record.counts[index] for index in sorted(record.counts)]
        entry |= {"version": record.policy_version, "weights": record.weights, "counts": counts}
    return zlib.compress(json.dumps(entry, separators=(",", ":")).encode(), 9)


@lru_cache(maxsize=4)  # a repetition asks for the next two for every group
def decode_record(payload: bytes) -> Take | WeightPause:
    """Return the record of a payload after the file's header."""
    entry = json.loads(zlib.decompress(payload))
    open_groups = list(accumulate(entry["open"]))
    if "step" in entry:
        digests = dict(zip(accumulate(entry["batch"]), entry["digests"], strict=True))
        return Take(entry["step"], entry["next"], frozenset(open_groups), digests)
    counts = dict(zip(open_groups, map(tuple, entry["counts"]), strict=True))
    return WeightPause(entry["version"], entry["weights"], entry["next"], counts)


def _gaps(indices: Iterable[int]) -> list[int]:
    """Return sorted indices as differences from the one before."""
    ordered = sorted(indices)
    return [index - before for before, index in zip([0, *ordered], ordered, strict=False)]


def contents_digest(group: Group) -> int:
    """Return a digest of a group's tokens, their log-probs and versions, and rewards."""
    digest = zlib.crc32(repr(group.rewards).encode())
    for response in group.responses:
        for array in (response.token_ids, response.logprobs, response.policy_versions):
            digest = zlib.crc32(array.tobytes(), digest)
    return digest


def describe_difference(
    one: Take | WeightPause, two: Take | WeightPause, name: str, other: str
) -> str:
    """Return the first difference of two records, by step, group and token.

    `name` and `other` say whose they are.
    """
    if isinstance(one, Take) and isinstance(two, Take):
        place = f"step {one.step}"
        if one.step != two.step:
            return f"{place}: {other} takes the batch of step {two.step}"
        for index in sorted(one.digests.keys() | two.digests.keys()):
            ours, theirs = one.digests.get(index), two.digests.get(index)
            if ours is None or theirs is None:
                has = other if ours is None else name
                return f"{place}, group {index}: it is in the batch of {has} alone"
            if ours != theirs:
                return f"{place}, group {index}: its tokens, log-probs, versions or rewards differ"
    elif isinstance(one, WeightPause) and isinstance(two, WeightPause):
        place = f"version {one.policy_version}"
        if one.policy_version != two.policy_version:
            return f"{place}: {other} publishes version {two.policy_version}"
        if one.weights != two.weights:
            return f"{place}: the weights differ ({one.weights} and {two.weights})"
        for index in sorted(one.counts.keys() & two.counts.keys()):
            # a group that was not begun may have no counts
            pairs = zip_longest(one.counts[index], two.counts[index], fillvalue=0)
            for response, (n, m) in enumerate(pairs):
                if n != m:
                    where = f"{place}, group {index}, response {response}"
                    return f"{where}: it has {n} tokens at the pause in {name}, and {m} in {other}"
    else:
        return f"{name} {_doing(one)}, and {other} {_doing(two)}"
    only = sorted(set(one.open) ^ set(two.open))
    if only:
        has = name if only[0] in one.open else other
        return f"{place}, group {only[0]}: it is open in {has} alone"
    return f"{place}: {one.next_index} groups are requested in {name}, {two.next_index} in {other}"


def _doing(record: Take | WeightPause) -> str:
    if isinstance(record, Take):
        return f"takes the batch of step {record.step}"
    return f"publishes version {record.policy_version}"
