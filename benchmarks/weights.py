"""Time and memory of a weight update: shard to shard, and by gathering full tensors.

The baseline gathers every full tensor on every trainer rank and loads it through vLLM, as verl and
slime do. Both methods use the same trainer ranks and the same vLLM engine.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baselines.measure import time_once
from shared import (
    HEAD_DIM,
    add_numbers,
    chosen,
    script_parser,
    time_together,
    write_model,
    write_results,
)

from megadapo.cli import parse, report_errors
from megadapo.cluster.processes import MIB
from megadapo.observe.tables import TextTable

if TYPE_CHECKING:
    from ray.actor import ActorHandle


NUMBERS = (
    ("layers", 8, "decoder layers of the model"),
    ("hidden", 512, "hidden size of the model"),
    ("vocab", 32000, "vocabulary of the model"),
    ("trainer-tp", 2, "trainer tensor parallelism"),
    ("trainer-pp", 1, "trainer pipeline parallelism"),
    ("engine-tp", 1, "engine tensor parallelism"),
    ("bucket-mib", 16.0, "weights.bucket_mib"),
    ("repeat", 5, "repetitions; the best counts"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both methods, print a table, and write JSON if requested."""
    import ray

    parser = script_parser(__doc__)
    add_numbers(parser, NUMBERS)
    setting = parse(parser, argv)
    with tempfile.TemporaryDirectory(prefix="megadapo-bench-") as folder:
        model = Path(folder) / "model"
        write_model(
            model,
            layers=setting.layers,
            hidden=setting.hidden,
            dtype="bfloat16",
            num_key_value_heads=math.gcd(setting.hidden // HEAD_DIM, 8),
            vocab_size=setting.vocab,
            max_position_embeddings=512,
            tie_word_embeddings=False,
        )
        try:
            measurements, floor = _measure(model, setting, Path(folder))
        finally:
            ray.shutdown()
    print(_table(measurements, floor))
    record = {"settings": chosen(setting, NUMBERS), "floor_seconds": floor}
    write_results(setting.json, {**record, "measurements": measurements})
    return 0


def _measure(
    model: Path, setting: argparse.Namespace, folder: Path
) -> tuple[list[dict[str, Any]], float]:
    """Return each method's best time and its bytes, and the seconds of one plain copy.

    "bytes_moved" is what all trainer ranks write for the engine, "bytes_received" what all engine
    ranks read, and "extra_memory" a trainer rank's peak memory beyond its parameters.
    """
    import torch
    from baselines.weights_workers import start_engine, start_ranks

    from megadapo.rollout.pool.publish import Publisher
    from megadapo.weights.config import WeightsConfig
    from megadapo.weights.disk.sources import open_layout

    bucket_bytes = int(setting.bucket_mib * MIB)
    engines: Any = start_engine(model, tensor_parallel=setting.engine_tp)
    ranks = start_ranks(model, folder, tp_size=setting.trainer_tp, pp_size=setting.trainer_pp)
    publisher = Publisher(
        ranks,
        engines,
        WeightsConfig(bucket_mib=setting.bucket_mib, verify="off"),
        tensor_parallel=setting.engine_tp,
        dtype=torch.bfloat16,
    )
    num_full = 2 * sum(torch.Size(one).numel() for one in open_layout(model).hf_shapes.values())
    methods = {
        "shard to shard (megadapo)": lambda: publisher.publish(1).num_bytes,
        "gather everything, load (verl, slime)": lambda: _gather_and_load(
            ranks, engines.actor, bucket_bytes
        ),
    }
    # each shard is read once, full tensors by every engine rank
    received = [None, num_full * setting.engine_tp]
    first = [_first_update(ranks, update) for update in methods.values()]
    rounds = time_together(methods, torch.device("cpu"), warmup=0, repeats=setting.repeat)
    measurements = [
        {
            "name": name,
            "seconds": min(rounds[name]) * 1e-3,
            "bytes_moved": moved,
            "bytes_received": moved if read is None else read,
            "extra_memory": extra,
        }
        for name, (moved, extra), read in zip(methods, first, received, strict=True)
    ]
    return measurements, _copy_seconds(num_full // setting.engine_tp)


def _first_update(ranks: list[ActorHandle[Any]], update: Callable[[], int]) -> tuple[int, int]:
    """Return an update's moved bytes, and its peak extra memory on a trainer rank with buckets."""
    import ray

    ray.get([rank.reset_peak_memory.remote() for rank in ranks])
    moved = update()
    return moved, max(ray.get([rank.extra_memory.remote() for rank in ranks]))


def _gather_and_load(
    ranks: list[ActorHandle[Any]], engine: ActorHandle[Any], bucket_bytes: int
) -> int:
    """Fill a bucket with full tensors, let the engine load it, and repeat: no overlap."""
    import ray

    ray.get(engine.call.remote("start_load"))
    moved = 0
    while True:
        answers: list[Any] = ray.get([rank.gather_bucket.remote(bucket_bytes) for rank in ranks])
        if not answers[0]["tensors"]:
            break
        ray.get(engine.call.remote("load", answers[0]))
        moved += answers[0]["num_bytes"]
    ray.get(engine.call.remote("finish_load"))
    return moved


def _copy_seconds(num_bytes: int) -> float:
    """Return the seconds of one plain copy of an engine rank's shard: the lower bound."""
    import torch

    source = torch.zeros(num_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return min(time_once(lambda: target.copy_(source), source.device) for _ in range(5)) * 1e-3


def _table(measurements: list[dict[str, Any]], floor: float) -> str:
    rows = []
    for one in measurements:
        sizes = (one["bytes_moved"], one["bytes_received"], one["extra_memory"])
        cells = (f"{size / MIB:.1f} MiB" for size in sizes)
        rows.append([one["name"], f"{one['seconds']:.3f}", *cells])
    rows.append(["one copy of an engine shard (floor)", f"{floor:.3f}", "", "", ""])
    head = ["", "seconds", "moved", "received", "extra memory"]
    return TextTable(head=head, rows=rows).text()


if __name__ == "__main__":
    sys.exit(report_errors(main))
