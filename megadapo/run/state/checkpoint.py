"""Checkpoints that are either complete and verified or not there at all.

A checkpoint is written into a new temporary folder: the trainer's ranks write their files and
report size and SHA-256 of each, the run's state follows, then `manifest.json` with exactly what was
reported. Only where the folder holds that and nothing else is it renamed to `step-N`. A kill at any
instant therefore leaves the previous checkpoint untouched; a file that is missing, foreign, or of
another node's disk is no checkpoint; and a flipped byte is found before anything is loaded (torch
loads it silently).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megadapo.errors import CheckpointError, CorruptCheckpointError
from megadapo.run.state.permissions import check_permissions
from megadapo.weights.disk.files import (
    FileEntry,
    Files,
    check_files,
    hashed_file,
    remove_folder,
    sync_path,
)

FORMAT = "megadapo-checkpoint-2"
_READABLE = {FORMAT, "megadapo-checkpoint-1"}
"""The first had other shards of the optimizer; its weights can be exported."""
MANIFEST = "manifest.json"
DIGEST = "sha256"
"""Key of the manifest's own hash, over all its other keys."""
CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints, in the run's folder."""
STATE = "state.json"
EVALUATING = "evaluating"
"""Key of a run's state: the earlier step, saved too, whose weights are still being evaluated."""
TRAINER = "trainer"
HEADROOM = 1.02
"""What files need on a disk, as a multiple of their bytes."""
_LOGGER = logging.getLogger("megadapo.run")
_STEP_NAME = re.compile(r"step-\d+")
_TEMPORARY = "tmp-"
_DAMAGED = "damaged-"

WriteTrainer = Callable[[Path], Callable[[], Files]]
"""Begins to write the trainer's files into an empty folder, and returns what waits for the end and
says what was written; may be called in another thread."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: where its shards lie and the run state beside them."""

    path: Path
    step: int
    state: dict[str, Any]
    files: Files = field(default_factory=dict, repr=False)
    """The trainer's, by path in its folder: they are compared by those who read them."""

    @property
    def trainer_folder(self) -> Path:
        return self.path / TRAINER


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint that is being written: it becomes one, or leaves nothing behind."""

    step: int
    final: Path
    folder: Path
    wait: Callable[[], Files]

    def commit(self, state: Mapping[str, Any], about: Mapping[str, Any]) -> Checkpoint:
        """Wait for the trainer's files, add the rest, and make a checkpoint of it.

        Args:
            state: everything else of the run; JSON values, or objects with `to_json`.
            about: goes into the manifest.

        Raises:
            CheckpointError: it could not be written, or has other files than were reported.
            InfraError: a rank is gone.
        """
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            try:
                trainer = self.wait()
                text = json.dumps(state, default=_to_json)
                files = {f"{TRAINER}/{name}": entry for name, entry in trainer.items()}
                files[STATE] = _write(self.folder / STATE, text)
                _check_present(self.folder, files)
                listed = {name: asdict(entry) for name, entry in sorted(files.items())}
                manifest = {"format": FORMAT, "step": self.step, **about, "files": listed}
                manifest[DIGEST] = _digest(manifest)
                _write(self.folder / MANIFEST, json.dumps(manifest, indent=1))
                os.rename(self.folder, self.final)
                sync_path(self.final.parent)
            except (OSError, CheckpointError) as error:
                raise _not_written(self.step, self.final.parent, error) from error
            stack.pop_all()
        return Checkpoint(self.final, self.step, json.loads(text), trainer)


class CheckpointStore:
    """The checkpoints of one run, in `folder/step-N`."""

    def __init__(self, folder: Path, *, keep: int, keep_every: int = 0):
        """`keep_every`: steps that are a multiple of it stay for good; 0: none do."""
        self.folder = folder
        self._keep = keep
        self._keep_every = keep_every

    def begin(
        self, step: int, write_trainer: WriteTrainer, *, num_bytes: int = 0
    ) -> OpenCheckpoint:
        """Begin to write the checkpoint of `step`, the last completed one.

        `num_bytes`: of the trainer's files, about.

        Raises:
            CheckpointError: there is one already, or no room for it.
            MegadapoError: the trainer could not begin.
        """
        final = self.folder / f"step-{step}"
        if final.exists():
            raise CheckpointError(f"{final} exists already; it is not overwritten")
        temporary = self.folder / f"{_TEMPORARY}step-{step}-{uuid.uuid4().hex[:8]}"
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            try:
                (temporary / TRAINER).mkdir(parents=True)
                self._check_room(num_bytes)
                wait = write_trainer(temporary / TRAINER)
            except (OSError, CheckpointError) as error:
                raise _not_written(step, self.folder, error) from error
            stack.pop_all()
        return OpenCheckpoint(step, final, temporary, wait)

    def save(
        self,
        step: int,
        *,
        write_trainer: WriteTrainer,
        state: Mapping[str, Any],
        in_use: Collection[int] = (),
    ) -> Checkpoint:
        """Write and commit the checkpoint of `step`, then delete what `keep` no longer covers.

        `in_use`: steps whose checkpoints are being read, and stay for that.
        """
        checkpoint = self.begin(step, write_trainer).commit(state, {})
        self.prune(in_use)
        return checkpoint

    def _check_room(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < num_bytes * HEADROOM:
            raise CheckpointError(
                f"it needs {num_bytes * HEADROOM / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are "
                "free: make room, or lower checkpoint.keep"
            )

    def prune(self, in_use: Collection[int] = ()) -> None:
        """Delete what `keep` and `keep_every` do not cover, but for the steps `in_use`.

        Damaged ones go with the first that is committed after them.
        """
        for path in self._committed()[self._keep :]:
            step = step_of(path)
            if step not in in_use and not (self._keep_every and step % self._keep_every == 0):
                _delete(path)
        for path in self.folder.glob(f"{_DAMAGED}*"):
            _delete(path)

    def remove_unfinished(self) -> None:
        """Delete what was never completed; nothing may be being written."""
        for path in self._unfinished():
            # a rank of a killed run may still be about to find that out
            with suppress(OSError):
                remove_folder(path)

    def newest(
        self, *, hashes: bool = True, damaged: Mapping[Path, str] | None = None
    ) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that verifies, and one line for each newer one passed over.

        Args:
            hashes: whether the trainer's files are read; else whoever loads them does that.
            damaged: those of which somebody has found out, and what.

        Raises:
            CheckpointError: there are checkpoints, but none of them can be used; starting from
                step 0 in their place would lose the run.
        """
        found, skipped = _first_sound(self._committed(), hashes=hashes, damaged=damaged)
        if found is not None:
            return found, skipped
        if skipped:
            raise CheckpointError(
                "no checkpoint of this run can be used:\n  "
                + "\n  ".join(skipped)
                + "\nrestore one from a backup, or start over in another run.folder"
            )
        return None, [f"{path.name} was never completed" for path in self._unfinished()]

    def newest_after(
        self, step: int, *, damaged: Mapping[Path, str] | None = None
    ) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint of a later step, if one can be used, and one line for each that
        cannot; the trainer's files are not read."""
        later = [path for path in self._committed() if step_of(path) > step]
        return _first_sound(later, hashes=False, damaged=damaged)

    def steps(self) -> list[int]:
        """The steps of all committed checkpoints, sound or not, oldest first."""
        return [step_of(path) for path in step_folders(self.folder)]

    def set_aside_after(self, step: int, *, damaged: bool = False) -> list[Path]:
        """Rename checkpoints newer than `step`, which a run going on from `step` will make anew.

        `damaged`: nobody wants them back; they go when a newer one has been committed.
        """
        moved = []
        for path in self._committed():
            if step_of(path) > step:
                prefix = _DAMAGED if damaged else "aside-"
                aside = path.with_name(f"{prefix}{path.name}-{uuid.uuid4().hex[:8]}")
                moved.append(path.rename(aside))
        return moved

    def _committed(self) -> list[Path]:
        return step_folders(self.folder)[::-1]

    def _unfinished(self) -> list[Path]:
        return sorted(self.folder.glob(f"{_TEMPORARY}*")) if self.folder.is_dir() else []


def _delete(path: Path) -> None:
    try:
        # the manifest goes first: a kill in mid-deletion leaves a folder that cannot verify
        if not path.is_symlink():
            (path / MANIFEST).unlink(missing_ok=True)
        remove_folder(path)
    except OSError as error:
        _LOGGER.warning("%s cannot be deleted: %s", path, error.strerror)


def _first_sound(
    paths: Iterable[Path], *, hashes: bool, damaged: Mapping[Path, str] | None
) -> tuple[Checkpoint | None, list[str]]:
    """The first that verifies, and one line for each one before it."""
    skipped: list[str] = []
    for path in paths:
        if damaged and path in damaged:
            skipped.append(damaged[path])
            continue
        try:
            return load(path, hashes=hashes), skipped
        except CheckpointError as error:
            skipped.append(str(error))
    return None, skipped


def step_folders(folder: Path) -> list[Path]:
    """What in `folder` is named step-N and nothing more, the lowest step first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if _STEP_NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """The step that a folder named step-N is of."""
    return int(path.name.removeprefix("step-"))


def load(path: Path, *, hashes: bool = True) -> Checkpoint:
    """Verify the checkpoint at `path` and read its state.

    `hashes`: whether the trainer's files are read too; their sizes are compared in any case.

    Raises:
        CheckpointError: it is incomplete, damaged, of another program or of another user, or has
            links in it.
    """
    if (path / MANIFEST).is_file():
        check_permissions(path)
    manifest = _read_manifest(path)
    try:
        files = {_inside(name): FileEntry(**entry) for name, entry in manifest["files"].items()}
        step = int(manifest["step"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} has a damaged {MANIFEST}: {error!r}") from error
    try:
        _check_present(path, files)
        trainer = {name: files[name] for name in files if name.startswith(f"{TRAINER}/")}
        check_files(path, files if hashes else {n: files[n] for n in files.keys() - trainer})
        state = json.loads((path / STATE).read_text())
    except (CheckpointError, OSError, ValueError) as error:
        raise CorruptCheckpointError(f"checkpoint {path}: {error}") from error
    return Checkpoint(
        path, step, state, {name.removeprefix(f"{TRAINER}/"): trainer[name] for name in trainer}
    )


def _check_present(folder: Path, files: Files) -> None:
    """Compare names and sizes: of all that is in the folder, the manifest left out."""
    for name, entry in sorted(files.items()):
        # by name: a file server shows what another node wrote later in a folder's list
        try:
            num_bytes = (folder / name).stat().st_size
        except OSError:
            raise CheckpointError(
                f"{name} is missing: is {folder.parent} a folder that all nodes share?"
            ) from None
        if num_bytes != entry.bytes:
            raise CheckpointError(f"{name} has {num_bytes} of {entry.bytes} bytes")
    present = {str(p.relative_to(folder)) for p in _files(folder)} - {MANIFEST}
    if unknown := sorted(present - files.keys()):
        raise CheckpointError(f"{unknown[0]} is a file of unknown origin")


def _read_manifest(path: Path) -> dict[str, Any]:
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"checkpoint {path} has no {MANIFEST}: it was never completed")
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} has a damaged {MANIFEST}: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") not in _READABLE:
        raise CheckpointError(f"{path} is not a megadapo checkpoint (format is not {FORMAT})")
    # those of earlier versions have none
    if manifest.pop(DIGEST, None) not in (None, _digest(manifest)):
        raise CheckpointError(f"checkpoint {path} has a damaged {MANIFEST}: its SHA-256 differs")
    return manifest


def _inside(name: str) -> str:
    """A file's name as a manifest gives it, which must not lead out of the folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"it names {name}")
    return name


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _not_written(step: int, folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"cannot write the checkpoint of step {step} to {folder}: {error}; "
        "earlier checkpoints are untouched"
    )


def _files(path: Path) -> Iterator[Path]:
    return (p for p in path.rglob("*") if p.is_file())


def _write(path: Path, text: str) -> FileEntry:
    with hashed_file(path) as file:
        file.write(text.encode())
    return file.entry


def _to_json(value: Any) -> Any:
    """What a state holds that is written as JSON only where it is saved."""
    return value.to_json()
