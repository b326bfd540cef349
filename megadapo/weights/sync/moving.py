"""The driver's part of moving an update: round by round, or by way of files."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.weights.sync.peers import Parties
from megadapo.weights.sync.transports.folder import Manifest, WrittenFile, prune
from megadapo.weights.sync.update import Sending

if TYPE_CHECKING:
    from ray import ObjectRef

Sums = list[list[list[int]]]
"""[round][trainer rank] -> checksums of the slices in the rank's bucket, if any are compared."""


@dataclass(frozen=True)
class Update:
    """What is sent, and in how many rounds."""

    sending: Sending
    num_rounds: int
    compares_at_end: bool
    """Whether the checksums of both sides are compared after the last round. What changed carries
    its checksums, and engines compare them as it arrives."""


def move(parties: Parties, update: Update, sums: Sums) -> float:
    """All rounds, two buckets in flight, and the comparison of checksums.

    Args:
        sums: Of the rounds that are in files already; those of the others join them.

    Returns:
        When the engines ceased to generate.
    """
    num_rounds, delta = update.num_rounds, update.sending.delta
    begin = {
        "version": update.sending.version,
        "with_checksums": update.compares_at_end,
        "delta": None if delta is None else asdict(delta),
    }
    if not sums:
        sums.append(_fill(parties, update, 0))
    # Until here the engines kept their old weights; from here on they refuse to generate.
    paused = time.monotonic()
    parties.gather(parties.call_engines("start_weight_update"), "start")
    for number in range(num_rounds):
        taking = _take(parties, {"round": number} | ({"begin": begin} if number == 0 else {}))
        if len(sums) < num_rounds:
            # Written into the other bucket while this one is read.
            sums.append(_fill(parties, update, number + 1))
        parties.gather(taking, f"bucket {number} of {num_rounds}")
    if update.compares_at_end:
        by_feeder = [list(rounds) for rounds in zip(*sums, strict=True)]
        parties.gather(_take(parties, {"checksums": by_feeder}), "checksums", forgive=False)
    return paused


def write(
    parties: Parties, update: Update, folder: Path, *, patience_s: float
) -> tuple[Sums, str | None]:
    """Write all rounds into files, remove the updates before, and have every engine rank open them.

    Args:
        patience_s: How long an engine waits for files that storage shows late.

    Returns:
        Checksums, and what an engine rank says that cannot take up the files: nothing was touched.
    """
    sums = [_fill(parties, update, number) for number in range(update.num_rounds)]
    files: dict[str, WrittenFile] = {}
    for written in parties.call("written"):
        files |= written
    version, delta = update.sending.version, update.sending.delta
    base = None if delta is None else delta.base
    Manifest(version=version, base=base, files=files).write(folder)
    prune(folder, version)
    opening = parties.call_engines("open_update", version, patience_s)
    for index, problems in parties.gather(opening, "open update").items():
        for rank, problem in enumerate(problems):
            if problem is not None:
                return sums, f"Rollout engine {index}, rank {rank}: {problem}"
    return sums, None


def _fill(parties: Parties, update: Update, number: int) -> list[list[int]]:
    refs = parties.submit("fill", number, with_checksums=update.compares_at_end)
    return parties.wait(refs, f"bucket {number} of {update.num_rounds}")


def _take(parties: Parties, info: dict[str, object]) -> dict[int, ObjectRef[Any]]:
    return parties.call_engines("update_weights", info)
