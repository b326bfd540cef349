"""The driver's part of an update in files: to complete it, and to ask who can read it."""

from __future__ import annotations

from pathlib import Path

from megadapo.weights.sync.changes import Sending
from megadapo.weights.sync.folder import Manifest, WrittenFile, prune
from megadapo.weights.sync.parties import Parties


def complete(parties: Parties, folder: Path, sending: Sending, *, patience_s: float) -> str | None:
    """Write the manifest, remove the updates before, and have every engine rank open this one.

    Args:
        patience_s: How long an engine waits for files that storage shows late.

    Returns:
        What an engine rank says that cannot take it up; nothing was touched there.
    """
    files: dict[str, WrittenFile] = {}
    for written in parties.call("written"):
        files |= written
    base = None if sending.delta is None else sending.delta.base
    Manifest(version=sending.version, base=base, files=files).write(folder)
    prune(folder, sending.version)
    opening = parties.call_engines("open_update", sending.version, patience_s)
    for index, problems in parties.gather(opening, "open update").items():
        for rank, problem in enumerate(problems):
            if problem is not None:
                return f"Rollout engine {index}, rank {rank}: {problem}"
    return None
