"""A run's folder, and writes to text files that a kill or a full disk cannot tear."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megadapo.errors import ConfigError, InfraError


def make_folder(folder: Path) -> list[str]:
    """Create a run's folder, readable by its user only; return a warning if others can read it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        readable = folder.stat().st_mode & stat.S_IROTH
    except OSError as error:
        # a folder that is not mounted yet can be created later, one below a file never
        is_wrong = isinstance(error, NotADirectoryError | FileExistsError)
        kind = ConfigError if is_wrong else InfraError
        raise kind(f"run.folder = {folder} cannot be created: {error.strerror}") from error
    if not readable:
        return []
    return [
        f"every user of this machine can read {folder}, with its prompts, responses and settings: "
        "chmod o-rwx unless they should"
    ]


@contextmanager
def replaced(path: Path, *, sync: bool = True, with_folder: bool = False) -> Iterator[Path]:
    """Yield the path of a new file, which replaces `path` at the end; an error removes it.

    Args:
        sync: flush the file to the disk.
        with_folder: create the folder if it is missing.

    Raises:
        InfraError: the disk refuses; the old file is unchanged.
    """
    # each process has its own new file, so that two commands cannot mix their texts
    fresh = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        if with_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield fresh
        if sync:
            with fresh.open("rb") as file:
                os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        raise _not_written(path, error) from error
    finally:
        # after the replacement there is no such file
        with suppress(OSError):
            fresh.unlink(missing_ok=True)


def replace_text(path: Path, text: str, *, sync: bool = True, with_folder: bool = False) -> None:
    """Replace a file's text as `replaced` does."""
    with replaced(path, sync=sync, with_folder=with_folder) as fresh:
        fresh.write_text(text, encoding="utf-8")


def append_line(path: Path, line: str, *, sync: bool = True) -> None:
    """Append a line to a file, the whole line or nothing; `sync` flushes it to the disk.

    Raises:
        InfraError: the disk refuses the write; the file is unchanged.
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
                # the next append must start on a new line
                with suppress(OSError):
                    file.truncate(end)
                raise
    except OSError as error:
        raise _not_written(path, error) from error


def complete_lines(path: Path, *, last_bytes: int | None = None) -> list[bytes]:
    """Return the lines of a file that end in a line break, or an empty list without the file.

    Args:
        last_bytes: size of the end of the file to read; None reads all of it.
    """
    try:
        with path.open("rb") as file:
            start = 0 if last_bytes is None else max(0, file.seek(0, os.SEEK_END) - last_bytes)
            file.seek(start)
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    # text after the last line break was cut off by a kill, or is being written
    return lines[1 if start else 0 : -1]


def _not_written(path: Path, error: OSError) -> InfraError:
    return InfraError(f"{path} cannot be written: {error.strerror or error}")
