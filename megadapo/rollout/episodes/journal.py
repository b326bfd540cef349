"""The journal of episodes: what was done in environments, so that a restart does nothing twice.

One file per policy version, `environments-version-N.log`. A record is a line of JSON, `[kind,
episode, serial, number of answered turns]`, and a JSON object. The kinds are "open" (all that is
known of an episode), "act" (an action that the environment is about to get), "answer" and "close".
An "open" with a new serial replaces what earlier records, also those of other files, say of the
episode.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megadapo.codec import decode, encode
from megadapo.environments.environment import Observation
from megadapo.rollout.journal.record_log import RecordLog
from megadapo.rollout.types import Outcome, SampledTurn

FORMAT = 2
"""Version of the records; a file with another version is discarded."""
MAX_COPIES = 32
"""Number of files that get the records of an episode which no engine has opened since a restart."""
LOSS = "episodes that it lacks fail if the run is restarted"
_FILE_NAME = re.compile(r"environments-version-(\d+)\.log")

Kind = Literal["open", "act", "answer", "close"]


@dataclass
class EpisodeRecord:
    """All that is known of an episode."""

    identity: str
    """Digest of its environment and task."""
    is_reset: bool = False
    """Whether `reset` has returned; then it returned `observation`."""
    observation: Observation | None = None
    state: Any = None
    turns: list[SampledTurn] = field(default_factory=list)
    """Turns that were answered."""
    pending: SampledTurn | None = None
    """Turn after them whose action the environment may have got, and has not answered."""
    serial: int = 0


@dataclass
class _Entry:
    """The places of an episode's records."""

    serial: int
    places: list[tuple[int, int]]
    """Policy version and offset of each."""
    is_closed: bool = False
    num_copies: int = 0
    """Number of times that it was copied without being open."""


class EpisodeJournal:
    """The journals of a folder; belongs to one event loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logs: dict[int, RecordLog] = {}
        self._entries: dict[str, _Entry] = {}
        self._version = -1
        self._last_serial = 0
        self._queue: list[tuple[bytes, asyncio.Future[None]]] = []
        self._flusher: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        """Held by the thread that writes, and while the current file changes."""
        self._unread: OSError | None = None
        """Error of the folder itself, whose files are not known."""
        self._warnings: list[str] = []

    @property
    def _error(self) -> OSError | None:
        """Reason why nothing more is written until the next weights."""
        errors = (self._unread, *(log.error for log in self._logs.values()))
        return next((error for error in errors if error is not None), None)

    def begin(self, policy_version: int, live: Mapping[str, EpisodeRecord]) -> None:
        """Continue in the file of new weights, with all that is known of open episodes.

        The first call, and one after an error, reads all files, also those of later versions that a
        restart goes back from. If the folder cannot be listed, the files that are known stay open.
        """
        with self._lock:
            self._version = policy_version
            versions = {policy_version}
            if not self._logs or self._error is not None:
                versions |= self._found_versions()
                if self._unread is None:
                    self._close_logs()
                    self._entries = {}
            for version in versions - self._logs.keys():
                self._logs[version] = RecordLog(
                    self._folder / f"environments-version-{version}.log",
                    {"format": FORMAT},
                    partial(self._index, version),
                    loss=LOSS,
                    warn=self._warnings.append,
                )
            if self._error is None:
                self._copy_open(live)

    def _found_versions(self) -> set[int]:
        """Return the policy versions of the folder's files."""
        self._unread, names = None, list[str]()
        try:
            self._folder.mkdir(exist_ok=True)
            names = os.listdir(self._folder)
        except OSError as error:
            self._unread = error
            self._warnings.append(f"{self._folder}: cannot be read: {error.strerror}; {LOSS}")
        return {int(match[1]) for match in map(_FILE_NAME.fullmatch, names) if match}

    def forget(self, episode: str) -> None:
        """Copy an episode to no further file; its "close" may take a while."""
        if episode in self._entries:
            self._entries[episode].is_closed = True

    def _copy_open(self, live: Mapping[str, EpisodeRecord]) -> None:
        """Write open episodes to the current file; forget closed ones of earlier files."""
        records = {name: record for name, record in live.items() if record.is_reset}
        num_copies: dict[str, int] = {}
        for name, entry in self._entries.items():
            is_here = all(version == self._version for version, _ in entry.places)
            is_wanted = not entry.is_closed and entry.num_copies < MAX_COPIES
            if name not in live and is_wanted and not is_here:
                found = self.find(name)
                if found is not None:
                    records[name], num_copies[name] = found, entry.num_copies + 1
        log = self._logs[self._version]
        for name, record in records.items():
            payload = self._payload("open", name, record)
            if (offset := log.append(payload)) is None:
                return
            self._index(self._version, offset, payload)
            self._entries[name].num_copies = num_copies.get(name, 0)
        log.sync()
        if log.error is not None:
            return
        for version in [known for known in self._logs if known < self._version]:
            self._logs.pop(version).close()
        self._entries = {
            name: entry
            for name, entry in self._entries.items()
            if all(version in self._logs for version, _ in entry.places)
        }

    def find(self, episode: str) -> EpisodeRecord | None:
        """Return what the files say of an episode; None if they do not know it."""
        entry = self._entries.get(episode)
        record: EpisodeRecord | None = None
        for version, offset in [] if entry is None else entry.places:
            payload = self._logs[version].read(offset)
            if payload is None:
                break
            head, _, body = payload.partition(b"\n")
            kind, _, _, num_turns = json.loads(head)
            try:
                record = _apply(record, kind, num_turns, json.loads(body))
            except ValueError as error:
                self._warnings.append(f"{self._logs[version].path}: cannot read a record: {error}")
                break
        return record

    async def write(self, kind: Kind, episode: str, record: EpisodeRecord) -> None:
        """Write a record, and return when it is on disk."""
        payload = self._payload(kind, episode, record)
        written = asyncio.get_running_loop().create_future()
        self._queue.append((payload, written))
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush())
        await written

    def drain_warnings(self) -> list[str]:
        """Return the warnings since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings

    async def close(self) -> None:
        """Write what waits, and close the files."""
        if self._flusher is not None:
            await self._flusher
        self._close_logs()

    def _close_logs(self) -> None:
        for log in self._logs.values():
            log.close()
        self._logs = {}

    async def _flush(self) -> None:
        """Write the waiting records, until none is left; one sync is for many of them."""
        while self._queue:
            batch, self._queue = self._queue, []
            payloads = [payload for payload, _ in batch]
            error: OSError | None = None
            try:
                version, offsets = await asyncio.to_thread(self._append, payloads)
                for payload, offset in zip(payloads, offsets, strict=True):
                    self._index(version, offset, payload)
            except OSError as failed:
                error = failed
            for _, written in batch:
                if written.done():
                    continue
                if error is None:
                    written.set_result(None)
                else:
                    written.set_exception(error)

    def _append(self, payloads: list[bytes]) -> tuple[int, list[int]]:
        """Write records to the current file; return its policy version and their offsets.

        Raises:
            OSError: this call, or an earlier one under the same weights, has failed.
        """
        with self._lock:
            log, appended = self._logs[self._version], list[int | None]()
            if self._error is None:
                appended = [log.append(payload) for payload in payloads]
                log.sync()
            if self._error is not None:
                raise self._error
            return self._version, [offset for offset in appended if offset is not None]

    def _payload(self, kind: Kind, episode: str, record: EpisodeRecord) -> bytes:
        body: dict[str, Any] = {}
        if kind == "open":
            self._last_serial += 1
            record.serial = self._last_serial
            body = encode(record)
        elif kind == "act":
            body = encode(record.pending)
        elif kind == "answer":
            body = {"outcome": encode(record.turns[-1].outcome), "state": record.turns[-1].state}
        head = json.dumps([kind, episode, record.serial, len(record.turns)])
        return f"{head}\n{json.dumps(body)}".encode()

    def _index(self, version: int, offset: int, payload: bytes) -> None:
        kind, episode, serial, _ = json.loads(payload.partition(b"\n")[0])
        self._last_serial = max(self._last_serial, serial)
        entry = self._entries.get(episode)
        if kind == "open" and (entry is None or entry.serial < serial):
            self._entries[episode] = _Entry(serial, [(version, offset)])
        elif entry is not None and entry.serial == serial and kind != "open":
            entry.is_closed |= kind == "close"
            if kind != "close":
                entry.places.append((version, offset))


def _apply(
    record: EpisodeRecord | None, kind: Kind, num_turns: int, body: Mapping[str, Any]
) -> EpisodeRecord:
    """Return what is known of an episode after one more record."""
    if kind == "open":
        return decode(EpisodeRecord, body)
    assert record is not None, "the first record of an entry is an open"
    if kind == "act":
        # an action at an answered turn has replaced the turns from there on
        del record.turns[num_turns:]
        record.pending = decode(SampledTurn, body)
    elif record.pending is not None:
        outcome = decode(Outcome, body["outcome"])
        record.turns.append(replace(record.pending, outcome=outcome, state=body["state"]))
        record.pending = None
    return record
