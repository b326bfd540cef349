"""The driver's handle on all trainer ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megadapo.data.batch import PackedBatch
from megadapo.errors import InfraError, MegadapoError
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.result import UpdateResult
from megadapo.trainer.settings import TrainerSettings
from megadapo.trainer.worker import TrainerWorker

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from megadapo.cluster.cluster import Cluster
    from megadapo.config import RunConfig

LEAVE_TIMEOUT_S = 10.0
"""How long a rank may take to leave in good order before it is killed."""

GRACE_S = 3.0
"""How long the other ranks may take to fail as well, so that the root cause can be told."""


class Trainer:
    """All ranks of the trainer as one; after an error it is shut down and of no more use."""

    def __init__(self, ranks: list[ActorHandle], *, timeout_s: float) -> None:
        self.ranks = ranks
        """One actor handle per rank."""
        self._timeout_s = timeout_s

    @classmethod
    def start(cls, config: RunConfig, cluster: Cluster) -> Trainer:
        """Start the ranks that `config` asks for on the cluster's trainer slots.

        Raises:
            MegadapoError: the model cannot be read or does not fit the layout, or a rank failed.
        """
        settings = TrainerSettings(
            model=config.model,
            trainer=config.trainer,
            objective=config.algorithm.objective,
            temperature=config.rollout.temperature,
            seed=config.run.seed,
        )
        options = [cluster.trainer_options(rank) for rank in range(config.trainer.num_ranks)]
        return cls.start_ranks(settings, options, uses_cuda=config.cluster.uses_cuda)

    @classmethod
    def start_ranks(
        cls, settings: TrainerSettings, options: list[dict[str, Any]], *, uses_cuda: bool
    ) -> Trainer:
        """Start one rank for each entry of Ray actor `options` and wait until all are ready."""
        import ray

        environment = rank_environment(settings.trainer, uses_cuda=uses_cuda)
        actor = ray.remote(TrainerWorker)
        ranks = [
            actor.options(**entry, runtime_env={"env_vars": environment}).remote(rank)
            for rank, entry in enumerate(options)
        ]
        group = cls(ranks, timeout_s=settings.trainer.timeout_s)
        meeting = group._gather(
            [ranks[0].find_rendezvous.remote(len(ranks))], "start", settings.trainer.start_timeout_s
        )[0]
        calls = [
            handle.start.remote(settings, replace(meeting, rank=rank))
            for rank, handle in enumerate(ranks)
        ]
        group._gather(calls, "start", settings.trainer.start_timeout_s)
        return group

    def update(
        self,
        batch: PackedBatch,
        *,
        policy_version: int,
        step: int,
        record: Sequence[int] = (),
    ) -> UpdateResult:
        """One optimizer update per mini-batch of the batch.

        Args:
            policy_version: of the present weights; engine and trainer log-probs are compared on
                the sequences it sampled.
            step: rollout step, counted from 1: it decides the learning rate.
            record: sequences of the batch, ascending, whose log-probs the result holds.
        """
        updates = self.call_all("update", _shared(batch), policy_version, step, record)
        recorded = [update.recorded for update in updates if update.recorded is not None]
        return replace(
            updates[0].result,
            shares=tuple(update.share for update in updates),
            recorded=recorded[0].merged(recorded[1:]) if recorded else None,
        )

    def logprobs(self, batch: PackedBatch) -> np.ndarray:
        """[T] fp32 log-probs of the response tokens under the present weights, NaN on prompts.

        Same head and micro-batching as `update`; sequences in no mini-batch stay NaN.
        """
        parts = [part for part in self.call_all("logprobs", _shared(batch)) if part is not None]
        merged = parts[0].copy()
        for part in parts[1:]:
            np.copyto(merged, part, where=np.isfinite(part))
        return merged

    def save(self, folder: Path) -> None:
        """Write weights and optimizer into an empty folder, made if need be."""
        self.call_all("save", folder.absolute())

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, at this or any other split.

        Raises:
            CheckpointError: the state is damaged or of another model.
        """
        self.call_all("load", folder.absolute())

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder with the present weights, config and tokenizer."""
        self.call_all("export", folder.absolute())

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of TrainerWorker on all ranks at once and return the results by rank.

        Raises:
            MegadapoError: what a rank raised; InfraError where one died or gave no answer in time.
        """
        calls = [getattr(rank, method).remote(*args) for rank in self.ranks]
        return self._gather(calls, method, self._timeout_s)

    def shutdown(self) -> None:
        """End all ranks; safe to call again, and after an error."""
        import ray

        ranks, self.ranks = self.ranks, []
        if ranks and ray.is_initialized():
            ray.wait(
                [rank.leave.remote() for rank in ranks],
                num_returns=len(ranks),
                timeout=LEAVE_TIMEOUT_S,
            )
            _kill(ranks)

    def _gather(self, calls: list[Any], method: str, timeout_s: float) -> list[Any]:
        """Results in order; the first failure ends all ranks, as the others wait for that one."""
        import ray

        deadline = time.monotonic() + timeout_s
        rank_of = {call: rank for rank, call in enumerate(calls)}
        results: list[Any] = [None] * len(calls)
        try:
            while rank_of:
                remaining = max(0.0, deadline - time.monotonic())
                ready, _ = ray.wait(list(rank_of), num_returns=1, timeout=remaining)
                if not ready:
                    silent = ", ".join(str(rank) for rank in rank_of.values())
                    raise InfraError(
                        f"trainer rank {silent} did not finish {method} within {timeout_s:g} s"
                    )
                rank = rank_of.pop(ready[0])
                results[rank] = _result(ready[0], rank, method)
        except MegadapoError as first:
            cause = _root_cause(first, rank_of, method)
            ranks, self.ranks = self.ranks, []
            _kill(ranks)
            raise cause from None
        return results


def rank_environment(trainer: TrainerConfig, *, uses_cuda: bool) -> dict[str, str]:
    """Environment of a rank's process, fixed before it loads torch."""
    cores = len(os.sched_getaffinity(0))
    num_threads = trainer.num_threads or max(1, cores // trainer.num_ranks)
    environment = {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        # a waiting rank must not burn the core that another one computes on
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
    }
    if uses_cuda:
        # keeps sequence-parallel communication in front of the matrix product it overlaps with
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def _shared(batch: PackedBatch) -> Any:
    """The batch in Ray's object store: written once, read by all ranks."""
    import ray

    return ray.put(batch)


class _RankDied(InfraError):
    """The process of a rank is gone."""


def _root_cause(first: MegadapoError, rank_of: dict[Any, int], method: str) -> MegadapoError:
    """The error that explains the others: a named one, else a death, else the first.

    Ranks that lose their partner fail too, and often sooner than Ray knows of the death.
    """
    import ray

    errors = [first]
    if not rank_of:
        return first
    others, _ = ray.wait(list(rank_of), num_returns=len(rank_of), timeout=GRACE_S)
    for call in others:
        try:
            _result(call, rank_of[call], method)
        except MegadapoError as error:
            errors.append(error)
    named = [error for error in errors if not isinstance(error, InfraError)]
    died = [error for error in errors if isinstance(error, _RankDied)]
    return (named + died + errors)[0]


def _result(call: Any, rank: int, method: str) -> Any:
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    try:
        return ray.get(call)
    except RayTaskError as error:
        if isinstance(error.cause, MegadapoError):
            raise error.cause from None
        raise InfraError(f"trainer rank {rank} failed in {method}: {error.cause}") from None
    except RayActorError as error:
        raise _RankDied(f"trainer rank {rank} died during {method}: {error}") from None


def _kill(ranks: list[ActorHandle]) -> None:
    import ray

    for rank in ranks:
        ray.kill(rank)
