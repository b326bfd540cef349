"""One rollout engine: a Ray actor around vLLM's AsyncLLM, whose model runs in processes of its own.

The actor's loop only submits requests and collects results. Error messages name the cause, from the
log, and what to change.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.cluster.local_ray import private_folder
from megadapo.cluster.process_log import START_LINE, read_tail, redirect_output
from megadapo.cluster.processes import collecting_rarely, descendants, private_bytes
from megadapo.cluster.this_node import ClockReading, node_address, read_clock, use_interface_towards
from megadapo.cluster.watch.diagnostics import ProcessLocation
from megadapo.cluster.watch.guard import kill_marked, mark_and_guard
from megadapo.errors import InfraError, ProcessDiedError
from megadapo.rollout.engine.fork_server import prepare_what_vllm_spawns
from megadapo.rollout.engine.spec import EngineSpec
from megadapo.rollout.types import (
    ActivityCounter,
    EngineActivity,
    EngineCounts,
    OpenGroup,
    SamplingSettings,
    ScoreRequest,
    StopReport,
)

if TYPE_CHECKING:
    import numpy as np
    from vllm.v1.engine.async_llm import AsyncLLM

    from megadapo.rollout.engine.generation import Generation


START_POLL_S = 1.0
CALL_POLL_S = 1.0
"""Seconds between two looks at vLLM's processes during a call."""
MAX_CAUSE = 600
"""Longest cause in a message, in characters; the log has the whole text."""
ADVICE = (
    (
        r"larger than the (available KV cache memory|maximum number of tokens that can be stored)"
        r"|No available memory for the cache blocks|KV cache is needed",
        "raise rollout.kv_cache_gib (CPU) or rollout.gpu_memory_utilization (CUDA), or lower "
        "rollout.max_response_tokens",
    ),
    (
        r"less than (requested memory for kv|desired CPU memory)|on kv cache allocation",
        "lower rollout.kv_cache_gib, rollout.num_engines or rollout.tensor_parallel, or free "
        "memory on this machine",
    ),
    (
        r"less than desired GPU memory utilization|out of memory|OutOfMemory",
        "lower rollout.gpu_memory_utilization, free the GPU, or raise rollout.tensor_parallel",
    ),
    (
        r"(not divisible|must be divisible) by|divisible by tensor parallel",
        "choose a rollout.tensor_parallel that divides the model's attention heads",
    ),
    (
        r"greater than the derived max_model_len|max_position_embeddings",
        "lower data.max_prompt_tokens or rollout.max_response_tokens to the model's maximum "
        "positions",
    ),
    (
        r"Repo id must|not a valid model identifier|is not a local folder|config\.json"
        r"|Cannot find any model weights|safetensors|Error retrieving file list",
        "check that model.path is a complete Hugging Face folder or a name on the Hub",
    ),
)
"""Patterns of vLLM's error messages, each with what the user can change."""
_ERROR_LINE = re.compile(r"\b((?:[A-Za-z_]+\.)*[A-Za-z_]*(?:Error|Exception): .+)$")
_PYDANTIC_HEAD = re.compile(r"\w*ValidationError: \d+ validation errors? for .*\n\s*")
_CONSEQUENCES = (
    "Engine core initialization failed",
    "EngineCore encountered an issue",
    "WorkerProc initialization failed",
    "Worker failed with error",
    "cancelled",
)


class RolloutEngine:
    """The actor of an engine. It raises InfraError only: vLLM's errors may not survive pickling.

    Args:
        mark: identifier of all processes that this one starts.
    """

    def __init__(self, spec: EngineSpec, mark: str) -> None:
        self._spec = spec
        self._mark = mark
        self._policy_version = 0
        self._updating = False
        self._asleep = False
        self._pids: tuple[int, ...] = (os.getpid(),)
        self._failed_in: str | None = None
        self._counter = ActivityCounter(spec.config.max_num_seqs)
        self._llm: AsyncLLM | None = None
        self._generation: Generation | None = None
        redirect_output(spec.log_file)
        os.environ.update(spec.environment())
        # otherwise each of vLLM's process groups looks up the host's name and listens there
        use_interface_towards(node_address())
        # else vLLM's sockets stay in the node's temporary folder, where every user reaches them
        self._sockets = str(private_folder())
        os.environ["VLLM_RPC_BASE_PATH"] = self._sockets
        self._guard = mark_and_guard(self._mark, self._sockets)

    def location(self) -> ProcessLocation:
        """Return the node and number of this process."""
        return ProcessLocation.here()

    def node(self) -> str:
        """Return the address of the node."""
        return node_address()

    def clock(self) -> ClockReading:
        """Return the node's time."""
        return read_clock()

    async def start_profile(self) -> None:
        """Start the profiler of every rank."""
        await self._call("start_profile")

    async def stop_profile(self) -> None:
        """Stop the profiler; every rank writes its trace to `EngineSpec.profile_folder`."""
        await self._call("stop_profile")

    async def start(self) -> None:
        """Load the model and answer one request.

        Raises:
            InfraError: start-up failed; the message names the cause and what to change.
        """
        try:
            with collecting_rarely():
                await self._start_vllm()
            await self._answer_one()
        except InfraError:
            raise
        except Exception as error:
            # vLLM raises many types at start-up; each becomes one message
            raise InfraError(self._describe("could not start", error)) from None

    async def submit(self, groups: Sequence[OpenGroup]) -> None:
        """Start to generate groups; `collect` returns them when they finish."""
        generation = self._ready()
        with self._naming_failures("failed while generating"):
            await generation.submit(groups, self._policy_version)

    async def collect(
        self, max_wait_s: float, num_for_report: int
    ) -> tuple[tuple[OpenGroup, ...], EngineCounts]:
        """Wait until a group or `num_for_report` responses end, at most `max_wait_s` seconds.

        Returns:
            The groups that have ended since the last call.
        """
        assert self._generation is not None, "start first"
        with self._naming_failures("failed while generating"):
            return await self._generation.collect(max_wait_s, num_for_report)

    async def stop(self, keys: Collection[int], keep: bool) -> tuple[StopReport, EngineCounts]:
        """End groups; `keep`: return their tokens so far."""
        assert self._generation is not None, "start first"
        with self._naming_failures("failed while stopping"):
            stopped = await self._generation.stop(keys, keep=keep)
            return stopped, self._generation.counts()

    async def score(
        self, requests: Sequence[ScoreRequest], wait_s: float
    ) -> list[np.ndarray] | None:
        """Return the log-probs of each request's tokens; None after `wait_s` seconds."""
        from megadapo.rollout.engine.score import score

        self._ready()
        assert self._llm is not None, "start first"
        version = self._policy_version
        with self._naming_failures("failed while scoring"):
            return await score(self._llm, requests, policy_version=version, wait_s=wait_s)

    def activity(self) -> EngineActivity:
        """Return the engine's activity since the last call."""
        assert self._generation is not None, "start first"
        activity = self._counter.take(self._generation.num_tokens)
        activity.private_bytes = private_bytes(*self._pids)
        return activity

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Pass `init_info` to the weight-transfer engine of every rank."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=init_info)
        await self._call("init_weight_transfer_engine", request)

    async def weight_versions(self) -> list[int | None]:
        """Return the version of each rank's weights; None after an incomplete update."""
        versions: list[int | None] = await self._call("collective_rpc", "weight_version")
        return versions

    async def start_weight_update(self) -> None:
        """Start an update; until it is finished the engine refuses to generate."""
        self._updating = True
        await self._call("start_weight_update")

    async def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Receive one bucket of the update."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._call("update_weights", WeightTransferUpdateRequest(update_info=update_info))

    async def finish_weight_update(self, policy_version: int) -> None:
        """End the update: use the new weights, and clear keys and values of the old ones."""
        await self._call("finish_weight_update")
        await self.reset_prefix_cache()
        self._policy_version = policy_version
        self._updating = False

    async def reset_prefix_cache(self) -> None:
        """Clear all cached keys and values."""
        if not await self._call("reset_prefix_cache"):
            raise InfraError(
                f"rollout engine {self._spec.index} could not reset its prefix cache: requests are "
                "still running, and their cached keys and values are of the old weights"
            )

    async def sleep(self, keep_weights: bool = False) -> None:
        """Free the memory of weights and cache; the weights must be published afterwards.

        `keep_weights`: keep the weights in main memory until `wake`.
        """
        self._asleep = True
        await self._call("sleep", 1 if keep_weights else 2)

    async def wake(self, what: str) -> None:
        """Allocate memory for `what`: "weights" first, and "kv_cache" after their update."""
        await self._call("wake_up", [what])
        self._asleep = what != "kv_cache"

    async def shutdown(self) -> None:
        """Kill vLLM's processes and wait for their end.

        They hold no state to save, and vLLM's orderly end takes seconds.
        """
        if self._generation is not None:
            self._generation.close()
        kill_marked(self._mark)
        if self._llm is not None:
            self._llm.shutdown(timeout=0)
            self._llm = self._generation = None

    async def _start_vllm(self) -> None:
        spec = self._spec
        prepare_what_vllm_spawns(self._sockets, forks=not spec.uses_cuda)
        from megadapo.rollout.engine.start_vllm import start_vllm

        self._llm = start_vllm(spec, self._counter)
        self._pids = (os.getpid(), *descendants(os.getpid()))
        if not spec.uses_cuda and spec.config.pipeline_parallel > 1:
            await self._llm.collective_rpc("allocate_stage_buffers")
        if not spec.uses_cuda and spec.returns_experts:
            await self._llm.collective_rpc("return_experts")
        self._reset_generation()

    def _reset_generation(self) -> None:
        """Start with all counts at 0."""
        from megadapo.rollout.engine.generation import Generation

        assert self._llm is not None, "start_vllm first"
        self._generation = Generation(self._llm, returns_experts=self._spec.returns_experts)

    async def _answer_one(self) -> None:
        settings = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=1)
        await self.submit([OpenGroup(key=0, prompt_ids=(0,), seeds=(0,), settings=settings)])
        while not (await self.collect(START_POLL_S, 1))[0]:
            pass
        # the driver counts its own requests only
        self._reset_generation()

    def _ready(self) -> Generation:
        if self._generation is None:
            state = "is not started"
        elif self._failed_in is not None:
            state = self._out_of_service()
        elif self._updating:
            state = "has an unfinished weight update"
        elif self._asleep:
            state = "sleeps"
        else:
            return self._generation
        raise InfraError(f"rollout engine {self._spec.index} {state} and cannot generate")

    async def _call(self, method: str, *args: object) -> Any:
        """Call a method of AsyncLLM, and raise its errors as InfraError.

        If a call fails on one rank, the answers of the others stay unread and a later call would
        read them: from then on the engine refuses all calls.
        """
        if self._llm is None:
            raise InfraError(f"rollout engine {self._spec.index} is not started")
        if self._failed_in is not None:
            raise InfraError(f"rollout engine {self._spec.index} {self._out_of_service()}")
        call = asyncio.ensure_future(getattr(self._llm, method)(*args))
        try:
            # vLLM leaves calls unanswered that its processes had not read when they died
            while not (await asyncio.wait([call], timeout=CALL_POLL_S))[0]:
                if self._llm.errored:
                    raise self._llm.dead_error
            return call.result()
        except Exception as error:
            self._failed_in = method
            raise self._failure(f"failed in {method}", error) from None
        finally:
            call.cancel()

    def _out_of_service(self) -> str:
        return f"is out of service since it failed in {self._failed_in}; it must be restarted"

    @contextmanager
    def _naming_failures(self, what: str) -> Iterator[None]:
        """Raise vLLM's errors, which have many types, as one type that names the engine."""
        try:
            yield
        except Exception as error:
            raise self._failure(what, error) from None

    def _failure(self, what: str, error: Exception) -> InfraError:
        """Return the error to raise for an error of vLLM."""
        kind = ProcessDiedError if self._llm is not None and self._llm.errored else InfraError
        return kind(self._describe(what, error))

    def _describe(self, what: str, error: Exception) -> str:
        detail = f"{type(error).__name__}: {error}"
        return describe_failure(
            f"rollout engine {self._spec.index} {what}", detail, self._spec.log_file
        )


def root_cause(log: str) -> str | None:
    """Return the last error of an engine's log that no error of another process caused."""
    lines = log.rpartition(START_LINE)[2].splitlines()
    found = [match.group(1).strip() for line in lines if (match := _ERROR_LINE.search(line))]
    causes = [line for line in found if not _is_consequence(line)]
    return causes[-1] if causes else (found[-1] if found else None)


def describe_failure(what: str, detail: str, log_file: Path) -> str:
    """Return a message: what failed, the cause, what to change, and the log.

    Args:
        detail: error of the failed call; if an error in another process caused it, the cause is
            read from the log.
    """
    cause = detail
    if not detail or _is_consequence(detail):
        cause = root_cause(read_tail(log_file)) or detail or "its process ended"
    advice = next((text for pattern, text in ADVICE if re.search(pattern, cause)), None)
    remedy = f"; {advice}" if advice else ""
    # on one line, without pydantic's additions
    text = " ".join(_PYDANTIC_HEAD.sub("", cause).partition(" [type=")[0].split())
    shown = text if len(text) <= MAX_CAUSE else text[:MAX_CAUSE] + "..."
    return f"{what}: {shown}{remedy} (log: {log_file})"


def _is_consequence(text: str) -> bool:
    return any(one in text for one in _CONSEQUENCES)
