"""Whether a checkpoint may be read: it is the user's own, and nothing in it leads elsewhere."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megadapo.errors import CheckpointError


def check_trusted(folder: Path) -> None:
    """Find out who can have written what a checkpoint's folder holds.

    The folders must belong to whoever writes here: this user, or whom a file server takes this user
    for, as one that maps root to nobody does. Files in them may belong to others (ranks that the
    server maps in another way), as only who may write in a folder can have put them there. Nothing
    may be writable by everyone, and nothing be a link.

    Raises:
        CheckpointError: somebody else can have written it, or a part of it lies elsewhere.
    """
    for path in _everything(folder):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            raise CheckpointError(f"{path} is a link: nothing of a checkpoint may lie elsewhere")
        if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
            raise CheckpointError(f"{path} is neither a file nor a folder")
        if status.st_mode & stat.S_IWOTH:
            raise _not_loaded(folder, f"{path} is writable by everyone")
        if stat.S_ISDIR(status.st_mode) and status.st_uid not in _own_users(folder.parent):
            raise _not_loaded(folder, f"{path} belongs to user {status.st_uid}")


def _everything(folder: Path) -> Iterator[Path]:
    yield folder
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent, name) for name in (*folders, *files))


def _own_users(beside: Path) -> Iterator[int]:
    """Who this process is, and whose its files are in a folder."""
    yield os.getuid()
    try:
        with tempfile.TemporaryFile(dir=beside) as fresh:
            yield os.fstat(fresh.fileno()).st_uid
    except OSError:
        return  # what cannot be written to says nothing of its server


def _not_loaded(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {folder} is not loaded: {reason}, so somebody else can have made it what it "
        "is; chown and chmod o-w it if you trust it"
    )
