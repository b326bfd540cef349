"""One rollout engine: a Ray actor around vLLM's AsyncLLM, which runs in processes of its own.

The actor's loop only submits requests and collects results; the model runs in vLLM's processes.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from megadapo.cluster.reaper import kill_marked, start_reaper
from megadapo.errors import InfraError
from megadapo.rollout.config import RolloutConfig
from megadapo.rollout.failure import START_LINE, describe_failure
from megadapo.rollout.platform import EnginePlatform
from megadapo.rollout.requests import (
    GroupRequest,
    GroupResponse,
    LogprobTable,
    Response,
    SamplingSettings,
    sampled_logprobs,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

WeightDtype = Literal["float32", "bfloat16"]
"""Type of an engine's weights and activations."""

WeightsFrom = Literal["folder", "trainer"]
"""Whether an engine loads the model's weights, or waits for a trainer to publish its own."""

WEIGHT_TRANSFER_BACKEND = "megadapo"
"""Name under which weights/sync/vllm_plugin.py registers our weight-transfer engine."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Everything one engine is started from."""

    index: int
    model: str
    """Hugging Face folder or Hub name."""
    dtype: WeightDtype
    max_model_len: int
    """Longest prompt and response together, in tokens."""
    weights_from: WeightsFrom
    config: RolloutConfig
    platform: EnginePlatform
    log_file: Path


class RolloutEngine:
    """The actor. Errors leave it as InfraError, since vLLM's own may not survive pickling."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._mark = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._policy_version = 0
        self._updating = False
        self._asleep = False
        self._failed_in: str | None = None
        self._num_requests = 0
        self._llm: AsyncLLM | None = None
        _redirect_output(spec.log_file)
        os.environ.update(spec.platform.environment(spec.config))
        self._reaper = start_reaper(self._mark)

    async def start(self) -> None:
        """Load the model and answer one request.

        Raises:
            InfraError: the model folder, the memory or vLLM itself is at fault; the message names
                the cause and what to change.
        """
        try:
            self._llm = _start_vllm(self._spec)
            if self._spec.platform.adds_stage_buffers(self._spec.config):
                await self._llm.collective_rpc("allocate_stage_buffers")
            warm_up = GroupRequest(key=0, prompt_ids=(0,), seeds=(0,))
            async for _ in self.generate(
                [warm_up], SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=1)
            ):
                pass
        except InfraError:
            raise
        except Exception as error:
            # vLLM raises many types at start-up; the boundary turns each into one message
            raise InfraError(self._describe("could not start", error)) from None

    async def generate(
        self, groups: Sequence[GroupRequest], settings: SamplingSettings
    ) -> AsyncIterator[list[GroupResponse]]:
        """Generate all groups and hand them over as they finish.

        Nothing runs before everything is submitted, so that the order of the work inside the
        engine, and with it every bit of the result, is a function of the requests alone.
        """
        llm = self._ready()
        finished: asyncio.Queue[asyncio.Task[GroupResponse]] = asyncio.Queue()
        try:
            tasks = await self._submit_all(llm, groups, settings)
            for task in tasks:
                task.add_done_callback(finished.put_nowait)
            num_left = len(tasks)
            while num_left:
                done = [await finished.get()]
                while not finished.empty():
                    done.append(finished.get_nowait())
                num_left -= len(done)
                yield [task.result() for task in done]
        except Exception as error:
            raise InfraError(self._describe("failed while generating", error)) from None

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Hand `init_info` to the weight-transfer engine of every rank."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=init_info)
        await self._call("init_weight_transfer_engine", request)

    async def start_weight_update(self) -> None:
        """Begin an update; until it is finished the engine refuses to generate."""
        self._updating = True
        await self._call("start_weight_update")

    async def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Take one bucket of the update."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._call("update_weights", WeightTransferUpdateRequest(update_info=update_info))

    async def finish_weight_update(self, policy_version: int) -> None:
        """End the update: new weights in use, no cached keys or values of the old ones."""
        await self._call("finish_weight_update")
        await self.reset_prefix_cache()
        self._policy_version = policy_version
        self._updating = False

    async def reset_prefix_cache(self) -> None:
        """Forget all cached keys and values."""
        if not await self._call("reset_prefix_cache"):
            raise InfraError(
                f"rollout engine {self._spec.index} could not reset its prefix cache: requests are "
                "still running, and what they cached belongs to the old weights"
            )

    async def sleep(self) -> None:
        """Give weights and cache memory back; the weights must be published anew afterwards."""
        self._asleep = True
        await self._call("sleep", 2)

    async def wake(self, what: str) -> None:
        """Take memory again for `what`: "weights" first, and "kv_cache" after their update."""
        await self._call("wake_up", [what])
        self._asleep = what != "kv_cache"

    async def shutdown(self) -> None:
        """End vLLM's processes and wait until they are gone.

        They hold nothing worth saving, and vLLM's own orderly end takes seconds.
        """
        kill_marked(self._mark)
        if self._llm is not None:
            self._llm.shutdown(timeout=0)
            self._llm = None

    async def _submit_all(
        self, llm: AsyncLLM, groups: Sequence[GroupRequest], settings: SamplingSettings
    ) -> list[asyncio.Task[GroupResponse]]:
        # also forgets cached prefixes: what is cached must not depend on earlier rounds
        await llm.pause_generation(mode="keep", clear_cache=True)
        try:
            waiting = [
                [await self._submit(llm, group.prompt_ids, seed, settings) for seed in group.seeds]
                for group in groups
            ]
        finally:
            await llm.resume_generation()
        return [
            asyncio.create_task(self._collect(group.key, collectors, self._policy_version))
            for group, collectors in zip(groups, waiting, strict=True)
        ]

    async def _submit(
        self, llm: AsyncLLM, prompt_ids: Sequence[int], seed: int, settings: SamplingSettings
    ) -> RequestOutputCollector:
        from vllm.inputs import tokens_input

        self._num_requests += 1
        return await llm.add_request(
            str(self._num_requests),
            tokens_input(list(prompt_ids)),
            _sampling_params(settings, seed),
        )

    async def _collect(
        self, key: int, waiting: Sequence[RequestOutputCollector], version: int
    ) -> GroupResponse:
        outputs = cast("list[RequestOutput]", [await collector.get() for collector in waiting])
        texts = self._decode([output.outputs[0].token_ids for output in outputs])
        responses = tuple(
            _response(output, text, version) for output, text in zip(outputs, texts, strict=True)
        )
        return GroupResponse(key=key, responses=responses, engine=self._spec.index)

    def _decode(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        assert self._llm is not None
        tokenizer = cast("PreTrainedTokenizerBase", self._llm.get_tokenizer())
        return tokenizer.batch_decode(
            [list(ids) for ids in token_ids],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )

    def _ready(self) -> AsyncLLM:
        if self._llm is None:
            state = "is not started"
        elif self._failed_in is not None:
            state = self._out_of_service()
        elif self._updating:
            state = "has an unfinished weight update"
        elif self._asleep:
            state = "sleeps"
        else:
            return self._llm
        raise InfraError(f"rollout engine {self._spec.index} {state} and cannot generate")

    async def _call(self, method: str, *args: object) -> Any:
        """Call a method of AsyncLLM; what it raises becomes an InfraError.

        A call that fails on one rank leaves the answers of the others unread, and every later
        call would take them for its own: from then on the engine refuses everything.
        """
        if self._llm is None:
            raise InfraError(f"rollout engine {self._spec.index} is not started")
        if self._failed_in is not None:
            raise InfraError(f"rollout engine {self._spec.index} {self._out_of_service()}")
        try:
            return await getattr(self._llm, method)(*args)
        except Exception as error:
            self._failed_in = method
            raise InfraError(self._describe(f"failed in {method}", error)) from None

    def _out_of_service(self) -> str:
        return f"is out of service since it failed in {self._failed_in}; it must start anew"

    def _describe(self, what: str, error: Exception) -> str:
        detail = f"{type(error).__name__}: {error}"
        return describe_failure(
            f"rollout engine {self._spec.index} {what}", detail, self._spec.log_file
        )


def _start_vllm(spec: EngineSpec) -> AsyncLLM:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.v1.engine.async_llm import AsyncLLM

    # our weight-transfer engine must be registered before the configuration is checked
    load_general_plugins()
    from_trainer = spec.weights_from == "trainer"
    arguments = AsyncEngineArgs(
        model=spec.model,
        dtype=spec.dtype,
        load_format="dummy" if from_trainer else "auto",
        tensor_parallel_size=spec.config.tensor_parallel,
        pipeline_parallel_size=spec.config.pipeline_parallel,
        enable_expert_parallel=spec.config.expert_parallel,
        # inside a Ray actor vLLM would choose Ray for more than one rank
        distributed_executor_backend="mp" if spec.config.ranks_per_engine > 1 else "uni",
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.config.max_num_seqs,
        enable_prefix_caching=spec.config.prefix_caching,
        logprobs_mode="processed_logprobs",
        weight_transfer_config=(
            WeightTransferConfig(backend=WEIGHT_TRANSFER_BACKEND) if from_trainer else None
        ),
        disable_log_stats=True,
        seed=0,
        **spec.platform.engine_arguments(spec.config, spec.max_model_len),
    )
    return AsyncLLM.from_engine_args(arguments)


def _sampling_params(settings: SamplingSettings, seed: int) -> SamplingParams:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        max_tokens=settings.max_tokens,
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _response(output: RequestOutput, text: str, policy_version: int) -> Response:
    completion = output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        raise InfraError(f"vLLM ended a response with {completion.finish_reason!r}")
    table = cast(LogprobTable | None, completion.logprobs)  # flat_logprobs asked for it
    return Response(
        token_ids=np.asarray(completion.token_ids, dtype=np.int32),
        logprobs=sampled_logprobs(completion.token_ids, table),
        finish_reason=cast(Literal["stop", "length"], completion.finish_reason),
        text=text,
        policy_versions=np.full(len(completion.token_ids), policy_version, dtype=np.int32),
    )


def _redirect_output(log_file: Path) -> None:
    """Let this process and its children write to the engine's own log file."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as file:
        file.write(START_LINE.encode())
        file.flush()
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
