"""The checkpoints of a run, each of which is complete and verified or absent.

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
import logging
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megadapo.codec import encode
from megadapo.errors import CheckpointError, CorruptCheckpointError
from megadapo.weights.disk.files import (
    FileEntry,
    Files,
    check_files,
    hashed_file,
    remove_folder,
    sync_path,
    unreadable,
)


def check_permissions(folder: Path) -> None:
    """Raise CheckpointError if another user may have written a checkpoint, or if it has a link.

    Folders must belong to this user, or to the user that the file server maps this user to, which
    is often `nobody` for root. Files may belong to others, because only a folder's owner decides
    who writes in it. Links and entries that everyone may write are refused.
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
Commit = Callable[[Mapping[str, Any], Mapping[str, Any]], "Checkpoint"]
"""Completes a checkpoint from the run's state and further keys of the manifest; the state has JSON
values, or dataclasses."""
CHECKPOINTS = "checkpoints"
GIB = 1 << 30
REMOVABLE = ("checkpoints/aside-*", "checkpoints/damaged-*", "exports", "aside", "rollouts", "logs")
"""Entries of a run's folder that only people need."""
HEADROOM = 1.02
"""Disk space that files need, as a multiple of their bytes."""
_LOGGER = logging.getLogger("megadapo.run")
_STEP_NAME = re.compile(r"step-\d+")
_TEMPORARY = "tmp-"
_DAMAGED = "damaged-"
_DAMAGED_NAME = re.compile(r"damaged-step-(\d+)-[0-9a-f]{8}")


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
    """Digests of the models' files, by key and file."""
    accepts_other_data: bool = False
    """Whether the resumed run may have other training data."""

    @property
    def trainer_folder(self) -> Path:
        return self.path / TRAINER


def load(path: Path, *, hashes: bool = True) -> Checkpoint:
    """Verify the checkpoint at `path` and read its state.

    Raise CorruptCheckpointError if it is incomplete or damaged, CheckpointError if it is from
    another program or user, or has links, and InfraError if a file cannot be read.

    `hashes`: whether to hash the trainer's files too; their sizes are always compared.
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
    return _checkpoint(path, step, state, files, manifest)


def _checkpoint(
    path: Path, step: int, state: dict[str, Any], files: Files, about: Mapping[str, Any]
) -> Checkpoint:
    """Return a checkpoint, given all of its files and its manifest."""
    prefix = f"{TRAINER}/"
    trainer = {n.removeprefix(prefix): files[n] for n in files if n.startswith(prefix)}
    models = about.get(MODELS, {})
    return Checkpoint(path, step, state, trainer, about.get(CONFIG, {}), about.get(SAMPLES), models)


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


class CheckpointStore:
    """The checkpoints of one run, in `folder/step-N`."""

    def __init__(self, folder: Path, *, keep: int):
        """`keep`: number of newest checkpoints to keep."""
        self.folder = folder
        self.damaged: dict[Path, str] = {}
        """Reason why each checkpoint that its readers found unusable is unusable."""
        self._keep = keep

    def begin(self, step: int, write_trainer: WriteTrainer, *, num_bytes: int = 0) -> Commit:
        """Begin to write the checkpoint of `step`, the last completed one.

        Return a function that waits for the trainer's files and completes the checkpoint; an error
        leaves no file of it. Raise CheckpointError if the checkpoint exists, or if the disk has no
        room for its `num_bytes`.
        """
        final = self.folder / f"step-{step}"
        temporary = self.folder / f"{_TEMPORARY}step-{step}-{uuid.uuid4().hex[:8]}"
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            try:
                if final.exists():
                    raise CheckpointError(f"{final} exists already and is not overwritten")
                (temporary / TRAINER).mkdir(parents=True)
                self._check_room(num_bytes)
                wait = write_trainer(temporary / TRAINER)
            except (OSError, CheckpointError) as error:
                raise not_written(step, self.folder, error) from error
            stack.pop_all()
        return partial(_commit, step, temporary, final, wait)

    def _check_room(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < num_bytes * HEADROOM:
            raise CheckpointError(
                f"it needs {num_bytes * HEADROOM / GIB:.2f} GiB and {free / GIB:.2f} GiB are "
                f"free: make room, or lower checkpoint.keep{self._removable()}"
            )

    def low_space(self, num_bytes: int) -> str | None:
        """Return a warning if the disk has no room for one more checkpoint of this size."""
        free = shutil.disk_usage(self.folder).free
        if free >= num_bytes * HEADROOM:
            return None
        return (
            f"{free / GIB:.2f} GiB are free in {self.folder}, less than the next checkpoint of "
            f"{num_bytes / GIB:.2f} GiB{self._removable()}"
        )

    def _removable(self) -> str:
        """Describe what the run does not need to continue, the largest first."""
        found = Counter[str]()
        for pattern in REMOVABLE:
            for path in self.folder.parent.glob(pattern):
                files = [path, *path.rglob("*")]
                found[pattern] += sum(file.lstat().st_size for file in files if file.is_file())
        parts = [f"{pattern} ({size / GIB:.2f} GiB)" for pattern, size in found.most_common()]
        return f"; the run continues without {', '.join(parts)}" if parts else ""

    def prune(self, in_use: Collection[int] = ()) -> None:
        """Delete all but the newest checkpoints and those of the steps `in_use`.

        A damaged one stays until as many newer ones as a run keeps are committed.
        """
        committed = step_folders(self.folder)
        for step in list(committed)[: -self._keep]:
            if step not in in_use:
                _delete(committed[step])
        for path in self.folder.glob(f"{_DAMAGED}step-*"):
            # other names are the user's
            name = _DAMAGED_NAME.fullmatch(path.name)
            if name and sum(newer > int(name[1]) for newer in committed) >= self._keep:
                _delete(path)

    def remove_unfinished(self) -> None:
        """Delete checkpoints that were never completed; no save may be pending."""
        for path in self._unfinished():
            # a rank of a killed run may still write into it until it notices
            with suppress(OSError):
                remove_folder(path)

    def newest(self, *, hashes: bool = True) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest checkpoint that verifies, and one line for each newer one skipped.

        Raise CheckpointError if there are checkpoints and none is usable: a start from step 0 would
        lose the run. `hashes`: whether to hash the trainer's files; otherwise their reader must do
        it.
        """
        found, skipped = self.newest_sound(hashes=hashes)
        if found is not None:
            return found, skipped
        if skipped:
            raise CheckpointError(
                "no checkpoint of this run can be used:\n  "
                + "\n  ".join(skipped)
                + "\nrestore one from a backup, or start over in another run.folder"
            )
        return None, [f"{path.name} was never completed" for path in self._unfinished()]

    def newest_sound(self, *, after: int = -1, hashes: bool) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest checkpoint that verifies, and one line for each newer damaged one.

        Raise CheckpointError if a newer one may be sound, and would be set aside as damaged.

        Args:
            after: only checkpoints of later steps count.
            hashes: as in `newest`.
        """
        skipped: list[str] = []
        for path in self._newer_than(after):
            if path in self.damaged:
                skipped.append(self.damaged[path])
                continue
            try:
                return load(path, hashes=hashes), skipped
            except CorruptCheckpointError as error:
                skipped.append(str(error))
            except CheckpointError as error:
                raise CheckpointError(
                    f"{error}\nto resume from an earlier checkpoint, move {path} out of this folder"
                ) from error
        return None, skipped

    def steps(self) -> list[int]:
        """Return the steps of all committed checkpoints, damaged ones included, oldest first."""
        return list(step_folders(self.folder))

    def set_aside_after(self, step: int, *, damaged: bool = False) -> list[Path]:
        """Rename checkpoints after `step`, which the resumed run will write again.

        `damaged`: whether later commits may delete them.
        """
        moved = []
        for path in self._newer_than(step):
            prefix = _DAMAGED if damaged else "aside-"
            aside = path.with_name(f"{prefix}{path.name}-{uuid.uuid4().hex[:8]}")
            moved.append(path.rename(aside))
        return moved

    def _newer_than(self, step: int) -> list[Path]:
        """Return the committed checkpoints after `step`, newest first."""
        committed = step_folders(self.folder)
        return [committed[saved] for saved in reversed(committed) if saved > step]

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


def step_folders(folder: Path) -> dict[int, Path]:
    """Return the entries of `folder` named step-N by their N, lowest first; none without it."""
    try:
        found = [path for path in folder.iterdir() if _STEP_NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreadable(folder, error) from error
    return dict(sorted((int(path.name.removeprefix("step-")), path) for path in found))


def checkpoints_of(run_folder: Path) -> dict[int, Path]:
    """Return the folders of a run's complete checkpoints by step, lowest first."""
    return step_folders(run_folder / CHECKPOINTS)


def _commit(
    step: int,
    folder: Path,
    final: Path,
    wait: Callable[[], Files],
    state: Mapping[str, Any],
    about: Mapping[str, Any],
) -> Checkpoint:
    """Wait for the trainer's files, add state and manifest, and rename `folder` to `final`.

    Raise CheckpointError if they differ from the reported ones, InfraError if a rank is gone.
    """
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            files = {f"{TRAINER}/{name}": entry for name, entry in wait().items()}
            # an end of the run, not a surprise at its next start
            check_permissions(folder)
            text = json.dumps(state, default=encode)
            files[STATE] = _write(folder / STATE, text)
            _check_present(folder, files)
            listed = {name: asdict(entry) for name, entry in sorted(files.items())}
            manifest = {"format": FORMAT, "step": step, **about, "files": listed}
            manifest[DIGEST] = _digest(manifest)
            _write(folder / MANIFEST, json.dumps(manifest, indent=1))
            os.rename(folder, final)
            sync_path(final.parent)
        except (OSError, CheckpointError) as error:
            raise not_written(step, final.parent, error) from error
        stack.pop_all()
    return _checkpoint(final, step, json.loads(text), files, json.loads(json.dumps(about)))


def not_written(step: int, folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"cannot write the checkpoint of step {step} to {folder}: {error}; "
        "earlier checkpoints are untouched"
    )


def _write(path: Path, text: str) -> FileEntry:
    with hashed_file(path) as file:
        file.write(text.encode())
    return file.entry
