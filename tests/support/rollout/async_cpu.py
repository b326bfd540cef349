"""An engine on the CPU that schedules asynchronously, as engines on CUDA do.

vLLM turns asynchronous scheduling off on CPUs, where an operation is complete when its call
returns. With events and streams of CUDA that do nothing, all the rest of it runs.
"""

import torch
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from megadapo.rollout.engine import start_vllm


class _Nothing:
    """An event or a stream of CUDA that does nothing."""

    def __init__(self, **_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def record(self):
        pass

    synchronize = record

    def wait_stream(self, _):
        pass


class AsyncCpuExecutor(UniProcExecutor):
    """An executor whose worker believes in CUDA's events; it counts steps that overlap."""

    num_overlapping = num_unread = 0

    def _init_executor(self):
        torch.cuda.Event = torch.cuda.Stream = torch.cuda.current_stream = _Nothing
        torch.cuda.stream = lambda stream: stream
        super()._init_executor()
        # the actor can ask for it, as for any result of a worker
        self.driver_worker.num_overlapping = lambda: self.num_overlapping

    def sample_tokens(self, *args, **kwargs):
        """Sample, and count the steps that were planned before their last one was read."""
        future = super().sample_tokens(*args, **kwargs)
        self.num_overlapping += self.num_unread > 0
        self.num_unread += 1
        read = future.result

        def result():
            self.num_unread -= 1
            return read()

        future.result = result
        return future


def make_asynchronous(monkeypatch):
    """Let start_vllm start engines that schedule asynchronously."""
    arguments = start_vllm.AsyncEngineArgs
    create = arguments.create_engine_config

    def create_engine_config(*args):
        config = create(*args)
        config.scheduler_config.async_scheduling = True
        return config

    monkeypatch.setattr(arguments, "create_engine_config", create_engine_config)
    monkeypatch.setattr(start_vllm, "UniProcExecutor", AsyncCpuExecutor)
