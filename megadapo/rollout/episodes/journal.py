"""The journal of episodes: what was done in environments, so that a restart does nothing twice.

One file per policy version, `environments-version-N.log`. A record is a line of JSON, `[FORMAT,
kind, episode, serial]`, and a JSON object. The kinds are "open" (all that is known of an episode),
"act" (an action that the environment is about to get), "answer" and "close". An "open" with a new
serial replaces what earlier records, also those of other files, say of the episode.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megadapo.environments.environment import Action, Observation, ToolCall
from megadapo.rollout.episodes.types import Outcome
from megadapo.rollout.journal.record_log import RecordLog

FORMAT = 1
"""Version of the records; others are ignored."""
_FILE_NAME = re.compile(r"environments-version-(\d+)\.log")

Kind = Literal["open", "act", "answer", "close"]


@dataclass
class TurnRecord:
    """One turn of the model, and its answer once there is one."""

    digest: str
    sampled: bytes
    action: Action
    weights: str
    """Weights that were current when the action arrived."""
    outcome: Outcome | None = None
    state: Any = None
    """State of the environment after it, for `recovery = "state"`."""

    def to_json(self) -> dict[str, Any]:
        known = self.outcome is not None and self.outcome.observation is not None
        return {
            "digest": self.digest,
            "sampled": base64.b64encode(self.sampled).decode(),
            "action": asdict(self.action),
            "weights": self.weights,
            **(self.answer_to_json() if known else {}),
        }

    def answer_to_json(self) -> dict[str, Any]:
        assert self.outcome is not None and self.outcome.observation is not None
        observation = asdict(self.outcome.observation)
        seconds = self.outcome.seconds
        return {"observation": observation, "seconds": seconds, "state": self.state}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> TurnRecord:
        given = entry["action"]
        calls = tuple(ToolCall(**call) for call in given["tool_calls"])
        action = Action(**{**given, "tool_calls": calls})
        sampled = base64.b64decode(entry["sampled"])
        turn = cls(entry["digest"], sampled, action, entry["weights"])
        if "observation" in entry:
            turn.answer(entry)
        return turn

    def answer(self, entry: Mapping[str, Any]) -> None:
        """Set the answer from its JSON values."""
        observation = Observation(**entry["observation"])
        self.outcome = Outcome(observation, None, entry["seconds"])
        self.state = entry["state"]


@dataclass
class EpisodeRecord:
    """All that is known of an episode."""

    identity: str
    """Digest of its environment and task."""
    is_reset: bool = False
    """Whether `reset` has returned; then it returned `observation`."""
    observation: Observation | None = None
    state: Any = None
    turns: list[TurnRecord] = field(default_factory=list)
    """Turns that were answered."""
    pending: TurnRecord | None = None
    """Turn behind them whose action the environment may have got, and has not answered."""
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
        for turn in entry["turns"]:
            record.add(TurnRecord.from_json(turn))
        return record

    def add(self, turn: TurnRecord) -> None:
        """Add a turn behind the answered ones."""
        if turn.outcome is None:
            self.pending = turn
        else:
            self.turns.append(turn)


@dataclass
class _Entry:
    """The places of an episode's records."""

    serial: int
    places: list[tuple[int, int]]
    """Policy version and offset of each."""
    is_closed: bool = False


class EpisodeJournal:
    """The journals of a folder; belongs to one event loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logs: dict[int, RecordLog] = {}
        self._entries: dict[str, _Entry] = {}
        self._version: int | None = None
        self._is_read = False
        """Whether the files of earlier processes have been read."""
        self._last_serial = 0
        self._error: OSError | None = None
        """Reason why nothing more is written until the next weights."""
        self._queue: list[tuple[bytes, asyncio.Future[None]]] = []
        self._flusher: asyncio.Task[None] | None = None
        self._writing: int | None = None
        """Policy version of the file that a thread writes now."""
        self._warnings: list[str] = []

    def begin(self, policy_version: int, live: Mapping[str, EpisodeRecord]) -> None:
        """Continue in the file of new weights, with all that is known of open episodes.

        The first call reads all files, also those of later versions that a restart goes back from.
        """
        self._error = None
        self._version = policy_version
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            versions = {policy_version}
            if not self._is_read:
                found = map(_FILE_NAME.fullmatch, os.listdir(self._folder))
                versions |= {int(match[1]) for match in found if match}
            for version in versions - self._logs.keys():
                self._read(version)
            self._is_read = True
            self._copy_open(live)
        except OSError as error:
            self._give_up(error)

    def _copy_open(self, live: Mapping[str, EpisodeRecord]) -> None:
        """Write open episodes to the current file; forget closed ones of earlier files."""
        assert self._version is not None
        records = {name: record for name, record in live.items() if record.is_reset}
        for name, entry in self._entries.items():
            is_here = all(version == self._version for version, _ in entry.places)
            if name not in live and not entry.is_closed and not is_here:
                found = self.find(name)
                if found is not None:
                    records[name] = found
        log = self._logs[self._version]
        for name, record in records.items():
            payload = self._payload("open", name, record)
            self._index(self._version, log.append(payload), payload)
        log.sync()
        # the next call closes the file that a thread still writes
        earlier = [one for one in self._logs if one < self._version and one != self._writing]
        for version in earlier:
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
        """Write a record, and return when it is on disk.

        Raises:
            OSError: it was not written, as the disk is full or fails.
        """
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
            version = self._version
            error = self._error
            assert version is not None, "begin comes first"
            if error is None:
                self._writing = version
                try:
                    offsets = await asyncio.to_thread(_append, self._logs[version], batch)
                    for (payload, _), offset in zip(batch, offsets, strict=True):
                        self._index(version, offset, payload)
                except OSError as failed:
                    error = failed
                    if version == self._version and self._error is None:
                        self._give_up(failed)
                finally:
                    self._writing = None
            for _, written in batch:
                if written.done():
                    continue
                if error is None:
                    written.set_result(None)
                else:
                    written.set_exception(error)

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
        assert self._version is not None
        self._warn(
            self._version,
            f"cannot be written: {error.strerror}; if the run is killed, episodes in progress fail",
        )

    def _warn(self, version: int, text: str) -> None:
        self._warnings.append(f"{self._path(version)}: {text}")


def _append(log: RecordLog, batch: list[tuple[bytes, asyncio.Future[None]]]) -> list[int]:
    offsets = [log.append(payload) for payload, _ in batch]
    log.sync()
    return offsets


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
        record.pending = TurnRecord.from_json(body)
    elif record.pending is not None:
        turn, record.pending = record.pending, None
        turn.answer(body)
        record.turns.append(turn)
    return record
