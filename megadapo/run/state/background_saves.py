"""Checkpoints of a run that are written while training goes on, one at a time."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

from megadapo.config import RunConfig, to_dict
from megadapo.errors import MegadapoError
from megadapo.run.state.checkpoint import Checkpoint, CheckpointStore, OpenCheckpoint, WriteTrainer

_VERSIONED = ("megadapo", "torch", "megatron-core", "transformers", "vllm", "ray")


class BackgroundSaves:
    """Says when a step is due, and finishes what the trainer has begun to write."""

    def __init__(self, store: CheckpointStore, config: RunConfig) -> None:
        self.step = 0
        """Of the newest save, written or under way, or what the run went on from."""
        self.longest_s = 0.0
        """What the slowest save has taken, from its beginning until it was committed."""
        self._store = store
        self._config = config
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Checkpoint] | None = None
        self._begun_at = time.monotonic()
        self._has_failed = False

    def is_due(self, step: int) -> bool:
        """Whether the configuration, or a save that failed, asks for a checkpoint now."""
        section = self._config.checkpoint
        minutes = (time.monotonic() - self._begun_at) / 60
        return self._has_failed or step % section.every == 0 or 0 < section.every_minutes <= minutes

    def begin(
        self,
        step: int,
        write_trainer: WriteTrainer,
        state: Mapping[str, Any],
        *,
        num_bytes: int,
        in_use: frozenset[int] | set[int],
    ) -> None:
        """Copy the state of `step` and begin to write it; what goes wrong is told when it ended.

        Args:
            num_bytes: of the trainer's files, about.
            in_use: steps whose checkpoints are not to be deleted for it.
        """
        assert self._pending is None, "the end of the one before comes first"
        self.step, self._begun_at = step, time.monotonic()
        self._pending = Future()
        try:
            begun = self._store.begin(step, write_trainer, num_bytes=num_bytes)
        except MegadapoError as error:
            self._pending.set_exception(error)
            return
        self._pending = self._executor.submit(self._finish, begun, state, in_use)

    def ended(self, *, wait: bool, last: bool) -> tuple[Checkpoint | None, str]:
        """The checkpoint that has been committed since the last call, if any, and what to tell.

        Raises:
            MegadapoError: the save failed, as the one before did, or is the `last`.
        """
        if self._pending is None or not (wait or self._pending.done()):
            return None, ""
        pending, self._pending = self._pending, None
        try:
            checkpoint = pending.result()
        except MegadapoError as error:
            is_second, self._has_failed, self.step = self._has_failed, True, -1
            if is_second or last:
                raise
            return None, f"{error}; it is tried again after the next step"
        self._has_failed = False
        return checkpoint, ""

    def join(self) -> None:
        """Wait until the trainer is not needed for a save any more; its end is told later."""
        if self._pending is not None:
            wait_for([self._pending])

    def close(self) -> None:
        """Wait for what is under way; a save that fails leaves nothing behind."""
        self._executor.shutdown()

    def _finish(
        self, begun: OpenCheckpoint, state: Mapping[str, Any], in_use: frozenset[int] | set[int]
    ) -> Checkpoint:
        about = about_checkpoint(self._config, policy_version=begun.step)
        checkpoint = begun.commit(state, about)
        self.longest_s = max(self.longest_s, time.monotonic() - self._begun_at)
        self._store.prune(in_use)
        return checkpoint


def about_checkpoint(config: RunConfig, *, policy_version: int) -> dict[str, Any]:
    """What a manifest says of the run: to find out, years later, what wrote a checkpoint."""
    plain = to_dict(config)
    text = json.dumps(plain, sort_keys=True)
    trainer = config.trainer
    return {
        "policy_version": policy_version,
        "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "layout": {
            "num_ranks": trainer.num_ranks,
            "tensor_parallel": trainer.tensor_parallel,
            "pipeline_parallel": trainer.pipeline_parallel,
            "context_parallel": trainer.context_parallel,
            "expert_parallel": trainer.expert_parallel,
            "data_parallel": trainer.data_parallel,
        },
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an engine's machine has no trainer, and the other way round
    return found
