"""The groups that no checkpoint holds yet, on the disk: what was finished before a kill stays so.

One file of records for each policy version that sampled. Its first record says of which weights
and settings it is; every other one is a scored group under a digest of all that was asked. So a
group is found again where the same weights would be asked the same, and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megadapo.data.batch import Group
from megadapo.rollout.config import JournalSync
from megadapo.rollout.journal.record_log import RecordLog
from megadapo.rollout.sampling.reserve import decode_group, encode_group
from megadapo.rollout.sampling.sampled_batch import GroupStats
from megadapo.rollout.sampling.scoring import PromptRequest
from megadapo.rollout.types import SamplingSettings

JOURNAL_FOLDER = "journal"
FORMAT = 1
"""Of the entries; a journal of another one is begun anew."""
_FILE_NAME = re.compile(r"version-(\d+)\.log")
DIGEST_BYTES = 32
_MEANINGS = {
    "format": "another version of megadapo",
    "policy_version": "another policy version",
    "weights": "other weights",
    "settings": "other data, rewards, settings or another seed",
}


class Journal:
    """What the present weights have answered, here and in processes before this one."""

    def __init__(self, run_folder: Path, settings: str, *, fsync: JournalSync = "step") -> None:
        """Nothing is read or written yet.

        Args:
            settings: names how groups are asked for and scored.
            fsync: when what was written is put on the disk itself.
        """
        self._folder = run_folder / JOURNAL_FOLDER
        self._settings = settings
        self._fsync = fsync
        self._header: dict[str, Any] = {}
        self._log: RecordLog | None = None
        self._places: dict[bytes, int] = {}
        self._writes = False
        self._notes: list[str] = []

    def begin(self, policy_version: int, weights: str) -> None:
        """Take up the journal of the weights that sample from now on, or begin it.

        Args:
            weights: names them by every bit.
        """
        self.close()
        self._header = {
            "format": FORMAT,
            "policy_version": policy_version,
            "weights": weights,
            "settings": self._settings,
        }
        self._writes = True
        if self._path.exists():
            self._open()

    def find(
        self, question: PromptRequest, settings: SamplingSettings
    ) -> tuple[Group, GroupStats] | None:
        """The group that the same question has got, and what it counts as; None: it is to be
        asked."""
        entry = self._find(_digest(question, settings))
        if entry is None:
            return None
        try:
            return decode_group(entry["group"]), _decode_outcome(entry["outcome"])
        except (KeyError, TypeError, ValueError) as error:
            self._note(f"a group is not as this version writes them ({error!r}): it is asked again")
            return None

    def append(
        self, question: PromptRequest, settings: SamplingSettings, group: Group, outcome: GroupStats
    ) -> None:
        """Keep a group; where the disk refuses, a note says so and the step goes on without."""
        entry = {"group": encode_group(group), "outcome": asdict(outcome)}
        self._append(_digest(question, settings), entry)
        if self._fsync == "group":
            self._sync()

    def find_step(self, place: bytes) -> dict[str, Any] | None:
        """What was kept of a step; `place` is the digest of all that it begins with."""
        return self._find(place)

    def append_step(self, place: bytes, entry: Mapping[str, Any]) -> None:
        """Keep a whole step, as JSON values."""
        self._append(place, entry)
        if self._fsync != "never":
            self._sync()

    def end_step(self) -> None:
        """All groups of a batch have been appended."""
        if self._fsync == "step":
            self._sync()

    def drain_warnings(self) -> list[str]:
        """Return what happened to the journal since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._log, self._places, self._writes = None, {}, False

    @property
    def _path(self) -> Path:
        return self._folder / f"version-{self._header['policy_version']}.log"

    def _open(self) -> None:
        """Read the journal of the present weights; what others have sampled goes."""
        headers: list[bytes] = []

        def see(place: int, payload: bytes) -> None:
            if place == 0:
                headers.append(payload)
            else:
                self._places[payload[:DIGEST_BYTES]] = place

        try:
            self._folder.mkdir(exist_ok=True)
            self._log = RecordLog(self._path, see)
            if self._log.cut:
                self._note(f"{self._log.cut}: what it holds, and all behind it, is asked again")
            if difference := self._difference(headers):
                self._note(f"it is of {difference}: its groups are asked again")
            if headers != [self._encoded_header]:
                self._places = {}
                self._log.clear()
                self._log.append(self._encoded_header)
        except OSError as error:
            self._give_up(error)

    def _find(self, digest: bytes) -> dict[str, Any] | None:
        place = self._places.get(digest)
        if place is None or self._log is None:
            return None
        try:
            payload = self._log.read(place)
        except OSError:
            payload = None
        if payload is None:
            self._note(f"the record at byte {place} cannot be read any more: it is asked again")
            return None
        entry: dict[str, Any] = json.loads(payload[DIGEST_BYTES:])
        return entry

    def _append(self, digest: bytes, entry: Mapping[str, Any]) -> None:
        if not self._writes:
            return
        if self._log is None:
            self._open()
        try:
            if self._writes and self._log is not None:
                self._places[digest] = self._log.append(digest + json.dumps(entry).encode())
        except OSError as error:
            self._give_up(error)

    def _sync(self) -> None:
        try:
            if self._writes and self._log is not None:
                self._log.sync()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Write no more until the next weights; what is there can still be read."""
        self._writes = False
        self._note(
            f"cannot be written: {error.strerror}; further groups of these weights are lost if the "
            "run is killed"
        )

    def _note(self, text: str) -> None:
        self._notes.append(f"{self._path}: {text}")

    @property
    def _encoded_header(self) -> bytes:
        return json.dumps(self._header).encode()

    def _difference(self, headers: list[bytes]) -> str:
        """What the groups of a journal are of that is not the present one's; empty: nothing."""
        if not headers or headers == [self._encoded_header]:
            return ""
        try:
            found = json.loads(headers[0])
            names = (name for name in self._header if found.get(name) != self._header[name])
            return _MEANINGS[next(names)]
        except (AttributeError, StopIteration, ValueError):
            return _MEANINGS["format"]


def forget_before(run_folder: Path, policy_version: int) -> None:
    """Delete what is only needed before a checkpoint: all that earlier weights have sampled.

    A file that cannot be deleted only takes room, and goes with the next checkpoint.
    """
    for path in (run_folder / JOURNAL_FOLDER).glob("version-*.log"):
        match = _FILE_NAME.fullmatch(path.name)
        if match and int(match[1]) < policy_version:
            with suppress(OSError):
                path.unlink()


def _digest(question: PromptRequest, settings: SamplingSettings) -> bytes:
    """A name of all that an answer follows from but the weights and the scoring."""
    parts = (
        *(question.key, question.prompt.to_json(), question.prompt_ids, question.seeds),
        settings,
    )
    digest = hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass"))
    for response in question.begun:
        for array in (response.token_ids, response.policy_versions):
            digest.update(f"/{len(array)}/".encode())
            digest.update(array.tobytes())
    return digest.digest()


def _decode_outcome(entry: Mapping[str, Any]) -> GroupStats:
    plain = {
        **entry,
        "lengths": tuple(entry["lengths"]),
        "parts": tuple((name, value) for name, value in entry["parts"]),
        "entropy_rises": tuple(entry["entropy_rises"]),
    }
    return GroupStats(**plain)
