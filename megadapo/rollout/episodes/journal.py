"""The journal of episodes: what was done in environments, so that a restart does nothing twice.

One file per policy version, `environments-version-N.log`. A record is a line of JSON, `[FORMAT,
kind, episode, serial]`, and a JSON object. The kinds are "open" (all that is known of an episode),
"act" (an action that the environment is about to get), "answer" and "close". An "open" with a new
serial replaces what earlier records, also those of other files, say of the episode.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megadapo.environments.environment import Observation
from megadapo.rollout.journal.record_log import RecordLog
from megadapo.rollout.types import SampledTurn

FORMAT = 1
"""Version of the records; others are ignored."""
MAX_COPIES = 32
"""Number of files that get the records of an episode which no engine has opened since a restart."""
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

    def to_json(self) -> dict[str, Any]:
        turns = [*self.turns, *([] if self.pending is None else [self.pending])]
        return {
            "identity": self.identity,
            "observation": None if self.observation is None else asdict(self.observation),
            "state": self.state,
            "turns": [turn.to_json() for turn in turns],
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], serial: int) -> EpisodeRecord:
        observation = entry["observation"] and Observation(**entry["observation"])
        record = cls(entry["identity"], True, observation, entry["state"], serial=serial)
        for turn in map(SampledTurn.from_json, entry["turns"]):
            if turn.outcome is None:
                record.pending = turn
            else:
                record.turns.append(turn)
        return record


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
        self._is_read = False
        """Whether the files of earlier processes have been read."""
        self._last_serial = 0
        self._error: OSError | None = None
        """Reason why nothing more is written until the next weights."""
        self._queue: list[tuple[bytes, asyncio.Future[None]]] = []
        self._flusher: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        """Held by the thread that writes, and while the current file changes."""
        self._warnings: list[str] = []

    def begin(self, policy_version: int, live: Mapping[str, EpisodeRecord]) -> None:
        """Continue in the file of new weights, with all that is known of open episodes.

        The first call reads all files, also those of later versions that a restart goes back from.
        """
        with self._lock:
            self._error = None
            self._version = policy_version
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                names = () if self._is_read else os.listdir(self._folder)
                found = {int(match[1]) for match in map(_FILE_NAME.fullmatch, names) if match}
                for version in {policy_version, *found} - self._logs.keys():
                    self._read(version)
                self._is_read = True
                self._copy_open(live)
            except OSError as error:
                self._give_up(error)

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
            self._index(self._version, log.append(payload), payload)
            self._entries[name].num_copies = num_copies.get(name, 0)
        log.sync()
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
            try:
                payload = self._logs[version].read(offset)
                if payload is None:
                    raise ValueError("damaged")
                head, _, body = payload.partition(b"\n")
                _, kind, _, serial = json.loads(head)
                record = _apply(record, kind, serial, json.loads(body))
            except (KeyError, OSError, TypeError, ValueError) as error:
                self._warn(version, f"cannot read the record at byte {offset} ({error})")
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
            if self._error is not None:
                raise self._error
            try:
                log = self._logs[self._version]
                offsets = [log.append(payload) for payload in payloads]
                log.sync()
            except OSError as error:
                self._give_up(error)
                raise
            return self._version, offsets

    def _payload(self, kind: Kind, episode: str, record: EpisodeRecord) -> bytes:
        body: dict[str, Any] = {}
        if kind == "open":
            self._last_serial += 1
            record.serial = self._last_serial
            body = record.to_json()
        elif kind == "act":
            assert record.pending is not None
            body = {"turn": len(record.turns), **record.pending.to_json()}
        elif kind == "answer":
            body = {"turn": len(record.turns) - 1, **record.turns[-1].answer_to_json()}
        head = json.dumps([FORMAT, kind, episode, record.serial])
        return f"{head}\n{json.dumps(body)}".encode()

    def _read(self, version: int) -> None:
        def read(offset: int, payload: bytes) -> None:
            self._index(version, offset, payload)

        log = self._logs[version] = RecordLog(self._path(version), read)
        if log.cut:
            self._warn(version, f"{log.cut}: what was recorded from there on is lost")

    def _index(self, version: int, offset: int, payload: bytes) -> None:
        with suppress(TypeError, ValueError):
            written, kind, episode, serial = json.loads(payload.partition(b"\n")[0])
            if written != FORMAT:
                return
            self._last_serial = max(self._last_serial, serial)
            entry = self._entries.get(episode)
            if kind == "open" and (entry is None or entry.serial < serial):
                self._entries[episode] = _Entry(serial, [(version, offset)])
            elif entry is not None and entry.serial == serial and kind != "open":
                entry.is_closed |= kind == "close"
                if kind != "close":
                    entry.places.append((version, offset))

    def _path(self, version: int) -> Path:
        return self._folder / f"environments-version-{version}.log"

    def _give_up(self, error: OSError) -> None:
        self._error = error
        self._warn(
            self._version,
            f"cannot be written: {error.strerror}; if the run is killed, episodes in progress fail",
        )

    def _warn(self, version: int, text: str) -> None:
        self._warnings.append(f"{self._path(version)}: {text}")


def _apply(
    record: EpisodeRecord | None, kind: Kind, serial: int, body: Mapping[str, Any]
) -> EpisodeRecord:
    """Return what is known of an episode after one more record."""
    if kind == "open":
        return EpisodeRecord.from_json(body, serial)
    assert record is not None, "the first record of an entry is an open"
    if kind == "act":
        # an action at an answered turn has replaced the turns from there on
        del record.turns[body["turn"] :]
        record.pending = SampledTurn.from_json(body)
    elif record.pending is not None:
        turn, record.pending = record.pending, None
        turn.answer(body)
        record.turns.append(turn)
    return record
