"""Weights and optimizer state on disk, readable at any other tensor, pipeline or data split.

The trainer's whole state is weights, fp32 masters, Adam moments and the count of updates: the
learning rate follows from the step, and no random number is drawn after the start. Weights are
written for exports only. A load computes them from the masters, as every update does, so each rank
reads just the elements that it owns.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megadapo.errors import CheckpointError, CorruptCheckpointError, InfraError, MegadapoError
from megadapo.trainer.checkpoint.pieces import OwnedRun, Piece, put_masters_into_weights
from megadapo.trainer.model.megatron_internals import num_updates, set_num_updates
from megadapo.trainer.types import RankReport
from megadapo.weights.disk.files import FileEntry, Files, check_files, hashed_file, unreadable
from megadapo.weights.disk.torch_checkpoint import (
    Box,
    StoredPiece,
    StoredTensors,
    shard_name,
    store_piece,
)
from megadapo.weights.host_memory import HostMemory

OPTIMIZER_FILE = "optimizer.json"
"""State that is not a tensor, written by the first rank beside the shards."""

_SHARD = re.compile(r"__(\d+)_\d+\.distcp")


@dataclass
class Snapshot:
    """A copy in main memory of one rank's part of a checkpoint; training may continue."""

    pieces: list[Piece]
    num_updates: int
    """Number of updates that the optimizer has applied, over all ranks."""
    checked: int
    """Index of the piece whose hash was taken from the model itself."""
    checked_hash: str

    @property
    def num_bytes(self) -> int:
        return sum(piece.data.nbytes for piece in self.pieces)


def take_snapshot(
    runs: Sequence[OwnedRun],
    optimizer: MegatronOptimizer,
    *,
    number: int,
    values_of: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    memory: HostMemory | None = None,
) -> Snapshot:
    """Copy what this rank owns; collective.

    Args:
        number: of the save; it selects the piece whose hash is compared, each in turn.
        values_of: returns the values of a tensor, which may be offloaded.
        memory: free memory for the copies; None: each gets memory of its own.
    """
    live = [replace(piece, data=values_of(piece.data)) for piece in _written(runs)]
    checked = number % max(1, len(live))
    counts = [0] * torch.distributed.get_world_size()
    with nullcontext(_copied) if memory is None else memory.copying() as copy:
        pieces = [replace(piece, data=copy(piece.data)) for piece in live]
        torch.distributed.all_gather_object(counts, num_updates(optimizer))
        checked_hash = _hash_of(live[checked].data) if live else ""
    return Snapshot(
        pieces=pieces, num_updates=max(counts), checked=checked, checked_hash=checked_hash
    )


def num_bytes_written(runs: Sequence[OwnedRun]) -> int:
    """Return the size of this rank's tensors in a checkpoint, without the file format."""
    return sum(piece.data.nbytes for piece in _written(runs))


def write_snapshot(
    snapshot: Snapshot, folder: Path, *, rank: int
) -> tuple[Files, list[StoredPiece]]:
    """Write this rank's files into `folder`, freeing copies with their own memory on the way."""
    files: Files = {}
    stored = []
    if snapshot.pieces:
        name = shard_name(rank)
        with hashed_file(folder / name) as file:
            for index, piece in enumerate(snapshot.pieces):
                stored.append(
                    store_piece(
                        file,
                        name,
                        piece.data,
                        key=piece.key,
                        shape=piece.shape,
                        offset=piece.offset,
                    )
                )
                snapshot.pieces[index] = replace(piece, data=torch.empty(0))
        files[name] = file.entry
        _check_live(folder, stored[snapshot.checked], snapshot.checked_hash)
    if rank == 0:
        with hashed_file(folder / OPTIMIZER_FILE) as file:
            file.write(json.dumps({"num_updates": snapshot.num_updates}).encode())
        files[OPTIMIZER_FILE] = file.entry
    return files, stored


def load_checkpoint(
    runs: Sequence[OwnedRun],
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    folder: Path,
) -> None:
    """Read a state that was written at any split; collective over all ranks.

    Raise CheckpointError if it cannot be read, or does not fit this model.
    """
    read_state(runs, folder)
    path = folder / OPTIMIZER_FILE
    try:
        count = int(json.loads(path.read_bytes())["num_updates"])
    except OSError as error:
        raise unreadable(path, error) from error
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    set_num_updates(optimizer, count)
    put_masters_into_weights(runs, chunks)


def read_state(runs: Sequence[OwnedRun], folder: Path) -> None:
    """Read the boxes of the runs' state, written at any split; collective over all ranks."""
    stored = StoredTensors(folder)
    _check_fit(runs, stored)
    state = [piece for run in runs for piece in run.state]
    for piece in state:
        if piece.is_flexible:
            piece.data.zero_()
    stored.read(Box(piece.key, piece.offset, piece.data) for piece in state)


def check_across_ranks(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Compare a checkpoint's files with their hashes, each file on one rank.

    All ranks raise CorruptCheckpointError if one differs, InfraError if a rank cannot read one.
    """
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    own = {name: files[name] for name in files if reader_of(name, num_ranks) == rank}
    problems: list[MegadapoError | None] = [None] * num_ranks
    try:
        check_files(folder, own)
        problem = None
    except (CorruptCheckpointError, InfraError) as error:
        problem = error
    torch.distributed.all_gather_object(problems, problem)
    if found := [problem for problem in problems if problem is not None]:
        # a file that one rank cannot read may be sound: all ranks read before any decides
        kinds = [type(problem) for problem in found]
        kind = InfraError if InfraError in kinds else CorruptCheckpointError
        raise kind("; ".join(str(problem) for problem in found if isinstance(problem, kind)))


def reader_of(file: str, num_ranks: int) -> int:
    """Return the rank that checks a file: its writer, if the number of ranks is the same."""
    shard = _SHARD.fullmatch(Path(file).name)
    return 0 if shard is None else int(shard[1]) % num_ranks


def _written(runs: Sequence[OwnedRun]) -> list[Piece]:
    return [p for run in runs if run.is_first_replica for p in (*run.weights, *run.state)]


def _check_live(folder: Path, piece: StoredPiece, expected: str) -> None:
    """Compare one tensor of a file with the model's at the time of the snapshot."""
    target = torch.empty(piece.sizes, dtype=piece.dtype)
    with (folder / piece.file).open("rb") as file:
        file.seek(piece.start)
        target.copy_(torch.load(io.BytesIO(file.read(piece.num_bytes)), weights_only=True))
    if _hash_of(target) != expected:
        raise CheckpointError(
            f"{folder / piece.file}: {piece.key} at {piece.offset} differs from the trained weights"
        )


def _copied(values: Tensor) -> Tensor:
    return values.detach().to("cpu", copy=True)


def _hash_of(values: Tensor) -> str:
    # a copy: trainer.offload cannot resize storage that numpy has seen
    flat = _copied(values).view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def _check_fit(runs: Sequence[OwnedRun], stored: StoredTensors) -> None:
    """Raise CheckpointError on every rank unless the folder has exactly the model's tensors."""
    pieces = [piece for run in runs for piece in (*run.weights, *run.state)]
    shapes = {piece.key: (piece.shape, piece.is_flexible) for piece in pieces}
    gathered = [shapes] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, shapes)
    expected = {key: entry for of_rank in gathered for key, entry in of_rank.items()}
    problems = [f"{key} is missing" for key in sorted(expected.keys() - stored.tensors.keys())]
    problems += [f"{key} is unknown" for key in sorted(stored.tensors.keys() - expected.keys())]
    for key in sorted(expected.keys() & stored.tensors.keys()):
        (shape, is_flexible), found = expected[key], tuple(stored.tensors[key].size)
        if found != shape and not (is_flexible and found[1:] == shape[1:]):
            problems.append(f"{key} is {list(found)}, the model has {list(shape)}")
    if problems:
        listed = "; ".join(problems[:5])
        raise CheckpointError(f"{stored.folder} cannot be loaded into this model: {listed}")


NICENESS = 15
"""Priority of the writing thread: it gets 3 percent of a core that an update also uses."""


class CheckpointWriter:
    """A thread that writes one checkpoint after another."""

    def __init__(self, rank: int, *, pinned: bool = False) -> None:
        """`pinned`: whether snapshots are in pinned memory, for a rank on a GPU."""
        self._rank = rank
        self._memory = HostMemory(pinned=True) if pinned else None
        """Memory for snapshots, which stays allocated for later saves. None: each copy is freed as
        soon as it is written, as without a GPU."""
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix="checkpoint", initializer=_lower_priority
        )
        self._pending: Future[RankReport] | None = None
        self._num_begun = 0

    @property
    def is_writing(self) -> bool:
        """Whether a save is still being written."""
        return self._pending is not None and not self._pending.done()

    def save(
        self,
        folder: Path,
        saved: Mapping[str, tuple[Sequence[OwnedRun], MegatronOptimizer]],
        *,
        values_of: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> int:
        """Copy models to the host, start to write them, return their bytes; collective.

        `saved`: runs and optimizer of each model, by folder name below `folder`.
        """
        assert not self.is_writing, "the trainer asks before"
        if self._memory is not None:
            self._memory.reset()
        snapshots = {
            name: take_snapshot(
                runs, optimizer, number=self._num_begun, values_of=values_of, memory=self._memory
            )
            for name, (runs, optimizer) in saved.items()
        }
        # the writer frees what it has written
        num_bytes = sum(snapshot.num_bytes for snapshot in snapshots.values())
        self.begin(folder, snapshots)
        return num_bytes

    def begin(self, folder: Path, snapshots: dict[str, Snapshot]) -> None:
        """Start to write snapshots, each into the folder of its name below `folder`."""
        self._num_begun += 1
        self._pending = self._executor.submit(self._write, folder, snapshots)

    def report(self, *, wait: bool = False) -> RankReport | None:
        """Return the outcome of the save; None while it is being written."""
        assert self._pending is not None, "nothing is being written"
        if not (wait or self._pending.done()):
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    def _write(self, folder: Path, snapshots: dict[str, Snapshot]) -> RankReport:
        report = RankReport()
        try:
            for name, snapshot in snapshots.items():
                files, pieces = write_snapshot(snapshot, folder / name, rank=self._rank)
                report.files |= {str(Path(name) / file): entry for file, entry in files.items()}
                report.pieces[name] = pieces
        except (OSError, RuntimeError, MegadapoError) as error:
            # torch names a failed write after its own zip writer
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            report.error = f"rank {self._rank}: {cause}"
        return report


def _lower_priority() -> None:
    # on Linux, setpriority accepts the number of a thread
    with contextlib.suppress(PermissionError):  # a sandbox may forbid it; the save still works
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
