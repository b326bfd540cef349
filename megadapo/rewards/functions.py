"""Reward functions of users, in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np

from megadapo.data.prompts import Prompt
from megadapo.observe.rollouts.token_pieces import Decode
from megadapo.rewards.function_config import RewardFunction
from megadapo.rewards.workers.processes import Lost, ProcessPool, Reply
from megadapo.rewards.workers.runner import Runner, lost
from megadapo.rewards.workers.worker_process import Program

GRACE_S = 1.0
"""What a group of coroutines may take beyond their own limit."""

Takes = Literal["one", "batch", "async"]


class FunctionRunner(Runner):
    """Calls one function in its processes.

    Where a call is a response, the responses of a group are shared out among the processes; where
    it is a group, each process can have a group of its own.

    Raises:
        InfraError: the function cannot be imported or called.
    """

    def __init__(self, config: RewardFunction, decode: Decode | None = None) -> None:
        super().__init__(config, decode)
        pool = ProcessPool(_program(config), 1)
        self._pools = [pool]
        (told,) = pool.run([{"calls": None}], config.timeout_s)
        assert not isinstance(told, Lost), "it answers without calling the function"
        self._takes: Takes = told["takes"]
        if self._takes == "one":
            pool.grow(config.num_workers - 1)
        else:
            self.num_threads = config.num_workers
            self._pools += [ProcessPool(_program(config), 1) for _ in range(config.num_workers - 1)]
        self._free: SimpleQueue[ProcessPool] = SimpleQueue()
        for pool in self._pools:
            self._free.put(pool)

    def close(self) -> None:
        for pool in self._pools:
            pool.close()

    def _results(
        self, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]
    ) -> list[Reply | str]:
        calls = [
            [_messages(prompt), text, ids.tolist(), prompt.ground_truth, _extra_info(prompt)]
            for text, ids in zip(texts, token_ids, strict=True)
        ]
        whole = self._takes != "one"
        requests = [{"calls": calls}] if whole else [{"calls": [call]} for call in calls]
        # coroutines have their own limits, which leave the others of the group alone
        limit_s = self.config.timeout_s + (GRACE_S if self._takes == "async" else 0.0)
        pool = self._free.get()
        try:
            replies = pool.run(requests, limit_s)
        finally:
            self._free.put(pool)
        return [
            result
            for reply, request in zip(replies, requests, strict=True)
            for result in self._unpack(reply, len(request["calls"]))
        ]

    def _unpack(self, reply: Reply | Lost, size: int) -> Sequence[Reply | str]:
        if isinstance(reply, Lost):
            return [lost(reply, self.config)] * size
        results: Sequence[Reply] = reply["results"]
        return results


def _program(config: RewardFunction) -> Program:
    return Program(
        module="megadapo.rewards.workers.function_worker",
        what=f'reward.functions.function = "{config.function}"',
        memory_bytes=config.memory_mib << 20,
        output_bytes=config.output_kib << 10,
        arguments={
            "path": config.path,
            "options": config.options,
            "network": config.may_use_network,
            "processes": config.processes,
            "timeout_s": config.timeout_s,
            "step_separators": config.separators,
            "step_score": config.step_score,
        },
        environment={name: os.environ[name] for name in config.environment if name in os.environ},
    )


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in prompt.messages]


def _extra_info(prompt: Prompt) -> dict[str, Any]:
    return {**prompt.extra_info, "data_source": prompt.data_source}
