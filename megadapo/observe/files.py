"""Text files of a run that a kill or a full disk leaves whole."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from megadapo.errors import InfraError


def replace_text(path: Path, text: str, *, sync: bool = True) -> None:
    """Write a file anew; the old text stays whole until the new one is.

    `sync`: whether the new one is on the disk when this returns.

    Raises:
        InfraError: the disk is full or refuses; the old text stands.
    """
    fresh = path.with_name(f"{path.name}.part")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise _not_written(path, error) from error


def append_line(path: Path, line: str, *, sync: bool = True) -> None:
    """Put a line at a file's end: all of it, or nothing.

    `sync`: whether it is on the disk when this returns.

    Raises:
        InfraError: the disk is full or refuses; the file is as it was.
    """
    try:
        with path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                content = line.encode()
                while content:
                    content = content[file.write(content) :]
                if sync:
                    os.fsync(file.fileno())
            except OSError:
                # what is appended next must not begin in the middle of a line
                with suppress(OSError):
                    file.truncate(end)
                raise
    except OSError as error:
        raise _not_written(path, error) from error


def _not_written(path: Path, error: OSError) -> InfraError:
    return InfraError(f"{path} cannot be written: {error.strerror or error}")
