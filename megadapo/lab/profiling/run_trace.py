"""A step of a run as every process of it saw it: the driver, trainer ranks and engine ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from megadapo.cluster.process_log import LOGS_FOLDER
from megadapo.cluster.this_node import ClockReading, clock_offset, read_clock
from megadapo.errors import InfraError
from megadapo.lab.profiling.merged_trace import TracePart, merge_traces
from megadapo.rollout.pool.engine_spec import profile_folder

if TYPE_CHECKING:
    from megadapo.rollout.pool.engines import Engines
    from megadapo.trainer.rank import TrainerRank
    from megadapo.trainer.trainer import Trainer

_ENGINE_RANK = re.compile(r"rank(\d+)\.\d+\.pt\.trace\.json$")
"""Ends the name of what vLLM writes of a rank."""


@contextmanager
def traced(trainer: Trainer, engines: Engines, folder: Path, target: Path) -> Iterator[None]:
    """Trace all processes while the block runs, and merge what they saw into `target`.

    Args:
        folder: the run's, which all processes see.

    Raises:
        InfraError: a process died, or what it wrote is not there.
    """
    import torch

    driver_file = folder / "driver-trace.json"
    files = [folder / f"trainer-{rank}-trace.json" for rank in range(len(trainer.ranks))]
    with torch.profiler.profile() as profile:
        trainer.call_all("apply", _begin)
        engines.start_profile()
        yield
        engines.stop_profile()
        trainer.call_all("apply", _end, files)
    profile.export_chrome_trace(str(driver_file))
    parts = [TracePart(name="driver", file=driver_file)]
    parts += _trainer_parts(trainer, files)
    parts += _engine_parts(engines, folder / LOGS_FOLDER)
    missing = [str(part.file) for part in parts if not part.file.exists()]
    if missing:
        raise InfraError(f"{missing[0]} is not there: do all nodes see the folder of --trace?")
    merge_traces(parts, target)


def _trainer_parts(trainer: Trainer, files: Sequence[Path]) -> list[TracePart]:
    import ray

    def ask(rank: int) -> ClockReading:
        call: Any = trainer.ranks[rank].apply.remote(_clock)
        reading: ClockReading = ray.get(call)
        return reading

    return [
        TracePart(
            name=f"trainer rank {rank}",
            file=file,
            ahead_ns=clock_offset(partial(ask, rank)).ahead_ns,
        )
        for rank, file in enumerate(files)
    ]


def _engine_parts(engines: Engines, log_folder: Path) -> list[TracePart]:
    """vLLM has one file per rank of an engine, beside the engine's log."""
    parts = []
    for index in engines.updatable():
        ahead_ns = clock_offset(partial(engines.clock, index)).ahead_ns
        found = sorted(profile_folder(log_folder, index).glob("*.pt.trace.json"))
        ranks = {int(match[1]): file for file in found if (match := _ENGINE_RANK.search(file.name))}
        for rank in sorted(ranks):
            name = f"engine {index}, rank {rank}" if len(ranks) > 1 else f"engine {index}"
            parts.append(TracePart(name=name, file=ranks[rank], ahead_ns=ahead_ns))
        if not ranks:
            raise InfraError(
                f"{profile_folder(log_folder, index)}: no trace of engine {index}: do all nodes "
                "see the folder of --trace?"
            )
    return parts


def _clock(rank: TrainerRank) -> ClockReading:
    return read_clock()


class _RankTrace:
    """What a trainer rank does from the first to the last call of a trace."""

    running: ClassVar[list[_RankTrace]] = []
    """In this process; one while there is a trace."""

    def __init__(self, rank: TrainerRank) -> None:
        import torch

        from megadapo.trainer.model.layer_ranges import layer_ranges

        self._open = ExitStack()
        self._open.enter_context(layer_ranges(rank.chunks))
        self._profile = self._open.enter_context(torch.profiler.profile())

    def end(self, file: Path) -> None:
        self._open.close()
        self._profile.export_chrome_trace(str(file))


def _begin(rank: TrainerRank) -> None:
    _RankTrace.running.append(_RankTrace(rank))


def _end(rank: TrainerRank, files: Sequence[Path]) -> None:
    import torch

    _RankTrace.running.pop().end(files[torch.distributed.get_rank()])
