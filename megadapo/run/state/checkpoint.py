"""Checkpoints that are either complete and verified or absent.

A checkpoint is written into a new temporary folder: the trainer's ranks write their files and
report size and SHA-256 of each, the run's state follows, then `manifest.json` lists all of them.
The folder is renamed to `step-N` only if it holds exactly these files. So a kill at any instant
leaves the previous checkpoint untouched, and a missing or foreign file, or one on another node's
disk, is found. A flipped byte is found before anything is loaded; torch would load it silently.
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
from operator import methodcaller
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
MANIFEST = "manifest.json"
DIGEST = "sha256"
"""Key of the manifest's own hash, which covers all other keys."""
CHECKPOINTS = "checkpoints"
"""Name of the checkpoints' folder in the run's folder."""
STATE = "state.json"
EVALUATING = "evaluating"
"""Key of a run's state: the earlier saved step whose weights are still being evaluated."""
TRAINER = "trainer"
HEADROOM = 1.02
"""Disk space that files need, as a multiple of their bytes."""
_LOGGER = logging.getLogger("megadapo.run")
_STEP_NAME = re.compile(r"step-\d+")
_TEMPORARY = "tmp-"
_DAMAGED = "damaged-"

WriteTrainer = Callable[[Path], Callable[[], Files]]
"""Begins to write the trainer's files into an empty folder.

Returns a function that waits for the files and lists them; any thread may call it."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: the folder of its shards, and the run's state."""

    path: Path
    step: int
    state: dict[str, Any]
    files: Files = field(default_factory=dict, repr=False)
    """Entries of the trainer's files by path; the ranks that read the files compare them."""

    @property
    def trainer_folder(self) -> Path:
        return self.path / TRAINER


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint in writing; an error leaves no file of it."""

    step: int
    final: Path
    folder: Path
    wait: Callable[[], Files]

    def commit(self, state: Mapping[str, Any], about: Mapping[str, Any]) -> Checkpoint:
        """Wait for the trainer's files, add state and manifest, and rename the folder.

        Args:
            state: the run's state; JSON values, or objects with `to_json`.
            about: further keys of the manifest.

        Raises:
            CheckpointError: it could not be written, or its files differ from the reported ones.
            InfraError: a rank is gone.
        """
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            try:
                trainer = self.wait()
                text = json.dumps(state, default=methodcaller("to_json"))
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
        """
        Args:
            keep: number of newest checkpoints to keep.
            keep_every: steps that are a multiple of it are never deleted; 0 turns this off.
        """
        self.folder = folder
        self.damaged: dict[Path, str] = {}
        """Reason why each checkpoint that its readers found unusable is unusable."""
        self._keep = keep
        self._keep_every = keep_every

    def begin(
        self, step: int, write_trainer: WriteTrainer, *, num_bytes: int = 0
    ) -> OpenCheckpoint:
        """Begin to write the checkpoint of `step`, the last completed one.

        `num_bytes`: approximate size of the trainer's files.

        Raises:
            CheckpointError: it exists, or the disk has no room for it.
            MegadapoError: the trainer could not begin.
        """
        final = self.folder / f"step-{step}"
        if final.exists():
            raise CheckpointError(f"{final} exists already and is not overwritten")
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

    def _check_room(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < num_bytes * HEADROOM:
            raise CheckpointError(
                f"it needs {num_bytes * HEADROOM / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are "
                "free: make room, or lower checkpoint.keep"
            )

    def prune(self, in_use: Collection[int] = ()) -> None:
        """Delete damaged checkpoints, and any that no rule keeps and no reader has `in_use`."""
        for path in self._committed()[self._keep :]:
            step = step_of(path)
            if step not in in_use and not (self._keep_every and step % self._keep_every == 0):
                _delete(path)
        for path in self.folder.glob(f"{_DAMAGED}*"):
            _delete(path)

    def remove_unfinished(self) -> None:
        """Delete checkpoints that were never completed; no save may be pending."""
        for path in self._unfinished():
            # a rank of a killed run may still write into it until it notices
            with suppress(OSError):
                remove_folder(path)

    def newest(self, *, hashes: bool = True) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest checkpoint that verifies, and one line for each newer one skipped.

        `hashes`: whether to hash the trainer's files; otherwise their reader must do it.

        Raises:
            CheckpointError: there are checkpoints, but no usable one. A start from step 0 would
                lose the run.
        """
        found, skipped = self._first_sound(self._committed(), hashes=hashes)
        if found is not None:
            return found, skipped
        if skipped:
            raise CheckpointError(
                "no checkpoint of this run can be used:\n  "
                + "\n  ".join(skipped)
                + "\nrestore one from a backup, or start over in another run.folder"
            )
        return None, [f"{path.name} was never completed" for path in self._unfinished()]

    def newest_after(self, step: int) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest usable checkpoint after `step`, and one line for each unusable one.

        The trainer's files are not hashed.
        """
        later = [path for path in self._committed() if step_of(path) > step]
        return self._first_sound(later, hashes=False)

    def _first_sound(
        self, paths: Iterable[Path], *, hashes: bool
    ) -> tuple[Checkpoint | None, list[str]]:
        """Return the first checkpoint that verifies, and one line for each one before it."""
        skipped: list[str] = []
        for path in paths:
            if path in self.damaged:
                skipped.append(self.damaged[path])
                continue
            try:
                return load(path, hashes=hashes), skipped
            except CheckpointError as error:
                skipped.append(str(error))
        return None, skipped

    def steps(self) -> list[int]:
        """Return the steps of all committed checkpoints, damaged ones included, oldest first."""
        return [step_of(path) for path in step_folders(self.folder)]

    def set_aside_after(self, step: int, *, damaged: bool = False) -> list[Path]:
        """Rename checkpoints after `step`, which the resumed run will write again.

        `damaged`: whether the next commit may delete them.
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
        # the manifest first: after a kill in mid-deletion the folder cannot verify
        if not path.is_symlink():
            (path / MANIFEST).unlink(missing_ok=True)
        remove_folder(path)
    except OSError as error:
        _LOGGER.warning("%s cannot be deleted: %s", path, error.strerror)


def step_folders(folder: Path) -> list[Path]:
    """Return the entries of `folder` named step-N, lowest step first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if _STEP_NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """Return N of a folder named step-N."""
    return int(path.name.removeprefix("step-"))


def load(path: Path, *, hashes: bool = True) -> Checkpoint:
    """Verify the checkpoint at `path` and read its state.

    `hashes`: whether to hash the trainer's files too; their sizes are always compared.

    Raises:
        CheckpointError: it is incomplete, damaged, from another program or user, or has links.
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
    """Compare names and sizes of all files in the folder except the manifest."""
    for name, entry in sorted(files.items()):
        # by name: a file server's folder listing may show another node's files late
        try:
            num_bytes = (folder / name).stat().st_size
        except OSError:
            raise CheckpointError(
                f"{name} is missing: do all nodes share the folder {folder.parent}?"
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
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a megadapo checkpoint (format is not {FORMAT})")
    if manifest.pop(DIGEST, None) != _digest(manifest):
        raise CheckpointError(f"checkpoint {path} has a damaged {MANIFEST}: its SHA-256 differs")
    return manifest


def _inside(name: str) -> str:
    """Return a file name from a manifest; raise ValueError if it leads out of the folder."""
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
