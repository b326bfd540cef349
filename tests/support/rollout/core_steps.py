"""The steps of vLLM's core without a model: scheduler, messages and the output processor."""

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
END = 1


@dataclass
class Final:
    """A response as the actor receives it."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    experts: bytes


class CoreSteps:
    """Requests whose tokens are a function of name and position.

    Args:
        scheduler_class: vLLM's scheduler, or one of ours.
        is_async: plan each step before the last one's tokens are known.
        num_blocks: size of the cache; a small one causes preemptions.
    """

    def __init__(self, model, scheduler_class, *, is_async, num_blocks=4096, max_num_seqs=512):
        config = AsyncEngineArgs(
            model=str(model),
            max_model_len=512,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=8192,
            scheduling_policy="priority",
            dtype="float32",
            block_size=BLOCK,
            kv_cache_memory_bytes=1 << 20,
        ).create_engine_config()
        config.scheduler_config.async_scheduling = is_async
        config.cache_config.num_gpu_blocks = num_blocks
        layer = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        with set_current_vllm_config(config):
            self.scheduler = scheduler_class(
                vllm_config=config,
                kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["0"], layer)]),
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK,
                hash_block_size=BLOCK,
                log_stats=True,
            )
        self.scheduler.aux_output_connector = _Experts()
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._processor = OutputProcessor(None, log_stats=False)
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self._lag = 1 + is_async
        self._planned = deque()
        self.collectors = {}
        self.counts = Counter()
        self.num_preemptions = 0

    def abort(self, names):
        """End requests in the core, and return the number of tokens that each has."""
        tokens = {name: self.scheduler.requests[name].num_output_tokens for name in names}
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        return tokens

    def add(self, name, *, num_prompt=20, max_tokens=100, num_logprobs=0, priority=0):
        """Submit a request to core and actor."""
        params = SamplingParams(
            max_tokens=max_tokens,
            logprobs=num_logprobs,
            flat_logprobs=True,
            detokenize=False,
            stop_token_ids=[END],
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = [2 + place % 50 for place in range(num_prompt)]
        request = EngineCoreRequest(
            name, prompt, None, params, None, 0.0, None, name, None,
            priority=priority, external_req_id=name,
        )  # fmt: skip
        self.collectors[name] = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, name)
        self._processor.add_request(request, None, queue=self.collectors[name])
        self.scheduler.add_request(Request.from_engine_core_request(request, self._hasher))

    def run(self, num_steps=None):
        """Make steps until no request is left, or a number of them."""
        while self.scheduler.has_requests() or self._planned:
            if num_steps == 0:
                return
            num_steps = None if num_steps is None else num_steps - 1
            self._step()

    def finals(self):
        """Return the responses that have ended by name."""
        found = {name: one.get_nowait() for name, one in self.collectors.items()}
        return {name: _final(output.outputs[0]) for name, output in found.items() if output}

    def _step(self):
        if self.scheduler.has_requests():
            plan = self.scheduler.schedule()
            self._planned.append((plan, self._output(plan)))
            if len(self._planned) < self._lag and self.scheduler.has_requests():
                return
        by_client = self.scheduler.update_from_output(*self._planned.popleft())
        outputs = by_client.get(0, EngineCoreOutputs())
        frames = self._encoder.encode_into(outputs, bytearray())
        received = self._decoder.decode([bytes(frame) for frame in frames])
        self._processor.process_outputs(received.outputs)
        self.counts["outputs"] += len(outputs.outputs)
        self.counts["bytes"] += sum(memoryview(frame).nbytes for frame in frames)
        if outputs.scheduler_stats is not None:
            found = outputs.scheduler_stats.prefix_cache_stats
            self.num_preemptions += found.preempted_requests if found else 0

    def _output(self, plan):
        """Return the tokens and log-probs of a planned step."""
        requests = [self.scheduler.requests[name] for name in plan.num_scheduled_tokens]
        tokens = [
            [] if one.is_prefill_chunk else [_token(one.request_id, one.num_computed_tokens)]
            for one in requests
        ]
        width = 1 + max((one.sampling_params.logprobs for one in requests), default=0)
        ids = np.zeros((len(requests), width), dtype=np.int32)
        ids[:, 0] = [row[0] if row else 0 for row in tokens]
        logprobs = -np.arange(width) - ids[:, :1] / np.float32(7)
        names = [one.request_id for one in requests]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=LogprobsLists(ids, logprobs.astype(np.float32), np.ones(len(names), np.int32)),
        )


class _Experts:
    """The scheduler's part of router replay; the experts of a token are its position."""

    def __init__(self):
        self._num_sent = Counter()

    def take_output(self, request, _):
        """Return the experts of the tokens that were read since the last output."""
        start, end = self._num_sent[request.request_id], request.num_tokens - 1
        self._num_sent[request.request_id] = end
        return np.arange(start, end, dtype=np.int32)[:, None, None]

    def build_connector_meta(self, *_):
        """Return nothing: there is no worker."""

    request_finished = build_connector_meta


def _token(name, position):
    """Return the token of a request at a position; one in 64 ends the response."""
    return 1 + (int(name) * 7919 + position * 104729) % 64


def _final(output):
    table, experts = output.logprobs, output.routed_experts
    return Final(
        token_ids=list(output.token_ids),
        logprobs=[table.logprobs[start] for start in table.start_indices],
        finish_reason=output.finish_reason,
        experts=b"" if experts is None else experts.tobytes(),
    )
