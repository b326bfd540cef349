"""A real engine with vLLM's asynchronous scheduling, which only CUDA engines use by default.

vLLM turns asynchronous scheduling off on CPUs, where an operation is complete when its call
returns. With events and streams of CUDA that do nothing, all the rest of it runs.
"""

import asyncio
import os
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from megadapo.rollout.config import RolloutConfig
from megadapo.rollout.engine import start_vllm
from megadapo.rollout.engine.generation import Generation
from megadapo.rollout.types import ActivityCounter, SamplingSettings
from tests.support.rollout.engine_checks import bits, make_requests
from tests.support.rollout.engine_specs import engine_spec

pytestmark = pytest.mark.full

SETTINGS = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=100)
# 120 responses of up to 270 tokens do not fit: vLLM preempts some
CONFIG = RolloutConfig(max_num_seqs=120, kv_cache_gib=0.001)


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


@contextmanager
def started(model, folder):
    """Start an engine without an actor around it."""
    spec = engine_spec(
        model=str(model),
        max_model_len=300,
        weights_from="folder",
        config=CONFIG,
        log_file=folder / "engine-0.log",
    )
    os.environ.update(spec.environment())
    llm = start_vllm.start_vllm(spec, counter := ActivityCounter(CONFIG.max_num_seqs))
    generation = Generation(llm)
    try:
        yield llm, generation, counter
    finally:
        generation.close()
        llm.shutdown(timeout=0)


async def answers(generation, groups):
    """Generate groups to their end."""
    await generation.submit(groups, 0)
    found = {}
    while len(found) < len(groups):
        found |= {one.key: one.responses for one in (await generation.collect(5.0, 1000))[0]}
    return found


def test_asynchronous_engine_sends_the_same_tokens_in_pieces(tiny_model, tmp_path, monkeypatch):
    """Steps overlap, prompts are cached, responses preempted, stopped and continued."""
    for name in engine_spec().environment():
        monkeypatch.setenv(name, os.environ.get(name, ""))
    make_asynchronous(monkeypatch)
    groups = [replace(group, settings=SETTINGS) for group in make_requests(40, 3)]

    async def stock():
        with started(tiny_model, tmp_path) as (_, generation, _):
            return await answers(generation, groups)

    async def ours():
        with started(tiny_model, tmp_path) as (llm, generation, counter):
            whole = await answers(generation, groups)
            preempted = counter.take(generation.num_tokens).num_preemptions
            (overlapping,) = await llm.collective_rpc("num_overlapping")
            assert overlapping > 50 and preempted > 0
            await generation.submit(groups, 0)
            await generation.collect(60.0, 20)
            stopped = await generation.stop([one.key for one in groups], keep=True)
            return whole, stopped, await answers(generation, stopped.unfinished)

    with monkeypatch.context() as patch:
        patch.setattr(start_vllm, "scheduler_class", lambda _: None)
        expected = asyncio.run(stock())
    whole, stopped, continued = asyncio.run(ours())
    assert bits(whole) == bits(expected)
    parts = [
        (part, one.key, place)
        for one in stopped.unfinished
        for place, part in enumerate(one.responses)
    ]
    assert sum(part.finish_reason == "unfinished" for part, *_ in parts) > 20
    for part, key, place in parts:
        num_tokens = len(part.token_ids)
        for full in (expected[key][place], continued[key][place]):
            assert (full.token_ids[:num_tokens] == part.token_ids).all()
            assert (full.logprobs[:num_tokens] == part.logprobs).all()
