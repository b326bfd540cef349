"""Benchmark of one weight update: shard to shard, and by the baselines' method.

The baseline gathers every full tensor on every trainer rank and loads it through vLLM, as verl and
slime do. Both methods use the same trainer ranks and the same vLLM engine.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.cluster.processes import MIB
from megadapo.lab.record import write_record
from megadapo.observe.tables import TextTable

if TYPE_CHECKING:
    from ray.actor import ActorHandle


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The random model and the layouts of an update."""

    layers: int
    hidden: int
    vocab: int
    trainer_tp: int
    trainer_pp: int
    engine_tp: int
    bucket_mib: float
    repeat: int


def run(setting: Setting, *, json_file: Path | None) -> None:
    """Measure, print a table, and write JSON if requested."""
    import ray

    with tempfile.TemporaryDirectory(prefix="megadapo-bench-") as folder:
        model = _write_model(Path(folder) / "model", setting)
        try:
            measurements, floor = _measure(model, setting, Path(folder))
        finally:
            ray.shutdown()
    print(_table(measurements, floor))
    if json_file is not None:
        record = {
            "settings": asdict(setting),
            "floor_seconds": floor,
            "measurements": measurements,
        }
        write_record(json_file, record)


def _write_model(folder: Path, setting: Setting) -> Path:
    """Write a random Qwen2 in bfloat16 as a Hugging Face folder without a tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=setting.hidden,
        intermediate_size=4 * setting.hidden,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.hidden // 64,
        num_key_value_heads=math.gcd(setting.hidden // 64, 8),
        vocab_size=setting.vocab,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def _measure(model: Path, setting: Setting, folder: Path) -> tuple[list[dict[str, Any]], float]:
    """Return each method's best time and its bytes, and the seconds of one plain copy.

    "bytes_moved" is what all trainer ranks write for the engine, "bytes_received" what all engine
    ranks read, and "extra_memory" a trainer rank's peak memory beyond its parameters.
    """
    import torch
    from baselines.weights_workers import start_engine, start_ranks

    from megadapo.weights.config import WeightsConfig
    from megadapo.weights.disk.sources import open_layout
    from megadapo.weights.sync.publish import Publisher

    bucket_bytes = int(setting.bucket_mib * MIB)
    engines = start_engine(model, tensor_parallel=setting.engine_tp)
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
    seconds = _alternate(list(methods.values()), setting.repeat)
    measurements = [
        {
            "name": name,
            "seconds": best,
            "bytes_moved": moved,
            "bytes_received": moved if read is None else read,
            "extra_memory": extra,
        }
        for name, best, (moved, extra), read in zip(methods, seconds, first, received, strict=True)
    ]
    return measurements, _copy_seconds(num_full // setting.engine_tp)


def _first_update(ranks: list[ActorHandle[Any]], update: Callable[[], int]) -> tuple[int, int]:
    """Return an update's moved bytes, and its peak extra memory on a trainer rank with buckets."""
    import ray

    ray.get([rank.reset_peak_memory.remote() for rank in ranks])
    moved = update()
    return moved, max(ray.get([rank.extra_memory.remote() for rank in ranks]))


def _alternate(updates: list[Callable[[], int]], repeat: int) -> list[float]:
    """Return the best time of each update; they alternate, so that a slow minute affects all."""
    best = [float("inf")] * len(updates)
    for _ in range(repeat):
        for number, update in enumerate(updates):
            started = time.perf_counter()
            update()
            best[number] = min(best[number], time.perf_counter() - started)
    return best


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
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - started)
    return best


def _table(measurements: list[dict[str, Any]], floor: float) -> str:
    rows = []
    for one in measurements:
        sizes = (one["bytes_moved"], one["bytes_received"], one["extra_memory"])
        cells = (f"{size / MIB:.1f} MiB" for size in sizes)
        rows.append([one["name"], f"{one['seconds']:.3f}", *cells])
    rows.append(["one copy of an engine shard (floor)", f"{floor:.3f}", "", "", ""])
    head = ["", "seconds", "moved", "received", "extra memory"]
    return TextTable(head=head, rows=rows).text()
