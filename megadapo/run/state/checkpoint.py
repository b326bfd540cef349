"""Checkpoints that are either complete and verified or absent.

A checkpoint is written into a new temporary folder: the trainer's ranks write their files and
report size and SHA-256 of each, the run's state follows, then `manifest.json` lists all of them.
The folder is renamed to `step-N` only if it holds exactly these files. So a kill at any instant
leaves the previous checkpoint untouched, and a missing or foreign file, or one on another node's
disk, is found. A flipped byte is found before anything is loaded; torch would load it silently.

Only what was read completely and differs is damaged. A file that cannot be read raises InfraError
and changes nothing, since a file server that fails over makes sound checkpoints unreadable.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import Any

from megadapo.errors import CheckpointError, CorruptCheckpointError
from megadapo.weights.disk.files import (
    FileEntry,
    Files,
    check_files,
    hashed_file,
    sync_path,
    unreadable,
)


def check_permissions(folder: Path) -> None:
    """Check who can have written the files of a checkpoint.

    Folders must belong to this user, or to the user that the file server maps this user to, which
    is often `nobody` for root. Files may belong to others, because only a folder's owner decides
    who writes in it. Links and entries that everyone may write are refused.

    Raises:
        CheckpointError: another user may have written it, or a part of it is a link.
    """
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            raise CheckpointError(f"{path} is a link: a checkpoint may not contain links")
        if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
            raise CheckpointError(f"{path} is neither a file nor a folder")
        if status.st_mode & stat.S_IWOTH:
            raise _not_loaded(folder, f"{path} is writable by everyone")
        if stat.S_ISDIR(status.st_mode) and status.st_uid not in _own_users(folder.parent):
            raise _not_loaded(folder, f"{path} belongs to user {status.st_uid}")


def _own_users(beside: Path) -> Iterator[int]:
    """Yield this process's user and the owner of the files that it writes in a folder."""
    yield os.getuid()
    try:
        with tempfile.TemporaryFile(dir=beside) as fresh:
            yield os.fstat(fresh.fileno()).st_uid
    except OSError:
        return  # a read-only folder does not show how its server maps users


def _not_loaded(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {folder} is not loaded: {reason}, so another user may have modified it; "
        "chown and chmod o-w it if you trust it"
    )


FORMAT = "megadapo-checkpoint-3"
MANIFEST = "manifest.json"
ROWS_STATE = "rows"
"""Key of the state of a run on rows, without rollouts."""
DIGEST = "sha256"
"""Key of the manifest's own hash, which covers all other keys."""
STATE = "state.json"
EVALUATING = "evaluating"
"""Key of a run's state: the earlier saved step whose weights are still being evaluated."""
TRAINER = "trainer"
CONFIG, SAMPLES, MODELS = "config", "samples", "models"
"""Keys of a manifest: the run's configuration, the digest of the rules of its samples, and the
files of the models that it started from."""

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
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    """Configuration of the run that wrote it."""
    samples: str | None = None
    """Digest of the rules by which its groups were sampled and scored."""
    models: dict[str, dict[str, str]] = field(default_factory=dict, repr=False)
    """Digests of the models' files, by key and file; none in checkpoints of earlier versions."""
    accepts_other_data: bool = False
    """Whether the resumed run may have other training data."""

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
                # an end of the run, not a surprise at its next start
                check_permissions(self.folder)
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
                raise not_written(self.step, self.final.parent, error) from error
            stack.pop_all()
        return Checkpoint(
            self.final,
            self.step,
            json.loads(text),
            trainer,
            json.loads(json.dumps(about.get(CONFIG, {}))),
            about.get(SAMPLES),
            about.get(MODELS, {}),
        )


def load(path: Path, *, hashes: bool = True) -> Checkpoint:
    """Verify the checkpoint at `path` and read its state.

    `hashes`: whether to hash the trainer's files too; their sizes are always compared.

    Raises:
        CorruptCheckpointError: it is incomplete or damaged.
        CheckpointError: it is from another program or user, or has links.
        InfraError: a file cannot be read.
    """
    try:
        return _load(path, hashes=hashes)
    except OSError as error:
        raise unreadable(Path(error.filename or path), error) from error


def _load(path: Path, *, hashes: bool) -> Checkpoint:
    if os.path.lexists(path / MANIFEST):
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
    except (CheckpointError, ValueError) as error:
        raise CorruptCheckpointError(f"checkpoint {path}: {error}") from error
    return Checkpoint(
        path,
        step,
        state,
        {name.removeprefix(f"{TRAINER}/"): trainer[name] for name in trainer},
        manifest.get(CONFIG, {}),
        manifest.get(SAMPLES),
        manifest.get(MODELS, {}),
    )


def _check_present(folder: Path, files: Files) -> None:
    """Compare names and sizes of all files in the folder except the manifest."""
    for name, entry in sorted(files.items()):
        # files are looked up by name: a file server may list another node's files late
        try:
            num_bytes = (folder / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(
                f"{name} is missing: do all nodes share the folder {folder.parent}?"
            ) from None
        if num_bytes != entry.bytes:
            raise CheckpointError(f"{name} has {num_bytes} of {entry.bytes} bytes")
    present = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {MANIFEST}
    if unknown := sorted(present - files.keys()):
        raise CheckpointError(f"{unknown[0]} is a file of unknown origin")


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise CorruptCheckpointError(
            f"checkpoint {path} has no {MANIFEST}: it was never completed"
        ) from None
    except (IsADirectoryError, NotADirectoryError, ValueError) as error:
        raise _damaged(path, error) from error
    if not isinstance(manifest, dict):
        raise _damaged(path, "it is not an object")
    is_own = manifest.get("format") == FORMAT
    # a flipped byte can be in the name of the format
    if (is_own or DIGEST in manifest) and manifest.pop(DIGEST, None) != _digest(manifest):
        raise _damaged(path, "its SHA-256 differs")
    if not is_own:
        raise CheckpointError(f"{path} is not a megadapo checkpoint (format is not {FORMAT})")
    return manifest


def _damaged(path: Path, why: object) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"checkpoint {path} has a damaged {MANIFEST}: {why}")


def _inside(name: str) -> str:
    """Return a file name from a manifest; raise ValueError if it leads out of the folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"it names {name}")
    return name


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def not_written(step: int, folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"cannot write the checkpoint of step {step} to {folder}: {error}; "
        "earlier checkpoints are untouched"
    )


def _write(path: Path, text: str) -> FileEntry:
    with hashed_file(path) as file:
        file.write(text.encode())
    return file.entry
