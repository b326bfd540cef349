"""Train with one trainer rank in this process, without Ray and engines: speed, memory and bits.

    python tools/first_gpu/trainer_alone.py RECIPE [--KEY=VALUE ...] --json=FILE

FILE gets what is known after each stage. Stages with the name of a phase are in its plan.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from baselines.measure import reset_resident_peak, resident_peak

from megadapo.config import load_config
from megadapo.data.batch import PackedBatch
from megadapo.lab.profiling.profiles import random_batch
from megadapo.observe.files import replace_text
from megadapo.plan.cards import MIB, card_of
from megadapo.plan.step_time import update_flops
from megadapo.run.processes import trainer_settings
from megadapo.run.state.checkpoint import CHECKPOINTS
from megadapo.trainer.trainer import POLL_S, complete_save
from megadapo.trainer.types import RankReport, Rendezvous, UpdateRequest
from megadapo.trainer.worker import TrainerWorker

T = TypeVar("T")
ON_GPU = torch.cuda.is_available()


class Stages:
    """Measurements of all stages so far, in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.seconds: dict[str, float] = {}
        self._values: dict[str, Any] = {"seconds": self.seconds, "memory": {}}

    def measure(self, stage: str, work: Callable[[], T]) -> T:
        """Return the result of a stage; note its seconds and the most MiB in use."""
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        else:
            reset_resident_peak()
        started = time.perf_counter()
        result = work()
        if ON_GPU:
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            # CUDA's context is in use beside what torch has reserved
            most = total - free - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()
        else:
            most = resident_peak()
        self.seconds[stage] = time.perf_counter() - started
        self._values["memory"][stage] = most / MIB
        print(f"{stage}: {self.seconds[stage]:.3f} s, at most {most / MIB:,.0f} MiB")
        self.note()
        return result

    def note(self, **values: Any) -> None:
        """Write values, and all that were measured before."""
        for name, value in values.items():
            print(f"{name}: {value}", flush=True)
        self._values |= values
        # without the machine, which nvidia-smi would be asked for after each stage
        replace_text(self._file, json.dumps(self._values), with_folder=True)


def main() -> int:
    """Train, offload, save and load; return 1 if bits are lost, or not repeated as promised."""
    recipe, *words, option = sys.argv[1:]
    config = load_config(recipe, [word.removeprefix("--") for word in words])
    stages = Stages(Path(option.removeprefix("--json=")))
    worker, settings, numbers = TrainerWorker(0), trainer_settings(config), count(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = Rendezvous(address="127.0.0.1", port=port, rank=0, world_size=1)
    stages.measure("start trainer", lambda: worker.start(settings, meeting, ON_GPU))
    size = worker.apply(lambda rank: rank.layout.shape.vocab_size)
    batch = random_batch(config, config.algorithm.responses_per_mini_batch, vocab_size=size)

    def update() -> float | None:
        request = UpdateRequest(batch=batch, policy_version=0, step=next(numbers))
        return worker.update(request).metrics["policy/ratio_first_max_error"]

    error = stages.measure("first update", update)
    stages.note(ratio_first_max_error=error)
    for _ in range(2):
        stages.measure("train", update)
    stages.note(**worker.apply(speed, batch, stages.seconds["train"]))
    found = compare_bits(worker, stages, update, config.run.folder / CHECKPOINTS)
    stages.note(**found)
    if config.trainer.deterministic or not ON_GPU:
        return int(error != 0.0 or not all(found.values()))
    return int(not (found["offload_keeps_bits"] and found["load_keeps_bits"]))


def compare_bits(
    worker: TrainerWorker, stages: Stages, update: Callable[[], object], folder: Path
) -> dict[str, bool]:
    """Return whether weights and optimizer keep their bits, and whether an update repeats its."""

    def written() -> RankReport:
        while (report := worker.save_report()) is None:
            time.sleep(POLL_S)
        return report

    before = worker.apply(bits)
    stages.measure("leave to engines", worker.leave_to_engines)
    stages.measure("rollout", lambda: None)
    worker.take_gpu()
    loaded_back = stages.measure("load back", lambda: worker.apply(bits))
    folder.mkdir(parents=True)
    stages.measure("checkpoint", lambda: worker.begin_save(folder))
    files = complete_save(folder, [stages.measure("write", written)])
    update()
    after = worker.apply(bits)
    stages.measure("load", lambda: worker.load(folder, files))
    loaded = worker.apply(bits)
    update()
    return {
        "offload_keeps_bits": loaded_back == before,
        "load_keeps_bits": loaded == before,
        "update_repeats_bits": worker.apply(bits) == after,
    }


def speed(rank: Any, batch: PackedBatch, seconds: float) -> dict[str, float | None]:
    """Return the speed of an update."""
    lengths = np.diff(batch.cu_seqlens).tolist()
    repeats = not rank.first_pass_is_old_policy(1, checks_ratio=True)
    flops = update_flops(rank.model, lengths, with_logprobs=repeats) / seconds
    card = card_of(torch.cuda.get_device_name()) if ON_GPU else None
    return {
        "tokens": len(batch.tokens),
        "tokens_per_s": len(batch.tokens) / seconds,
        "tflops": flops * 1e-12,
        "mfu": None if card is None else flops / card.flops,
    }


def bits(rank: Any) -> list[int]:
    """Return the checksum of every piece of weights and optimizer."""
    from megadapo.trainer.checkpoint.pieces import owned_runs
    from megadapo.weights.sync.buckets import checksum

    with rank.offload.resident("parameters", "optimizer"):
        runs = owned_runs(rank.chunks, rank.optimizer)
        return [checksum(piece.data) for run in runs for piece in (*run.weights, *run.state)]


if __name__ == "__main__":
    sys.exit(main())
