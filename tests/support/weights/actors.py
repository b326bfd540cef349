"""Trainer ranks that only send weights, and engines that answer fixed prompts."""

import os
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megadapo.rollout.config import RolloutConfig
from megadapo.rollout.engine.engine import RolloutEngine
from megadapo.rollout.engine.spec import EngineSpec, WeightsFrom
from megadapo.rollout.pool.engines import Engines
from megadapo.rollout.pool.handle import EngineHandle
from megadapo.rollout.types import OpenGroup, SamplingSettings
from megadapo.weights.disk.sources import open_layout
from megadapo.weights.layout.placement import replica_positions
from megadapo.weights.layout.shards import ShardPosition
from megadapo.weights.sync.sender import WeightSender
from tests.support.rollout.engine_specs import engine_spec
from tests.support.weights.ranks import import_weights

GREEDY = SamplingSettings(temperature=0.0, top_p=1.0, max_tokens=12)
PROMPTS = [(2, 3, 4, 5), (7, 7, 9), tuple(number * 7 % 40 + 2 for number in range(200))]
"""Prompts; the last one fills blocks of the prefix cache."""


class SenderRank:
    """The weights of one trainer rank, in its own process."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._signal_at: tuple[int, int, int] | None = None
        self._late_s = 0.0

    def become(self, folder: Path, position: ShardPosition, rank: int) -> None:
        """Load the weights of a rank at `position`."""
        self._layout, self._position = open_layout(folder), position
        self._params = {
            shard.name: torch.nn.Parameter(torch.full(shard.shape, torch.nan))
            for shard in self._layout.megatron_shards(position)
        }
        self.load(folder)
        self._senders = {
            name: WeightSender(self._params, self._layout, position, rank)
            for name in ("live", "published")
        }
        for sender in self._senders.values():
            sender.fill = partial(self._fill, sender.fill)

    def load(self, folder: Path) -> None:
        """Load the weights of another folder in place."""
        import_weights(folder, self._params, self._layout, self._position)

    def train(self, seed: int, step: float) -> None:
        """Change every weight a little, replicas equally."""
        for name, param in sorted(self._params.items()):
            generator = torch.Generator().manual_seed(seed * 100_003 + zlib.crc32(name.encode()))
            param.data += step * torch.randn(param.shape, generator=generator)

    def signal_at(self, round_number: int, signal: int, pid: int | None = None) -> None:
        """Send a signal to a process, or this one, before the bucket of a round is filled."""
        self._signal_at = (round_number, signal, pid or os.getpid())

    def meet_late(self, seconds: float) -> None:
        """Wait that long before every meeting with the other ranks."""
        self._late_s = seconds

    def work_until(self, path: Path) -> None:
        """Be busy, as in an update, until a file exists."""
        while not path.exists():
            time.sleep(0.05)

    def weight_sender(self, sender: str, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "connect":
            time.sleep(self._late_s)
        return getattr(self._senders[sender], method)(*args, **kwargs)

    def _fill(self, fill: Callable[..., list[int]], round_number: int, **options: Any) -> list[int]:
        if self._signal_at and self._signal_at[0] == round_number:
            _, number, pid = self._signal_at
            self._signal_at = None
            os.kill(pid, number)
        return fill(round_number, **options)

    def pid(self) -> int:
        return os.getpid()


def start_actors(count: int, **options: Any) -> list[Any]:
    """Start processes for trainer ranks, with further options of Ray."""
    import ray

    actor = ray.remote(num_cpus=0, **options)(SenderRank)
    return [actor.remote() for _ in range(count)]


def start_senders(folder: Path, actors: list[Any] | None = None, **sizes: int) -> list[Any]:
    """Start one trainer rank per position, in `actors` or in new processes."""
    import ray

    positions = replica_positions(open_layout(folder), **sizes)
    ranks = start_actors(len(positions)) if actors is None else actors[: len(positions)]
    started = [
        actor.become.remote(folder, position, rank)
        for rank, (actor, position) in enumerate(zip(ranks, positions, strict=True))
    ]
    ray.get(started)
    return ranks


class SilentEngine(RolloutEngine):
    """An engine that answers no request, not even the first one at its start."""

    def __init__(self, spec: EngineSpec, mark: str) -> None:
        # allows functions to be sent to vLLM's workers; only this test sends one
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        super().__init__(spec, mark)

    async def _answer_one(self) -> None:
        """Return None, to show that the actor lives."""

    async def fingerprints(self) -> list[dict[str, tuple[list[int], int]]]:
        """Return shape and checksum of every parameter, per rank."""
        return await self._llm.collective_rpc(fingerprints_of)


def fingerprints_of(worker) -> dict[str, tuple[list[int], int]]:
    from megadapo.weights.sync.buckets import checksum

    parameters = worker.model_runner.get_model().named_parameters()
    return {name: (list(one.shape), checksum(one.data)) for name, one in parameters}


def start_silent_engine(
    folder: Path,
    log_folder: Path,
    config: RolloutConfig,
    *,
    weights_from: WeightsFrom = "trainer",
    dtype: str = "float32",
) -> Engines:
    """Start one engine that only loads weights."""
    spec = engine_spec(
        model=str(folder),
        dtype=dtype,
        weights_from=weights_from,
        config=config,
        log_file=log_folder / f"engine-{weights_from}.log",
    )
    engines = Engines([EngineHandle(spec, {"num_cpus": 0}, SilentEngine)])
    engines.wait_until_ready()
    return engines


def greedy(engines: Engines) -> list[list[tuple[tuple[int, ...], torch.Tensor]]]:
    """Return greedy tokens and their log-probs per engine and prompt."""
    # each rank imports this module, and would import transformers with that one
    from tests.support.rollout.engine_checks import all_finished

    count = len(engines.handles)
    requests = [
        OpenGroup(key=number * count + engine, prompt_ids=prompt, seeds=(0,), settings=GREEDY)
        for number, prompt in enumerate(PROMPTS)
        for engine in range(count)
    ]
    answers = {}
    # one response each, so that they go to the engines in turn
    engines.submit(requests)
    for group in all_finished(engines):
        response = group.responses[0]
        tokens = tuple(int(token) for token in response.token_ids)
        answers[group.key] = (tokens, torch.from_numpy(response.logprobs.copy()))
    return [
        [answers[number * count + engine] for number in range(len(PROMPTS))]
        for engine in range(count)
    ]
