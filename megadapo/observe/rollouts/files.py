"""Files of saved groups, `RUN/rollouts/step-N.jsonl.zst`, in `rollouts/held_out/` of evaluations.

Each file has JSON lines compressed with zstd (`zstdcat` prints them), one group per line in the
format of saved_group.py.
"""

from __future__ import annotations

import io
import json
import logging
import re
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from megadapo.codec import decode, encode
from megadapo.errors import DataError, InfraError
from megadapo.observe.files import replaced
from megadapo.observe.metrics.records import ASIDE_FOLDER
from megadapo.observe.rollouts.saved_group import SavedGroup

logger = logging.getLogger(__name__)

ROLLOUTS_FOLDER = "rollouts"
HELD_OUT_FOLDER = "rollouts/held_out"
"""Folder of the same files with the groups of the evaluation after a step."""
_FILE_NAME = re.compile(r"step-(\d+)\.jsonl\.zst")
MAX_LINE_LENGTH = 1 << 30
"""Longest line that is read, in characters: a group has about 100 for each of its tokens. A damaged
or foreign file may be one line of any length."""


def rollouts_path(run_folder: Path, step: int) -> Path:
    """Return the file of a step in a run folder."""
    return step_file(run_folder / ROLLOUTS_FOLDER, step)


def saved_steps(run_folder: Path, folder: str = ROLLOUTS_FOLDER) -> list[int]:
    """Return the steps with saved groups in a run folder, ascending."""
    return steps_in(run_folder / folder)


def step_file(folder: Path, step: int) -> Path:
    """Return the file of a step in a folder of saved rollouts."""
    return folder / f"step-{step}.jsonl.zst"


def steps_in(folder: Path) -> list[int]:
    """Return the steps in a folder of saved rollouts, ascending."""
    if not folder.is_dir():
        return []
    matches = (_FILE_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def read_rollouts(path: Path) -> Iterator[SavedGroup]:
    """Yield the groups of one file, by prompt index.

    Raises:
        DataError: the file cannot be read, is cut off or damaged; the error names it.
    """
    number = 0
    try:
        for line in _lines(path):
            number += 1
            if len(line) == MAX_LINE_LENGTH:
                raise ValueError(f"longer than {MAX_LINE_LENGTH} characters")
            yield decode(SavedGroup, json.loads(line))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {number}: not a saved group: {error}") from error
    if number == 0:
        raise DataError(f"{path}: has no group: it is cut off")


def write_rollouts(path: Path, groups: Iterable[SavedGroup]) -> None:
    """Write groups to a file atomically.

    Raises:
        InfraError: the disk is full or refuses; the error names the file.
    """
    import pyarrow

    try:
        with (
            replaced(path, with_folder=True) as fresh,
            fresh.open("wb") as output,
            pyarrow.CompressedOutputStream(output, "zstd") as compressed,
        ):
            for group in groups:
                line = json.dumps(encode(group, readable=True), allow_nan=False)
                compressed.write(line.encode() + b"\n")
    except InfraError as error:
        advice = "free disk space, or save no responses with observe.saved_groups = 0"
        raise InfraError(f"{error}; {advice}") from error


class RolloutLog:
    """A background writer of a run's saved groups, for one step at a time."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollouts")
        self._writing: Future[None] | None = None

    def write(self, step: int, groups: Iterable[SavedGroup]) -> None:
        """Start to write the groups of a step; another thread iterates over them."""
        self.wait()
        path = rollouts_path(self._run_folder, step)
        self._writing = self._executor.submit(write_rollouts, path, groups)

    def wait(self) -> None:
        """Wait until the current step is on disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def rewind(self, step: int) -> None:
        """Set aside the files of steps after `step`, which a resumed run writes again."""
        for name in (ROLLOUTS_FOLDER, HELD_OUT_FOLDER):
            folder, aside = self._run_folder / name, self._run_folder / ASIDE_FOLDER / name
            for later in steps_in(folder):
                if later > step:
                    aside.mkdir(parents=True, exist_ok=True)
                    path = step_file(folder, later)
                    path.rename(aside / f"{uuid.uuid4().hex[:8]}-{path.name}")
            for unfinished in folder.glob("*.part"):
                unfinished.unlink()

    def close(self) -> None:
        """Wait for the current step and stop the thread; an error is only logged."""
        try:
            self.wait()
        except InfraError as error:
            logger.warning("%s", error)
        self._executor.shutdown()


def _lines(path: Path) -> Iterator[str]:
    import pyarrow

    with (
        path.open("rb") as file,
        pyarrow.CompressedInputStream(file, "zstd") as decompressed,
        io.TextIOWrapper(io.BufferedReader(decompressed), encoding="utf-8") as text,
    ):
        yield from iter(lambda: text.readline(MAX_LINE_LENGTH), "")
