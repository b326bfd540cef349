"""One rollout engine: a Ray actor around vLLM's AsyncLLM, which runs in processes of its own.

The actor's loop only submits requests and collects results; the model runs in vLLM's processes.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megadapo.cluster.process_log import redirect_output
from megadapo.cluster.processes import descendants, private_bytes
from megadapo.cluster.this_node import (
    ClockReading,
    node_address,
    read_clock,
    use_interface_towards,
)
from megadapo.cluster.watch.diagnostics import ProcessLocation
from megadapo.cluster.watch.guard import kill_marked, mark_and_guard
from megadapo.errors import InfraError, ProcessDiedError
from megadapo.rollout.engine.activity import ActivityCounter, EngineActivity
from megadapo.rollout.engine.failure import describe_failure
from megadapo.rollout.pool.engine_spec import EngineSpec
from megadapo.rollout.types import EngineReport, GroupRequest, SamplingSettings, StopReport

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from megadapo.rollout.engine.generation import Generation

START_POLL_S = 1.0


class RolloutEngine:
    """The actor. Errors leave it as InfraError, since vLLM's own may not survive pickling."""

    def __init__(self, spec: EngineSpec, mark: str) -> None:
        """`mark`: by which all processes that this one starts are found."""
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
        os.environ.update(spec.platform.environment(spec.config, spec.dtype))
        # vLLM's groups would look the host's name up, each of them, and listen where it leads
        use_interface_towards(node_address())
        self._guard = mark_and_guard(self._mark)

    def location(self) -> ProcessLocation:
        """Return the location of this process."""
        return ProcessLocation.here()

    def node(self) -> str:
        """Address of the node."""
        return node_address()

    def clock(self) -> ClockReading:
        """The node's time."""
        return read_clock()

    async def start_profile(self) -> None:
        """Let every rank begin to note what it does."""
        await self._call("start_profile")

    async def stop_profile(self) -> None:
        """Let every rank write what it did into `profile_folder`."""
        await self._call("stop_profile")

    async def start(self) -> None:
        """Load the model and answer one request.

        Raises:
            InfraError: the model folder, the memory or vLLM itself is at fault; the message names
                the cause and what to change.
        """
        try:
            await self._start_vllm()
            await self._answer_one()
        except InfraError:
            raise
        except Exception as error:
            # vLLM raises many types at start-up; the boundary turns each into one message
            raise InfraError(self._describe("could not start", error)) from None

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Begin to generate the groups; `collect` hands them over as they finish.

        Raises:
            InfraError: vLLM refused a request, or the engine cannot generate now.
        """
        generation = self._ready()
        with self._naming_failures("failed while generating"):
            await generation.submit(groups, self._policy_version)

    async def collect(self, max_wait_s: float, num_for_report: int) -> EngineReport:
        """Return as soon as a group has finished or `num_for_report` responses have ended, and
        after `max_wait_s` seconds at the latest.

        Raises:
            ProcessDiedError: vLLM's processes are gone.
        """
        assert self._generation is not None, "start first"
        with self._naming_failures("failed while generating"):
            return await self._generation.collect(max_wait_s, num_for_report)

    async def stop(self, keys: Collection[int], keep: bool) -> tuple[StopReport, EngineReport]:
        """End groups, and hand over what they have so far if it is to be kept."""
        assert self._generation is not None, "start first"
        with self._naming_failures("failed while stopping"):
            stopped = await self._generation.stop(keys, keep=keep)
            return stopped, self._generation.report()

    def activity(self) -> EngineActivity:
        """What the engine did since the last call."""
        assert self._generation is not None, "start first"
        activity = self._counter.take(self._generation.num_tokens)
        return replace(activity, private_bytes=private_bytes(*self._pids))

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Hand `init_info` to the weight-transfer engine of every rank."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=init_info)
        await self._call("init_weight_transfer_engine", request)

    async def held_versions(self) -> list[int | None]:
        """Which update's weights every rank has in full; None where there was none, or a part."""
        versions: list[int | None] = await self._call("collective_rpc", "held_version")
        return versions

    async def open_update(self, version: int, patience_s: float) -> list[str | None]:
        """Let every rank take up an update that is in files; why one cannot, if so."""
        arguments = ("open_update", None, (version, patience_s))
        problems: list[str | None] = await self._call("collective_rpc", *arguments)
        return problems

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

    async def sleep(self, keep_weights: bool = False) -> None:
        """Give weights and cache memory back; the weights must be published afterwards.

        `keep_weights`: They wait in main memory, and are there again after `wake`.
        """
        self._asleep = True
        await self._call("sleep", 1 if keep_weights else self._spec.config.sleep_level)

    async def wake(self, what: str) -> None:
        """Take memory again for `what`: "weights" first, and "kv_cache" after their update."""
        await self._call("wake_up", [what])
        self._asleep = what != "kv_cache"

    async def shutdown(self) -> None:
        """End vLLM's processes and wait until they are gone.

        They hold nothing worth saving, and vLLM's own orderly end takes seconds.
        """
        if self._generation is not None:
            self._generation.close()
        kill_marked(self._mark)
        if self._llm is not None:
            self._llm.shutdown(timeout=0)
            self._llm = self._generation = None

    async def _start_vllm(self) -> None:
        from megadapo.rollout.engine.start_vllm import start_vllm

        spec = self._spec
        self._llm = start_vllm(spec, self._counter)
        self._pids = (os.getpid(), *descendants(os.getpid()))
        if spec.platform.adds_stage_buffers(spec.config):
            await self._llm.collective_rpc("allocate_stage_buffers")
        if spec.returns_experts and not spec.platform.uses_cuda:
            await self._llm.collective_rpc("hand_over_experts")
        self._begin_to_count()

    def _begin_to_count(self) -> None:
        """The driver counts what it asks for; the answer that ended the start is not among it."""
        from megadapo.rollout.engine.generation import Generation

        assert self._llm is not None, "start_vllm first"
        spec = self._spec
        self._generation = Generation(
            self._llm, engine=spec.index, returns_experts=spec.returns_experts
        )

    async def _answer_one(self) -> None:
        settings = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=1)
        await self.submit([GroupRequest(key=0, prompt_ids=(0,), seeds=(0,), settings=settings)])
        while not (await self.collect(START_POLL_S, 1)).groups:
            pass
        self._begin_to_count()

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
            raise self._failure(f"failed in {method}", error) from None

    def _out_of_service(self) -> str:
        return f"is out of service since it failed in {self._failed_in}; it must start anew"

    @contextmanager
    def _naming_failures(self, what: str) -> Iterator[None]:
        """The boundary to vLLM, which raises many types: each becomes one that names the engine."""
        try:
            yield
        except Exception as error:
            raise self._failure(what, error) from None

    def _failure(self, what: str, error: Exception) -> InfraError:
        """What to raise for an error of vLLM's."""
        kind = ProcessDiedError if self._llm is not None and self._llm.errored else InfraError
        return kind(self._describe(what, error))

    def _describe(self, what: str, error: Exception) -> str:
        detail = f"{type(error).__name__}: {error}"
        return describe_failure(
            f"rollout engine {self._spec.index} {what}", detail, self._spec.log_file
        )
