"""The checkpoints of one run: which are committed, which are deleted, which are set aside."""

from __future__ import annotations

import logging
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

from megadapo.errors import CheckpointError, CorruptCheckpointError
from megadapo.run.state.checkpoint import (
    MANIFEST,
    TRAINER,
    Checkpoint,
    OpenCheckpoint,
    WriteTrainer,
    load,
    not_written,
)
from megadapo.weights.disk.files import remove_folder, unreadable

CHECKPOINTS = "checkpoints"
"""Name of the checkpoints' folder in the run's folder."""
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


class CheckpointStore:
    """The checkpoints of one run, in `folder/step-N`."""

    def __init__(self, folder: Path, *, keep: int):
        """`keep`: number of newest checkpoints to keep."""
        self.folder = folder
        self.damaged: dict[Path, str] = {}
        """Reason why each checkpoint that its readers found unusable is unusable."""
        self._keep = keep

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
                raise not_written(step, self.folder, error) from error
            stack.pop_all()
        return OpenCheckpoint(step, final, temporary, wait)

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
        committed = self._committed()
        for path in committed[self._keep :]:
            if step_of(path) not in in_use:
                _delete(path)
        steps = [step_of(path) for path in committed]
        for path in self.folder.glob(f"{_DAMAGED}step-*"):
            # other names are the user's
            name = _DAMAGED_NAME.fullmatch(path.name)
            if name and sum(newer > int(name[1]) for newer in steps) >= self._keep:
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
            CheckpointError: there are checkpoints, but no usable one, so a start from step 0 would
                lose the run; or a newer one may be sound and is not loaded.
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
        """Return the first checkpoint that verifies, and one line for each damaged one before it.

        Raises:
            CheckpointError: one before it may be sound, and would be set aside as damaged.
        """
        skipped: list[str] = []
        for path in paths:
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
        return [step_of(path) for path in step_folders(self.folder)]

    def set_aside_after(self, step: int, *, damaged: bool = False) -> list[Path]:
        """Rename checkpoints after `step`, which the resumed run will write again.

        `damaged`: whether later commits may delete them.
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
    """Return the entries of `folder` named step-N, lowest step first; none if it is missing.

    Raises:
        InfraError: the folder cannot be read.
    """
    try:
        found = [path for path in folder.iterdir() if _STEP_NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(folder, error) from error
    return sorted(found, key=step_of)


def checkpoints_of(run_folder: Path) -> dict[int, Path]:
    """Return the folders of a run's complete checkpoints by step, lowest first."""
    return {step_of(path): path for path in step_folders(run_folder / CHECKPOINTS)}


def step_of(path: Path) -> int:
    """Return N of a folder named step-N."""
    return int(path.name.removeprefix("step-"))
