"""Four trainer processes that tests borrow: importing torch and Megatron once, not once a test."""

import contextlib
import faulthandler
import gc
import socket
import string
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import pytest

from megadapo.algorithm.config import AlgorithmConfig
from megadapo.trainer.config import (
    CriticConfig,
    CriticOptimizerConfig,
    ModelConfig,
    OptimizerConfig,
    TrainerConfig,
)
from megadapo.trainer.types import Rendezvous, TrainerSettings
from tests.support.processes.forked import fork_context

NUM_PROCESSES = 4
ANSWER_TIMEOUT_S = 240
DISCOUNT, GAE_LAMBDA, VALUE_CLIP = 0.99, 0.95, 0.05
"""Settings of trainers with a critic."""
DEATH_TIMEOUT_S = 5
"""From a closed connection to an exit code."""


@dataclass(frozen=True)
class Task:
    function: Callable[..., Any]
    rendezvous: Rendezvous
    args: tuple[Any, ...]


class Ranks:
    """Runs `function(rendezvous, *args)` on the first n processes at once."""

    def __init__(self, models: Path) -> None:
        self.models = models
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        self._start()

    def _start(self) -> None:
        context = fork_context()
        for _ in range(NUM_PROCESSES):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=False)
            process.start()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return results by rank; an error is raised with its traceback, and processes restart."""
        try:
            return self._run(world_size, function, args)
        except BaseException:
            # the other ranks may still wait for the one that failed
            self.close()
            self._start()
            raise

    def on(
        self, model: str | Path, function: Callable[..., Any], *args: Any, **layout: Any
    ) -> list[Any]:
        """Run `function(rendezvous, settings, *args)` on each rank of a model's trainer.

        The model is one of `make_trained_models` or a folder; `layout` goes to `settings_for`.
        """
        settings = settings_for(self.models / model, **layout)
        return self.run(settings.trainer.num_ranks, function, settings, *args)

    def _run(
        self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> list[Any]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        for rank in range(world_size):
            rendezvous = Rendezvous(
                address="127.0.0.1", port=port, rank=rank, world_size=world_size
            )
            with self._naming_a_death(rank):
                self._ends[rank].send(Task(function, rendezvous, args))
        waiting = {self._ends[rank]: rank for rank in range(world_size)}
        answers: list[Any] = [None] * world_size
        while waiting:
            ready = wait(list(waiting), timeout=ANSWER_TIMEOUT_S)
            assert ready, f"ranks {sorted(waiting.values())} did not answer"
            for end in ready:
                rank = waiting.pop(end)
                with self._naming_a_death(rank):
                    succeeded, answers[rank] = end.recv()
                assert succeeded, f"rank {rank} failed:\n{answers[rank]}"
        return answers

    @contextlib.contextmanager
    def _naming_a_death(self, rank: int) -> Iterator[None]:
        """A rank that died, or was killed for its memory, is known by its closed connection."""
        try:
            yield
        except (EOFError, OSError) as error:
            process = self._processes[rank]
            process.join(timeout=DEATH_TIMEOUT_S)
            raise AssertionError(
                f"rank {rank} died with exit code {process.exitcode}: {error!r}"
            ) from None

    def close(self) -> None:
        """End the processes at once."""
        for process in self._processes:
            # a checkpoint's writer leaves a server process behind, which nobody else would end
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.join()
        for end in self._ends:
            end.close()
        self._processes, self._ends = [], []


def _serve(end: Connection) -> None:
    import torch

    from tests.support.processes import preload  # does nothing where the fork server has done it

    # all that the tests see of a death is a closed connection
    faulthandler.enable()
    torch.set_num_threads(preload.NUM_THREADS)
    from megadapo.trainer.model.parallel import leave_groups

    # or each collection below would look through all modules, longer than most tests take
    gc.freeze()

    while True:
        try:
            task = end.recv()
        except EOFError:
            return
        try:
            answer = (True, task.function(task.rendezvous, *task.args))
        except BaseException:  # whatever it was, the test must see it
            answer = (False, traceback.format_exc())
        leave_groups()
        # a trainer is full of cycles, and holds its groups' threads until they are collected
        gc.collect()
        end.send(answer)


_SHORT = {
    "tensor": "tensor_parallel",
    "pipeline": "pipeline_parallel",
    "virtual": "virtual_pipeline",
    "first": "first_stage_layers",
    "last": "last_stage_layers",
    "data": "data_parallel",
    "context": "context_parallel",
    "expert": "expert_parallel",
    "expert_tensor": "expert_tensor_parallel",
    "aux_loss": "router_aux_loss_coef",
    "sequence": "sequence_parallel",
    "bucket": "bucket_parameters",
}
"""Short names of `TrainerConfig`'s fields in tests; the others keep theirs."""


OVERLAP = {"overlap": True, "bucket": 3000}
"""Options for buckets of about a matrix, so that a tiny model has several."""
_SIZES = {
    "tp": "tensor",
    "pp": "pipeline",
    "dp": "data",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
    "first": "first",
    "last": "last",
}
_WORDS: dict[str, dict[str, Any]] = {
    "one": {},
    "sp": {"sequence": True},
    "vpp2": {"pipeline": 2, "virtual": 2},
    "bf16": {"dtype": "bfloat16"},
    "overlap": OVERLAP,
    "recompute": {"recompute": "full"},
    "attn": {"recompute": ("core_attn",)},
    "mlp": {"recompute": ("mlp",)},
    "attn+mlp": {"recompute": ("core_attn", "mlp")},
    "small": {"tokens_per_micro_batch": 64},
    "large": {"tokens_per_micro_batch": 4096},
    "whole": {"tokens_per_micro_batch": 100_000},
}
"""Parts of a layout's name without a number. Micro-batches are small, large, or one for all."""


def layout(name: str) -> dict[str, Any]:
    """Return the keys for `settings_for` of a layout such as tp2-pp2-sp-overlap."""
    keys: dict[str, Any] = {}
    for part in name.split("-"):
        size = part.lstrip(string.ascii_lowercase)
        sizes = {_SIZES[part.removesuffix(size)]: int(size)} if part not in _WORDS else {}
        keys |= _WORDS.get(part, sizes)
    return keys


def layouts(*names: str) -> dict[str, dict[str, Any]]:
    return {name: layout(name) for name in names}


def with_marks(
    names: Iterable[str], *, slow: Iterable[str] = (), full: Iterable[str] = ()
) -> list[Any]:
    """Return the names of `make test`, and with their marks those of `test-slow` and `test-all`.

    Full ones are parts of the others: they show where a failure is, not that there is one.
    """
    return [
        *names,
        *(pytest.param(name, marks=pytest.mark.slow) for name in slow),
        *(pytest.param(name, marks=pytest.mark.full) for name in full),
    ]


def settings_for(
    folder: str | Path,
    *,
    critic: dict[str, Any] | None = None,
    init: str = "pretrained",
    dtype: str = "float32",
    overlap: bool = False,
    lr: float = 1e-3,
    grad_clip: float = 1.0,
    temperature: float = 1.0,
    seed: int = 0,
    trains: str = "policy",
    **keys: Any,
) -> TrainerSettings:
    """Settings of a trainer over a tiny model; `keys`: of `[algorithm]` or `[trainer]`.

    `critic`: keys of `[critic]` besides the usual ones; None: train without a critic.
    """
    if critic is not None:
        keys = {"advantage": "gae", "discount": DISCOUNT, "gae_lambda": GAE_LAMBDA} | keys
        own = CriticOptimizerConfig(lr=1e-3, warmup_steps=0)
        usual: dict[str, Any] = {"value_clip": VALUE_CLIP, "optimizer": own}
        critic = usual | critic
    algorithm = {name: keys.pop(name) for name in keys.keys() & AlgorithmConfig.model_fields}
    fields = {"tokens_per_micro_batch": 160}
    fields |= {_SHORT.get(name, name): value for name, value in keys.items()}
    optimizer = OptimizerConfig(lr=lr, warmup_steps=0, weight_decay=0.01, grad_clip=grad_clip)
    return TrainerSettings(
        model=ModelConfig(path=str(folder), dtype=dtype, init=init),
        trainer=TrainerConfig(
            overlap_data_parallel=overlap,
            timeout_s=120,
            optimizer=optimizer,
            **fields,
        ),
        # unchecked: tests take a single rule without the keys that it needs in a run
        algorithm=AlgorithmConfig().model_copy(update=algorithm),
        critic=None if critic is None else CriticConfig(**critic),
        temperature=temperature,
        seed=seed,
        trains=trains,
    )
