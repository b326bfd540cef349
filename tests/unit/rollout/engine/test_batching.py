"""Both schedulers give the responses of vLLM's own, in fewer and larger messages."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from vllm.config import SchedulerConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from megadapo.rollout.engine import scheduler
from megadapo.rollout.engine.scheduler import (
    AsyncBatchingScheduler,
    BatchingScheduler,
    scheduler_class,
)
from tests.support.rollout.core_steps import CoreSteps

KINDS = pytest.mark.parametrize(
    ("stock", "ours"), [(Scheduler, BatchingScheduler), (AsyncScheduler, AsyncBatchingScheduler)]
)
STEP_S = 0.025


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A step takes as long as on a GPU."""
    steps = iter(range(10**6))
    clock = SimpleNamespace(monotonic=lambda: next(steps) * STEP_S)
    monkeypatch.setattr(scheduler, "time", clock)


def make_steps(model, kind, **sizes):
    return CoreSteps(model, kind, is_async=issubclass(kind, AsyncScheduler), **sizes)


@pytest.mark.parametrize("executor", [UniProcExecutor, "mp"])
def test_asynchronous_scheduling_stays_on(tiny_model, monkeypatch, executor):
    """Another scheduler, or the configuration's second check, could turn it off on CUDA."""
    # the only part of the configuration that turns it off on a CPU
    nothing = classmethod(lambda cls, config: None)
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", nothing)
    config = AsyncEngineArgs(
        model=str(tiny_model),
        max_model_len=64,
        distributed_executor_backend=executor,
        scheduling_policy="priority",
    ).create_engine_config()
    chosen = config.scheduler_config
    chosen.scheduler_cls = scheduler_class(chosen)
    # vLLM does so again in the process that receives the configuration
    config.__post_init__()
    assert chosen.async_scheduling and config.max_concurrent_batches == 2
    assert issubclass(chosen.get_scheduler_cls(), AsyncScheduler)
    assert issubclass(chosen.get_scheduler_cls(), BatchingScheduler)


def test_synchronous_scheduling_has_its_own_scheduler():
    config = SchedulerConfig.default_factory(async_scheduling=False)
    assert not issubclass(scheduler_class(config), AsyncScheduler)


@KINDS
def test_responses_equal_those_of_vllm(tiny_model, stock, ours):
    """Requests of two priorities are stopped, cut off at their limit and preempted."""
    found = []
    for kind in (stock, ours):
        steps = make_steps(tiny_model, kind, num_blocks=60, max_num_seqs=24)
        for number in range(48):
            steps.add(
                str(number),
                num_prompt=5 + number,
                max_tokens=1 + number * 3 % 70,
                # a step with both has more columns for all of them
                num_logprobs=10 * (number % 5 == 0),
                priority=-(number % 2),
            )
        steps.run()
        assert steps.num_preemptions > 3
        found.append(steps.finals())
    assert len(found[0]) == 48 and found[0] == found[1]
    assert {"stop", "length"} == {one.finish_reason for one in found[1].values()}


@KINDS
def test_stopped_responses_keep_all_tokens(tiny_model, stock, ours):
    """Held tokens would be sampled again, with other weights."""
    steps = make_steps(tiny_model, ours, max_num_seqs=12)
    for number in range(30):
        steps.add(str(number), num_prompt=10 + number)
    steps.run(18)
    running = [name for name in steps.collectors if name in steps.scheduler.requests]
    aborted = steps.abort(running[::2])
    steps.run(8)
    aborted |= steps.abort([one for one in running if one in steps.scheduler.requests])
    steps.run()
    finals = steps.finals()
    assert sum(aborted.values()) > 100 and 0 in aborted.values()
    for name, num_tokens in aborted.items():
        final = finals[name]
        assert final.finish_reason == "abort"
        assert len(final.token_ids) == len(final.logprobs) == num_tokens
        num_read = 10 + int(name) + num_tokens - 1 if num_tokens else 0
        assert len(final.experts) == 4 * num_read
    whole = make_steps(tiny_model, stock, max_num_seqs=12)
    for number in range(30):
        whole.add(str(number), num_prompt=10 + number)
    whole.run()
    for name, full in whole.finals().items():
        num_tokens = len(finals[name].token_ids)
        assert finals[name].token_ids == full.token_ids[:num_tokens]
        assert finals[name].logprobs == full.logprobs[:num_tokens]


def test_few_messages_per_step(tiny_model):
    """With 512 responses the messages of a step would cost as much time as the step on a GPU."""
    per_step = {}
    for kind in (AsyncScheduler, AsyncBatchingScheduler):
        steps = make_steps(tiny_model, kind, num_blocks=8192)
        for number in range(512):
            # these do not end early
            steps.add(str(64 * number), num_prompt=5, max_tokens=60)
        steps.run(3)
        steps.counts.clear()
        steps.run(40)
        assert steps.scheduler.get_request_counts() == (512, 0)
        per_step[kind] = {name: steps.counts[name] / 40 for name in ("outputs", "bytes")}
    stock, ours = per_step.values()
    assert stock["outputs"] == 512 and ours["outputs"] <= 512 / 15
    assert ours["bytes"] < stock["bytes"] / 3


def test_tokens_advance_twice_a_second(tiny_model):
    """An engine whose token count stands still counts as dead."""
    steps = make_steps(tiny_model, AsyncBatchingScheduler)
    steps.add("0", num_prompt=5, max_tokens=60)
    state = steps._processor.request_states["0"]
    seen = []
    for _ in range(50):
        steps.run(1)
        seen.append(state.detokenizer.num_output_tokens())
    late = int(scheduler.HELD_S / STEP_S) + 2
    assert all(seen[place] > seen[place - late] for place in range(late, 50))
