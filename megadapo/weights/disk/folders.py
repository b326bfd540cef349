"""Deleting and copying that stays inside a folder, whatever links lie in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from megadapo.errors import WeightError

_SNAPSHOTS, _BLOBS = "snapshots", "blobs"
"""Folders of the Hub's cache: files of a snapshot are links to blobs of the same model."""


def remove_folder(path: Path) -> None:
    """Delete a folder; of a link the link alone.

    Raises:
        OSError: it could not be deleted.
    """
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def files_within(folder: Path, patterns: Iterable[str]) -> Iterator[Path]:
    """The files of a model's folder that match, in the order of the patterns.

    Raises:
        WeightError: one is a link that leads out of the folder: what it leads to was never meant to
            be copied with a model.
    """
    root = folder.resolve()
    roots = {root}
    if root.parent.name == _SNAPSHOTS:
        roots.add(root.parent.parent / _BLOBS)
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            target = path.resolve()
            if not roots.intersection(target.parents):
                raise WeightError(
                    f"{path} is a link to {target}, outside of the model's folder: it is not "
                    "copied; put the file itself there"
                )
            if path.is_file():
                yield path
