"""Two fresh ranks in which megatron-core finds stand-ins for the packages of a GPU."""

import itertools
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megadapo.trainer.types import Rendezvous
from tests.support.processes.forked import run_processes

Place = tuple[Rendezvous, socket.socket | None]
"""Meeting point of both ranks, and the open port of rank 0."""


def with_stand_ins(
    function: Callable[..., Any], folder: Path, *args: Any, apex: bool = False
) -> list[Any]:
    """Return the JSON answers of `function(meet, *args)` by rank; `meet()` gives a new `Place`.

    Transformer Engine is there, and apex if it is asked for. The module of the function may import
    megatron-core only inside of it.
    """
    run_processes(_work, (function, folder, args, apex), 2, fresh=True)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def _work(rank: int, function: Callable[..., Any], folder: Path, args: Any, apex: bool) -> None:
    from tests.support.trainer import fused_gradients, te_stand_in

    te_stand_in.install()
    if apex:
        fused_gradients.install_apex()
    from megadapo.trainer.model.cpu_platform import install_cpu_platform

    install_cpu_platform()
    import torch

    torch.set_num_threads(1)
    numbers = itertools.count()
    answer = function(lambda: _meet(rank, folder / f"place-{next(numbers)}"), *args)
    (folder / f"{rank}.json").write_text(json.dumps(answer))


def _meet(rank: int, file: Path) -> Place:
    """Rank 0 writes its open port for the other."""
    listener = None
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        file.with_suffix(".new").write_text(str(listener.getsockname()[1]))
        file.with_suffix(".new").rename(file)
    while not file.exists():
        time.sleep(0.01)
    port = int(file.read_text())
    return Rendezvous(address="127.0.0.1", port=port, rank=rank, world_size=2), listener
