"""Results that no checkpoint holds yet, kept on disk until one does, so that a kill loses nothing.

A journal has one file for each policy version, or evaluation. Each record is the digest of a
request and its result. So a result is only found for the same request to the same weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from megadapo.codec import decode, encode
from megadapo.data.prompts import Prompt
from megadapo.rollout.journal.record_log import JOURNAL_FOLDER, RecordLog
from megadapo.rollout.types import OpenGroup

logger = logging.getLogger(__name__)

FORMAT = 2
"""Version of the records; a file with another version is discarded."""
_FILE_NAME = re.compile(r"version-(\d+)\.log")
DIGEST_BYTES = 32
VERSION, EVALUATION = "version", "evaluation"
"""Beginnings of the names of files."""
Result = TypeVar("Result")


class Journal(Generic[Result]):
    """The results of the current weights, of this process and of killed ones."""

    def __init__(self, kind: type[Result], folder: Path, settings: str, *, name: str) -> None:
        """Open no file before `begin`.

        Args:
            settings: identifies how results are requested and scored.
            name: beginning of the name of each file.
        """
        self._kind, self._folder, self._settings, self._name = kind, folder, settings, name
        self._log: RecordLog | None = None
        self._offsets: dict[bytes, int] = {}

    def begin(self, number: int, weights: str) -> None:
        """Open the file of a policy version or evaluation; `weights`: fingerprint of its weights.

        If it cannot be read or written, a warning says so, and no more results are kept.
        """
        self.close()
        identity = {
            "format": FORMAT,
            self._name: number,
            "weights": weights,
            "data, rewards, settings or seed": self._settings,
        }
        path = journal_path(self._folder, self._name, number)
        loss = "results that it lacks are requested again after a kill"
        self._log = RecordLog(path, identity, self._index, loss=loss)

    def find(self, digest: bytes) -> Result | None:
        """Return the result of the request with this digest, or None."""
        if self._log is None or digest not in self._offsets:
            return None
        payload = self._log.read(self._offsets[digest])
        if payload is None:
            return None
        try:
            return decode(self._kind, json.loads(payload[DIGEST_BYTES:]))
        except ValueError as error:
            logger.warning(
                "%s: cannot read a result (%s): it is requested again", self._log.path, error
            )
            return None

    def append(self, digest: bytes, result: Result) -> None:
        """Write a result."""
        if self._log is not None:
            offset = self._log.append(digest + json.dumps(encode(result)).encode())
            if offset is not None:
                self._offsets[digest] = offset

    def sync(self) -> None:
        """Force all results to disk."""
        if self._log is not None:
            self._log.sync()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._log, self._offsets = None, {}

    def _index(self, offset: int, payload: bytes) -> None:
        self._offsets[payload[:DIGEST_BYTES]] = offset


def journal_path(folder: Path, name: str, number: int) -> Path:
    """Return the file of a policy version or evaluation."""
    return folder / f"{name}-{number}.log"


def group_digest(prompt: Prompt, group: OpenGroup) -> bytes:
    """Return a digest of all that determines a result, except for weights and scoring."""
    parts = (
        *(group.key, encode(prompt), group.prompt_ids, group.seeds, group.settings),
        group.episode,
    )
    digest = hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass"))
    for response in group.responses:
        for array in (response.token_ids, response.policy_versions):
            digest.update(f"/{len(array)}/".encode())
            digest.update(array.tobytes())
    return digest.digest()


def delete_journals_before(run_folder: Path, policy_version: int) -> None:
    """Delete the journals of earlier policy versions, which a checkpoint has made useless.

    Journals of environments stay until a later one exists, which has a copy of open episodes. A
    file that cannot be deleted is tried again with the next checkpoint.
    """
    for prefix in ("", "environments-"):
        found = {}
        for path in (run_folder / JOURNAL_FOLDER).glob(f"{prefix}version-*.log"):
            if match := _FILE_NAME.fullmatch(path.name.removeprefix(prefix)):
                found[int(match[1])] = path
        if not prefix or any(version >= policy_version for version in found):
            for version, path in found.items():
                if version < policy_version:
                    with suppress(OSError):
                        path.unlink()
