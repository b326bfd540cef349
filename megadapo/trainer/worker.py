"""The Ray actor around one trainer rank: threads, device, and errors that can be pickled."""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from megadapo.cluster.machine import cuda_problems, inspect_machine
from megadapo.cluster.process_log import redirect_output
from megadapo.cluster.processes import (
    MIB,
    ONEDNN_WITHOUT_BF16,
    collecting_rarely,
    private_bytes,
    return_freed_memory,
)
from megadapo.cluster.watch.diagnostics import ProcessLocation
from megadapo.cluster.watch.heartbeat import heartbeat_file, start_heartbeat, working_on
from megadapo.data.batch import PackedBatch
from megadapo.errors import InfraError, MegadapoError
from megadapo.trainer.types import Rendezvous, TrainerSettings, UpdateRequest, UpdateResult

if TYPE_CHECKING:
    from megadapo.trainer.rank import TrainerRank
    from megadapo.trainer.stage_ranks import RewardModelRank
    from megadapo.trainer.types import RankReport
    from megadapo.weights.config import SenderName
    from megadapo.weights.disk.files import FileEntry

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

STEPS_PER_TRIM = 16
"""Steps between two trims of the heap. Tensors of varying lengths leave gaps in it, which would
grow for hundreds of steps. A trim after every step would cost 2 percent of a small one."""


def _named_failures(
    method: Callable[Concatenate[TrainerWorker, P], R],
) -> Callable[Concatenate[TrainerWorker, P], R]:
    """Turn errors of libraries, which may not pickle, into InfraError that names the rank."""

    @functools.wraps(method)
    def call(worker: TrainerWorker, /, *args: P.args, **kwargs: P.kwargs) -> R:
        # a call beside training must not hide in the heartbeat what the rank works on
        is_beside = args[:1] == ("published",)
        try:
            with nullcontext() if is_beside else working_on(method.__name__):
                return method(worker, *args, **kwargs)
        except MegadapoError:
            raise
        except Exception as error:  # a boundary: nothing may be lost between actor and driver
            logger.exception("trainer rank %d failed in %s", worker.rank, method.__name__)
            raise InfraError(
                f"trainer rank {worker.rank} failed in {method.__name__}: "
                f"{type(error).__name__}: {error}" + (f" (log: {worker.log})" if worker.log else "")
            ) from None

    return call


class TrainerWorker:
    """One process of the trainer; its methods are synchronous, one call at a time.

    Only calls of the "published" `weight_sender` run in a thread of their own, if the actor has a
    concurrency group for them.
    """

    def __init__(self, rank: int, log: Path | None = None) -> None:
        """`log`: receives the output of this process; None does not redirect it."""
        if log is not None:
            redirect_output(log)
        self.rank = rank
        self.log = log
        self._trainer: TrainerRank | RewardModelRank | None = None
        self._listener: socket.socket | None = None

    def location(self) -> ProcessLocation:
        return ProcessLocation.here()

    def find_rendezvous(self, world_size: int) -> Rendezvous:
        """Return an address and a free port of this rank's node, at which all ranks meet."""
        import ray

        address = ray.util.get_node_ip_address()
        # kept open, so that no other process takes the port until the ranks meet
        self._listener = socket.create_server((address, 0))
        port = self._listener.getsockname()[1]
        return Rendezvous(address=address, port=port, rank=self.rank, world_size=world_size)

    @_named_failures
    @collecting_rarely()
    def start(self, settings: TrainerSettings, rendezvous: Rendezvous, uses_cuda: bool) -> int:
        """Build this rank's part of the trainer, collectively; return its bytes in a checkpoint."""
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        if uses_cuda:
            require_cuda(deterministic=settings.trainer.deterministic)
        else:
            from megadapo.kernels.torch_internals import (
                settle_vector_functions,
                use_onednn_products,
            )
            from megadapo.trainer.model.cpu_platform import install_cpu_platform

            settle_vector_functions()
            if os.environ.items() >= ONEDNN_WITHOUT_BF16.items():
                use_onednn_products()
            install_cpu_platform()
        # they import megatron-core, which needs the platform
        from megadapo.trainer.rank import TrainerRank
        from megadapo.trainer.stage_ranks import FitRank, RewardModelRank

        kinds: dict[str, type[TrainerRank | RewardModelRank]] = {
            "policy": TrainerRank,
            "likelihood": FitRank,
            "reward_model": RewardModelRank,
        }
        trainer = kinds[settings.trains](settings, rendezvous, self._listener)
        self._trainer = trainer
        if self.log is not None:
            start_heartbeat(heartbeat_file(self.log), limit_s=settings.trainer.progress_timeout_s)
        self._release_cached_memory()
        return trainer.checkpoint_bytes

    @_named_failures
    def update(self, request: UpdateRequest) -> UpdateResult:
        """Apply the updates of one rollout step."""
        result = self._started().update(request)
        self._release_cached_memory()
        if request.step % STEPS_PER_TRIM == 0:
            return_freed_memory()
        memory = {"memory/rank_{}_mib": (private_bytes(os.getpid()) / MIB,)}
        return replace(result, of_ranks=result.of_ranks | memory)

    @_named_failures
    def logprobs(self, batch: PackedBatch) -> np.ndarray | None:
        return self._policy().logprobs(batch)

    @_named_failures
    def scores(self, batch: PackedBatch) -> np.ndarray:
        """Return [S] scores by the reward model that this trainer trains."""
        from megadapo.trainer.stage_ranks import RewardModelRank

        assert isinstance(self._trainer, RewardModelRank), "a policy gives no scores"
        return self._trainer.scores(batch)

    @_named_failures
    def begin_save(self, folder: Path) -> int:
        num_bytes = self._started().begin_save(folder)
        self._release_cached_memory()
        return num_bytes

    @_named_failures
    def is_writing(self) -> bool:
        """Return whether the last save is still being written."""
        return self._started().writer.is_writing

    @_named_failures
    def save_report(self) -> RankReport | None:
        """Return the outcome of the last save; None while it is being written."""
        return self._started().writer.report()

    @_named_failures
    def load(self, folder: Path, files: Mapping[str, FileEntry]) -> None:
        """Read a checkpoint whose files must be as listed."""
        from megadapo.trainer.checkpoint.checkpoint import check_across_ranks

        check_across_ranks(folder, files)
        self._started().load(folder)
        self._release_cached_memory()

    @_named_failures
    def leave_to_engines(self) -> None:
        self._policy().leave_to_engines()
        self._release_cached_memory()

    @_named_failures
    def take_gpu(self) -> None:
        self._policy().take_gpu()

    @_named_failures
    def apply(self, function: Callable[..., R], *args: Any) -> R:
        """Call `function(trainer_rank, *args)` in this process, for other packages."""
        return function(self._started(), *args)

    @_named_failures
    def weight_sender(self, sender: SenderName, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of one of this rank's senders, for rollout/pool/publish.py."""
        return getattr(self._policy().weight_senders[sender], method)(*args, **kwargs)

    @_named_failures
    def leave(self) -> None:
        """Destroy the process groups before the process ends."""
        if self._trainer is not None:
            from megadapo.trainer.model.parallel import leave_groups

            leave_groups()

    def _started(self) -> TrainerRank | RewardModelRank:
        assert self._trainer is not None, "start() comes first"
        return self._trainer

    def _release_cached_memory(self) -> None:
        """Return cached memory to a GPU that engines share; elsewhere the next call reuses it."""
        if self._started().settings.shares_gpu:
            import torch

            # frees tensors in reference cycles
            gc.collect()
            torch.cuda.empty_cache()

    def _policy(self) -> TrainerRank:
        from megadapo.trainer.rank import TrainerRank

        assert isinstance(self._trainer, TrainerRank), "a reward model has no log-probs"
        return self._trainer


def require_cuda(*, deterministic: bool) -> None:
    """Prepare this process for a GPU; raise InfraError if it cannot use it as the run expects.

    A silent fallback to the CPU must not happen.
    """
    import torch

    remedy = 'repair it (megadapo doctor), or run on the CPU with cluster.device = "cpu"'
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise InfraError(
            f"torch {torch.__version__} finds no GPU (CUDA_VISIBLE_DEVICES: {visible}), as with a "
            f"driver older than CUDA {torch.version.cuda}: {remedy}"
        )
    machine = inspect_machine()
    if machine.packages["transformer-engine"] is not None:
        try:
            importlib.import_module("transformer_engine.pytorch")
        except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
            raise InfraError(
                f"transformer-engine cannot be imported ({error}): uninstall it, or {remedy}"
            ) from error
    if problems := list(cuda_problems(machine, deterministic=deterministic)):
        raise InfraError("; ".join(problems))
    logger.info("layers: %s; optimizer: %s", machine.gpu_layers, machine.optimizer)
    if deterministic:
        # an operation that has no deterministic kernel raises an error that names it
        torch.use_deterministic_algorithms(True)
        # reads of uninitialised memory would be a fault on a CPU too
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
