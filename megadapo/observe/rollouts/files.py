"""What the model wrote: some groups of each step, in `RUN/rollouts/step-N.jsonl.zst`.

JSON lines compressed with zstd (`zstdcat` shows them), one group a line, as saved_group.py says.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from megadapo.errors import DataError, InfraError
from megadapo.observe.rollouts.saved_group import SavedGroup, decode_saved, encode_saved

logger = logging.getLogger(__name__)

ROLLOUTS_FOLDER = "rollouts"
_FILE_NAME = re.compile(r"step-(\d+)\.jsonl\.zst")
_TEMPORARY = "tmp-"


def rollouts_path(run_folder: Path, step: int) -> Path:
    """Return where the groups of a step are saved."""
    return step_file(run_folder / ROLLOUTS_FOLDER, step)


def saved_steps(run_folder: Path) -> list[int]:
    """Return the steps of a run that have saved groups, ascending."""
    return steps_in(run_folder / ROLLOUTS_FOLDER)


def step_file(folder: Path, step: int) -> Path:
    """Return where the groups of a step are in a folder of saved rollouts."""
    return folder / f"step-{step}.jsonl.zst"


def steps_in(folder: Path) -> list[int]:
    """Return the steps that a folder of saved rollouts has, ascending."""
    if not folder.is_dir():
        return []
    matches = (_FILE_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def read_rollouts(path: Path) -> Iterator[SavedGroup]:
    """Yield the groups of one file, in the order they were asked for.

    Raises:
        DataError: the file cannot be read, is cut off or damaged; it names the file.
    """
    number = 0
    try:
        for line in _lines(path):
            number += 1
            yield decode_saved(json.loads(line))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {number}: not a saved group: {error!r}") from error
    if number == 0:
        raise DataError(f"{path}: holds no group: it is cut off")


def write_rollouts(path: Path, groups: Iterable[SavedGroup]) -> None:
    """Write groups as a file that is there as a whole or not at all.

    Raises:
        InfraError: the disk is full or refuses; it names the file.
    """
    temporary = path.with_name(_TEMPORARY + path.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _compress(groups, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise InfraError(
            f"{path}: cannot be written: {error.strerror or error}; make room there, or save no "
            "responses with observe.saved_groups = 0"
        ) from error


class RolloutLog:
    """Writes a run's saved groups behind the loop's back, one step at a time."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollouts")
        self._writing: Future[None] | None = None

    def write(self, step: int, groups: Iterable[SavedGroup]) -> None:
        """Begin to write the groups of a step; they are taken one by one in another thread."""
        self.wait()
        path = rollouts_path(self._run_folder, step)
        self._writing = self._executor.submit(write_rollouts, path, groups)

    def wait(self) -> None:
        """Wait until what was begun is on the disk.

        Raises:
            InfraError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def rewind(self, step: int) -> None:
        """Delete what was saved after `step`, as a run that resumes there will redo it."""
        for later in saved_steps(self._run_folder):
            if later > step:
                rollouts_path(self._run_folder, later).unlink()
        for unfinished in (self._run_folder / ROLLOUTS_FOLDER).glob(f"{_TEMPORARY}*"):
            unfinished.unlink()

    def close(self) -> None:
        """Finish what was begun; nobody waits for it any more, so an error is only logged."""
        try:
            self.wait()
        except InfraError as error:
            logger.warning("%s", error)
        self._executor.shutdown()


def _compress(groups: Iterable[SavedGroup], path: Path) -> None:
    import pyarrow

    with path.open("wb") as file, pyarrow.CompressedOutputStream(file, "zstd") as compressed:
        for group in groups:
            compressed.write(json.dumps(encode_saved(group), allow_nan=False).encode() + b"\n")


def _lines(path: Path) -> Iterator[str]:
    import pyarrow

    with (
        path.open("rb") as file,
        pyarrow.CompressedInputStream(file, "zstd") as decompressed,
        io.TextIOWrapper(io.BufferedReader(decompressed), encoding="utf-8") as text,
    ):
        yield from text
