"""Both schedulers give the responses of vLLM's own, in fewer and larger messages."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
import torch
from vllm.config import SchedulerConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import LogprobsLists

from megadapo.rollout.engine import start_vllm
from megadapo.rollout.engine.start_vllm import (
    AsyncBatchingScheduler,
    BatchingScheduler,
    HeldTokens,
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
    monkeypatch.setattr(start_vllm, "time", clock)


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
        steps = make_steps(tiny_model, kind, num_blocks=2048)
        for number in range(128):
            # these do not end early
            steps.add(str(64 * number), num_prompt=5, max_tokens=60)
        steps.run(3)
        steps.counts.clear()
        steps.run(40)
        assert steps.scheduler.get_request_counts() == (128, 0)
        per_step[kind] = {name: steps.counts[name] / 40 for name in ("outputs", "bytes")}
    stock, ours = per_step.values()
    assert stock["outputs"] == 128 and ours["outputs"] <= 128 / 15
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
    late = int(start_vllm.HELD_S / STEP_S) + 2
    assert all(seen[place] > seen[place - late] for place in range(late, 50))


def output(request_id: str, *tokens: int, **rest: Any) -> EngineCoreOutput:
    ids = np.array(tokens, dtype=np.int32)[:, None]
    logprobs = LogprobsLists(ids, -ids.astype(np.float32), np.zeros(len(tokens), dtype=np.int32))
    return EngineCoreOutput(
        request_id=request_id, new_token_ids=list(tokens), new_logprobs=logprobs, **rest
    )


def test_due_tokens_come_with_their_logprobs() -> None:
    held = HeldTokens()
    for name in ("a", "b"):
        first = held.take(output(name, 1), period=7)
        assert first is not None and first.new_token_ids == [1]
    assert held.take(output("b", 9), period=7) is None
    assert held.take(output("a", 2, 3), period=7) is None
    joined = held.take(output("a", 4), period=8)
    assert joined is not None and joined.new_token_ids == [2, 3, 4]
    assert joined.new_logprobs is not None
    assert joined.new_logprobs.logprobs[:, 0].tolist() == [-2.0, -3.0, -4.0]
    assert joined.new_logprobs.logprob_token_ids[:, 0].tolist() == [2, 3, 4]
    assert len(joined.new_logprobs.sampled_token_ranks) == 3
    assert held.take(output("a", 5), period=8) is None
    after = held.take(output("a", 6), period=8, at_once=True)
    assert after is not None and after.new_token_ids == [5, 6]


def test_steps_longer_than_a_period_are_not_held_back() -> None:
    """A slow engine would seem to make progress in every second step only."""
    held = HeldTokens()
    for step in range(5):
        sent = held.take(output("a", step), period=step)
        assert sent is not None and sent.new_token_ids == [step]


def test_requests_of_alternating_steps_all_get_their_tokens() -> None:
    """Pipeline stages alternate between batches; one batch must not starve another."""
    held, got = HeldTokens(), {"a": 0, "b": 0}
    for number in range(40):
        for name in ("a", "b")[:: 1 if number % 2 else -1]:
            joined = held.take(output(name, number), period=number // 3)
            got[name] += 0 if joined is None else len(joined.new_token_ids)
    assert min(got.values()) > 35


def test_end_of_response_comes_at_once_with_all_held_tokens() -> None:
    """The response would lack its last tokens, or wait for a step that never comes."""
    held = HeldTokens()
    held.take(output("a", 0), period=7)
    assert held.take(output("a", 1), period=7) is None
    end = EngineCoreOutput(
        request_id="a", new_token_ids=[], finish_reason=FinishReason.ABORT, stop_reason="gone"
    )
    joined = held.take(end, period=7)
    assert joined is not None and joined.new_token_ids == [1]
    assert joined.finish_reason == FinishReason.ABORT and joined.stop_reason == "gone"
    assert joined.new_logprobs is not None and joined.new_logprobs.logprobs.tolist() == [[-1.0]]


def test_outputs_with_more_than_tokens_are_not_held_back() -> None:
    for rest in ({"prompt_token_id_logprobs": torch.zeros(1, 2)}, {"num_nans_in_logits": 3}):
        held = HeldTokens()
        held.take(output("a", 0), period=7)
        joined = held.take(output("a", 1, **rest), period=7)
        assert joined is not None and joined.new_token_ids == [1]


def test_tokens_of_ended_requests_are_dropped() -> None:
    """Another request may reuse the number, and memory must not grow."""
    held = HeldTokens()
    held.take(output("a", 1), period=7)
    end = held.take(output("a", 2, finish_reason=FinishReason.STOP), period=7)
    assert end is not None and end.new_token_ids == [2]
    first = held.take(output("a", 3), period=7)
    assert first is not None and first.new_token_ids == [3]
