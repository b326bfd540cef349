"""Results that no checkpoint holds yet, kept on disk until one does, so that a kill loses nothing.

`Journal` keeps the scored groups of the current weights, one file per policy version. Its first
record identifies weights and settings; every other record is a group under a digest of its
request. So a group is only found for the same request to the same weights. `EvaluationJournal`
keeps the results of the evaluation in progress.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megadapo.data.group import Group, decode_group, encode_group
from megadapo.data.prompts import Prompt
from megadapo.rollout.journal.record_log import JOURNAL_FOLDER, RecordLog
from megadapo.rollout.types import OpenGroup

_LOGGER = logging.getLogger("megadapo.rollout")
FORMAT = 1
"""Version of the records; a journal with another version is discarded."""
_FILE_NAME = re.compile(r"version-(\d+)\.log")
DIGEST_BYTES = 32
_DIFFERENCES = {
    "format": "another version of megadapo",
    "policy_version": "another policy version",
    "weights": "other weights",
    "settings": "other data, rewards, settings or another seed",
}


class Journal:
    """The groups that the current weights have generated, in this process and killed ones."""

    def __init__(self, run_folder: Path, settings: str) -> None:
        """`settings`: identifies how groups are requested and scored."""
        self._folder = run_folder / JOURNAL_FOLDER
        self._settings = settings
        self._header: dict[str, Any] = {}
        self._log: RecordLog | None = None
        self._offsets: dict[bytes, int] = {}
        self._writes = False
        self._warnings: list[str] = []

    def begin(self, policy_version: int, weights: str) -> None:
        """Open the journal for new weights, whose fingerprint is `weights`."""
        self.close()
        self._header = {
            "format": FORMAT,
            "policy_version": policy_version,
            "weights": weights,
            "settings": self._settings,
        }
        self._writes = True
        try:
            if not self._path.exists():
                return
        except OSError as error:
            self._give_up(error)
            return
        self._open()

    def find_group(self, digest: bytes) -> Group | None:
        """Return the group of the request with this digest, or None."""
        offset = self._offsets.get(digest)
        if offset is None or self._log is None:
            return None
        try:
            payload = self._log.read(offset)
        except OSError:
            payload = None
        if payload is None:
            self._warn(f"cannot read the record at byte {offset}: its prompt is requested again")
            return None
        try:
            entry = json.loads(payload[DIGEST_BYTES:])
            return replace(decode_group(entry["group"]), seconds=entry["seconds"])
        except (KeyError, TypeError, ValueError) as error:
            self._warn(f"cannot read a group ({error!r}): its prompt is requested again")
            return None

    def append_group(self, digest: bytes, group: Group) -> None:
        """Write a group; a disk error adds a warning and ends the journal of these weights."""
        if not self._writes:
            return
        if self._log is None:
            self._open()
        entry = {"group": encode_group(group), "seconds": group.seconds}
        try:
            if self._writes and self._log is not None:
                self._offsets[digest] = self._log.append(digest + json.dumps(entry).encode())
        except OSError as error:
            self._give_up(error)

    def sync(self) -> None:
        """Force all entries to disk."""
        try:
            if self._writes and self._log is not None:
                self._log.sync()
        except OSError as error:
            self._give_up(error)

    def drain_warnings(self) -> list[str]:
        """Return the warnings since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._log, self._offsets, self._writes = None, {}, False

    @property
    def _path(self) -> Path:
        return self._folder / f"version-{self._header['policy_version']}.log"

    def _open(self) -> None:
        """Index the groups of the current weights, and discard those of any others."""
        headers: list[bytes] = []

        def index(offset: int, payload: bytes) -> None:
            if offset == 0:
                headers.append(payload)
            else:
                self._offsets[payload[:DIGEST_BYTES]] = offset

        header = json.dumps(self._header).encode()
        try:
            self._folder.mkdir(exist_ok=True)
            self._log = RecordLog(self._path, index)
            if self._log.cut:
                self._warn(f"{self._log.cut}: the groups from there on are requested again")
            if headers and headers != [header]:
                difference = self._difference(headers[0])
                self._warn(f"was written with {difference}: its groups are requested again")
            if headers != [header]:
                self._offsets = {}
                self._log.clear()
                self._log.append(header)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Write nothing more until the next weights; written records stay readable."""
        self._writes = False
        self._warn(
            f"cannot be written: {error.strerror}; if the run is killed, further groups of these "
            "weights are lost"
        )

    def _warn(self, text: str) -> None:
        self._warnings.append(f"{self._path}: {text}")

    def _difference(self, header: bytes) -> str:
        """Return the reason why the journal with this header is not the current one."""
        try:
            found = json.loads(header)
            names = (name for name in self._header if found.get(name) != self._header[name])
            return _DIFFERENCES[next(names)]
        except (AttributeError, StopIteration, ValueError):
            return _DIFFERENCES["format"]


def group_digest(prompt: Prompt, group: OpenGroup) -> bytes:
    """Return a digest of all that determines a group, except for weights and scoring."""
    parts = (
        *(group.key, prompt.to_json(), group.prompt_ids, group.seeds, group.settings),
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


@dataclass(frozen=True, kw_only=True)
class ProblemResult:
    """The result of one held-out problem, as numbers."""

    num_correct: int | None
    """Number of correct responses, if a reward function says what is correct."""
    num_scored: int
    """Number of responses with a score."""
    reward_sum: float
    consensus: float | None
    """Whether the most frequent answer is correct; see `sampling/evaluation.py`."""
    num_tokens: int
    num_truncated: int
    """Number of responses cut at the length limit."""


class EvaluationJournal:
    """The results of one evaluation, on disk until the evaluation is recorded."""

    def __init__(self, path: Path, identity: str) -> None:
        """Read the results of the same weights and scoring; ignore others.

        `identity`: identifies weights and scoring.

        If the file cannot be read or written, a warning says so, and no more results are kept.
        """
        self.results: dict[str, ProblemResult] = {}
        """Results by digest of the request."""
        self._path = path
        self._identity = identity
        self._log: RecordLog | None = None
        try:
            self._log = RecordLog(path, self._read)
        except OSError as error:
            self._give_up(error)

    def append(self, digest: str, result: ProblemResult) -> None:
        """Write a problem's result."""
        if self._log is None:
            return
        entry = {"scored": self._identity, "request": digest, "result": asdict(result)}
        try:
            self._log.append(json.dumps(entry).encode())
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._log = None

    def _give_up(self, error: OSError) -> None:
        """Write nothing more; written records stay readable."""
        self.close()
        _LOGGER.warning(
            "%s fails: %s; if the run is killed, the whole evaluation is repeated",
            *(self._path, error.strerror),
        )

    def _read(self, offset: int, payload: bytes) -> None:
        entry = json.loads(payload)
        # results of earlier versions lack the sum of rewards
        if entry["scored"] == self._identity and "reward_sum" in entry["result"]:
            self.results[entry["request"]] = ProblemResult(**entry["result"])


def evaluation_journal_path(folder: Path, step: int) -> Path:
    """Return the file for the results of the evaluation after `step`."""
    return folder / f"evaluation-{step}.log"
