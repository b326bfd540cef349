"""Checkpoints that are either complete and verified or not there at all.

A checkpoint is written into a new temporary folder: the trainer's shards first, then the run's
state, then `manifest.json` with the size and SHA-256 of every file. Only then is the folder renamed
to `step-N`. A kill at any instant therefore leaves the previous checkpoint untouched, and a flipped
byte is found before anything is loaded (torch and dist_checkpointing load it silently).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megadapo.errors import CheckpointError

FORMAT = "megadapo-checkpoint-1"
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints, in the run's folder."""
STATE = "state.json"
EVALUATING = "evaluating"
"""Key of a run's state: the earlier step, saved too, whose weights are still being evaluated."""
TRAINER = "trainer"
_STEP_NAME = re.compile(r"step-\d+")
_TEMPORARY = "tmp-"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: where its shards lie and the run state beside them."""

    path: Path
    step: int
    state: dict[str, Any]

    @property
    def trainer_folder(self) -> Path:
        return self.path / TRAINER


class CheckpointStore:
    """The checkpoints of one run, in `folder/step-N`."""

    def __init__(self, folder: Path, *, keep: int):
        self.folder = folder
        self._keep = keep

    def save(
        self,
        step: int,
        *,
        write_trainer: Callable[[Path], None],
        state: dict[str, Any],
        in_use: Collection[int] = (),
    ) -> Path:
        """Write and commit the checkpoint of `step`, then delete what `keep` no longer covers.

        Args:
            step: the last completed step.
            write_trainer: fills an existing empty folder with the trainer's shards.
            state: everything else of the run, as JSON values.
            in_use: steps whose checkpoints are being read, and stay for that.
        """
        final = self.folder / f"step-{step}"
        if final.exists():
            raise CheckpointError(f"{final} exists already; it is not overwritten")
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f"{_TEMPORARY}step-{step}-{uuid.uuid4().hex[:8]}"
        (temporary / TRAINER).mkdir(parents=True)
        try:
            write_trainer(temporary / TRAINER)
            _write_durably(temporary / STATE, json.dumps(state))
            _write_manifest(temporary, step)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"cannot write the checkpoint of step {step} to {self.folder}: {error}; "
                "earlier checkpoints are untouched"
            ) from error
        os.rename(temporary, final)
        _sync_folder(self.folder)
        self.prune(in_use)
        return final

    def prune(self, in_use: Collection[int] = ()) -> None:
        """Delete what `keep` does not cover, but for the steps `in_use`, and what was never
        completed."""
        for path in self._committed()[self._keep :]:
            if step_of(path) in in_use:
                continue
            # the manifest goes first: a kill in mid-deletion leaves a folder that cannot verify
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path)
        for path in self._unfinished():
            shutil.rmtree(path)

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that verifies, and one line for each newer one passed over.

        Raises:
            CheckpointError: there are checkpoints, but none of them can be used; starting from
                step 0 in their place would lose the run.
        """
        skipped: list[str] = []
        for path in self._committed():
            try:
                return load(path), skipped
            except CheckpointError as error:
                skipped.append(str(error))
        if skipped:
            raise CheckpointError(
                "no checkpoint of this run can be used:\n  "
                + "\n  ".join(skipped)
                + "\nrestore one from a backup, or start over in another run.folder"
            )
        return None, [f"{path.name} was never completed" for path in self._unfinished()]

    def steps(self) -> list[int]:
        """The steps of all committed checkpoints, sound or not, oldest first."""
        return [step_of(path) for path in step_folders(self.folder)]

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename checkpoints newer than `step`, which a run going on from `step` will make anew."""
        moved = []
        for path in self._committed():
            if step_of(path) > step:
                aside = path.with_name(f"aside-{path.name}-{uuid.uuid4().hex[:8]}")
                moved.append(path.rename(aside))
        return moved

    def _committed(self) -> list[Path]:
        return step_folders(self.folder)[::-1]

    def _unfinished(self) -> list[Path]:
        return sorted(self.folder.glob(f"{_TEMPORARY}*")) if self.folder.is_dir() else []


def step_folders(folder: Path) -> list[Path]:
    """What in `folder` is named step-N and nothing more, the lowest step first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if _STEP_NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """The step that a folder named step-N is of."""
    return int(path.name.removeprefix("step-"))


def load(path: Path) -> Checkpoint:
    """Verify the checkpoint at `path` and read its state.

    Raises:
        CheckpointError: it is incomplete, damaged, of another program or of another user.
    """
    manifest = verify(path)
    state = json.loads((path / STATE).read_text())
    return Checkpoint(path, manifest["step"], state)


def verify(path: Path) -> dict[str, Any]:
    """Check every file of a checkpoint against its manifest and return the manifest."""
    _check_owner(path)
    manifest = _read_manifest(path)
    listed = set(manifest["files"])
    present = {str(p.relative_to(path)) for p in _files(path)} - {MANIFEST}
    if missing := sorted(listed - present):
        raise CheckpointError(f"checkpoint {path} lacks {missing[0]}")
    if unknown := sorted(present - listed):
        raise CheckpointError(f"checkpoint {path} has a file of unknown origin: {unknown[0]}")
    digests = _digests(path, sorted(listed))
    for name, entry in sorted(manifest["files"].items()):
        if digests[name] != entry:
            raise CheckpointError(
                f"checkpoint {path} is damaged: {name} does not match its SHA-256"
            )
    return manifest


def _read_manifest(path: Path) -> dict[str, Any]:
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"checkpoint {path} has no {MANIFEST}: it was never completed")
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path} has a damaged {MANIFEST}: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a megadapo checkpoint (format is not {FORMAT})")
    return manifest


def _check_owner(path: Path) -> None:
    """dist_checkpointing's metadata is a pickle, so only our own folders may be loaded."""
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH:
        raise CheckpointError(
            f"checkpoint {path} belongs to another user or is writable by everyone: it is not "
            "loaded, because it could run code; chown and chmod o-w it if you trust it"
        )


def _write_manifest(path: Path, step: int) -> None:
    names = sorted(str(p.relative_to(path)) for p in _files(path))
    for name in names:
        _sync_file(path / name)
    manifest = {"format": FORMAT, "step": step, "files": _digests(path, names)}
    _write_durably(path / MANIFEST, json.dumps(manifest, indent=1))
    _sync_folder(path)


def _digests(path: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of each file; hashing releases the GIL, so threads help."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda name: _digest(path / name), names), strict=True))


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _files(path: Path) -> Iterator[Path]:
    return (p for p in path.rglob("*") if p.is_file())


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
