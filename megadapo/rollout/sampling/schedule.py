"""The schedule: all that clocks decide in a run whose groups may wait for a later step.

A `Take` makes a batch: it says which requested groups were still open. A `WeightPause` stops
everything in flight, before engines get new weights: it says how many tokens each open response
had. Between two pauses is a period with one policy version. Seeds, weights and these two answers
determine every token, so a run that repeats them repeats itself, with any number of engines at
any speed.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

from megadapo.data.group import Group
from megadapo.errors import ConfigError, InfraError, OracleError
from megadapo.observe.metrics.records import ASIDE_FOLDER
from megadapo.rollout.journal.record_log import RecordLog, read_records

WEIGHTS_DIGITS = 16
"""Digits of a fingerprint of weights that a pause keeps."""
Counts = Mapping[int, tuple[int, ...]]
"""Number of tokens of each response of each open group, by prompt index."""
SCHEDULE_FILE = "schedule.log"
FORMAT = 1
logger = logging.getLogger(__name__)


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


def identity_of(rules: str) -> dict[str, object]:
    """Return the first record of a schedule's file, which names the rules of its run."""
    return {"format": FORMAT, "rules": rules}


def read_source(path: Path, rules: str) -> list[bytes]:
    """Return the records of the schedule that `--schedule` names.

    Raises:
        ConfigError: it cannot be read, is damaged or empty, or is of a run with other rules.
    """
    payloads: list[bytes] = []
    try:
        problem = read_records(path, lambda offset, payload: payloads.append(payload))
    except OSError as error:
        raise ConfigError(f"--schedule: {path} cannot be read: {error.strerror}") from error
    if payloads and payloads[0] != json.dumps(identity_of(rules)).encode():
        raise ConfigError(
            f"--schedule: {path} is of a run with other data, rewards, seed, sampling or "
            "rollout keys; repeat it with the configuration in its config.json"
        )
    if problem:
        whole = f"record {len(payloads)} is not whole ({problem})"
        raise ConfigError(
            f"--schedule: {path}: {whole}; restore the file from a copy. If its run was killed "
            "while it wrote the record, resume that run, which makes the record again"
        )
    if len(payloads) < 2:
        raise ConfigError(
            f"--schedule: {path} has no records; its run ended before the first publication of "
            "weights, so there is nothing to repeat"
        )
    return payloads[1:]


class SamplingSchedule:
    """The takes and pauses of a run: repeated from files while there are any, and then recorded.

    A run that resumes repeats its own records after the checkpoint's. If it cannot, because its
    configuration has changed, it decides again from there on. A run that repeats another one stops
    at the first difference, or counts it.
    """

    def __init__(
        self,
        path: Path | None = None,
        rules: str = "",
        *,
        source: Path | None = None,
        is_strict: bool = True,
    ) -> None:
        """Open the run's own schedule, and read the one to repeat.

        Args:
            path: file of the run's schedule; None: it is kept in memory only.
            rules: identifies how groups are requested, generated, scored and selected.
            source: file of the schedule of another run, to repeat.
            is_strict: raise an error at a difference from `source`; otherwise count it.

        Raises:
            ConfigError: `source` is no whole schedule, or one of a run with other rules.
            InfraError: the run's own file cannot be read.
        """
        self.position = 0
        """Number of records that are done."""
        self.num_differences = 0
        """Number of differences from `source`."""
        self._path, self._is_strict = path, is_strict
        self._log: RecordLog | None = None
        self._records: list[bytes] = []
        """All records, encoded: decoded ones of a long run would fill the memory."""
        if path is not None:
            self._log = RecordLog(
                path,
                identity_of(rules),
                lambda offset, payload: self._records.append(payload),
                loss="steps that it lacks cannot be repeated",
                aside=path.parent / ASIDE_FOLDER,
            )
            if self._log.error is not None:
                raise InfraError(f"{path} cannot be opened: {self._log.error.strerror}")
        self._num_written = len(self._records)
        self._source, self._num_source = source, 0
        if source is not None:
            records = read_source(source, rules)
            for own, record in zip(self._records, records, strict=False):
                # other versions of zlib have other bytes for the same record
                if own != record and decode_record(own) != decode_record(record):
                    raise ConfigError(f"--schedule: {source} is not the schedule of {path} so far")
            self._records += records[len(self._records) :]
            self._num_source = len(records)

    @property
    def next(self) -> Take | WeightPause | None:
        """The record to repeat; None: the run decides."""
        is_known = self.position < len(self._records)
        return decode_record(self._records[self.position]) if is_known else None

    def is_due(
        self, kind: type[Take | WeightPause], next_index: int, open_groups: Iterable[int]
    ) -> bool:
        """Return whether the next record is of a kind, and exactly its groups are settled."""
        record = self.next
        if not isinstance(record, kind) or next_index < record.next_index:
            return False
        return all(index in record.open for index in open_groups)

    def may_settle(self, prompt_index: int) -> bool:
        """Return whether a scored group counts before the next record."""
        return self.next is None or prompt_index not in self.next.open

    def stop_at_tokens(self, prompt_index: int) -> tuple[int, ...]:
        """Return the counts at which a group's responses stop at the next pause; empty: nowhere."""
        for record in map(decode_record, self._records[self.position : self.position + 2]):
            if isinstance(record, WeightPause):
                return record.counts.get(prompt_index, ())
        return ()

    def resume_at(self, position: int | None) -> None:
        """Continue after the records of a checkpoint; None: they were made with other prompts."""
        if position is None or position > len(self._records):
            if self._log is not None:
                problem = "has lost records" if position else "has records of other prompts"
                logger.warning(
                    "%s %s: the run cannot be repeated from there on", self._path, problem
                )
                self.close()
            self._records, self._num_source, position = [], 0, 0
        self.position = position
        # records of the source that the run's own file has lost
        self._write_to(position)

    def take(
        self, step: int, next_index: int, open_groups: Iterable[int], batch: Sequence[Group]
    ) -> None:
        """Record that a batch was taken, or compare it with the record to repeat."""
        digests = {group.prompt_index: contents_digest(group) for group in batch}
        self._done(Take(step, next_index, frozenset(open_groups), digests))

    def pause(self, policy_version: int, weights: str, next_index: int, counts: Counts) -> bool:
        """Record that the engines have new weights, or compare with the record to repeat.

        Returns:
            False if the pause is recorded already: a resumed run publishes the weights of its
            checkpoint again.
        """
        last = decode_record(self._records[self.position - 1]) if self.position else None
        if isinstance(last, WeightPause) and last.policy_version == policy_version:
            return False
        self._done(WeightPause(policy_version, weights[:WEIGHTS_DIGITS], next_index, dict(counts)))
        return True

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._log = None

    def _done(self, made: Take | WeightPause) -> None:
        record = self.next
        if self._num_source and self.position == self._num_source:
            step = made.step if isinstance(made, Take) else made.policy_version + 1
            logger.warning(
                "--schedule: %s ends before step %d: from there on the run decides itself",
                *(self._source, step),
            )
        if record is not None and record != made:
            self._differ(describe_difference(record, made, "the schedule", "the run"))
        if self.next is None:
            self._records.append(encode_record(made))
        self.position += 1
        self._write_to(self.position)

    def _write_to(self, position: int) -> None:
        """Write the records before a position that the file lacks."""
        missing = self._records[self._num_written : position]
        self._num_written = max(self._num_written, position)
        self._append(*missing)

    def _differ(self, difference: str) -> None:
        """Handle a difference from the record to repeat.

        Raises:
            OracleError: it is another run's record, and this schedule is strict.
        """
        if self._num_source <= self.position < self._num_written:
            logger.warning(
                "%s: the resumed run cannot repeat what %s says next and decides again (was the "
                "configuration changed?)",
                *(difference, self._path),
            )
            # a file with the present records alone; the old one is set aside
            self._records, self._num_written = self._records[: self.position], self.position
            if self._log is not None:
                self._log.clear()
                self._append(*self._records)
        elif self._is_strict:
            raise OracleError(
                f"{difference}. The run does not repeat the schedule that --schedule names; "
                "megadapo diff RUN_A RUN_B shows the first difference of two runs"
            )
        else:
            self.num_differences += 1
            logger.warning("difference %d from the schedule: %s", self.num_differences, difference)

    def _append(self, *payloads: bytes) -> None:
        if self._log is not None and payloads:
            for payload in payloads:
                self._log.append(payload)
            self._log.sync()
