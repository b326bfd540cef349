"""The check that only this user can have written a checkpoint."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megadapo.errors import CheckpointError


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
