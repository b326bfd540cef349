"""Run folders with real checkpoints of a small model, written in the trainer's names and stacking.

Checkpoints of megatron-core itself: `tests/distributed/trainer/checkpoint/test_export.py`.
"""

import json
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from megadapo.observe.metrics.records import MetricsLog
from megadapo.run.state.checkpoint import CheckpointStore, WriteTrainer
from megadapo.weights.disk.sources import SafetensorsFolder, fill_shard, open_layout
from megadapo.weights.layout.shards import ShardPosition
from tests.support.runs.checkpoints import save_checkpoint, written_by
from tests.support.runs.recorded_runs import evaluation_record

PADDED_ROWS = 64


def trainer_tensors(model: Path, scale: float) -> dict[str, torch.Tensor]:
    """Return a trainer's part of a model whose weights are multiplied by `scale`."""
    layout, source = open_layout(model), SafetensorsFolder(model)
    layers = tuple(range(layout.shape.num_layers))
    position = ShardPosition(layer_indices=layers, padded_vocab_size=PADDED_ROWS)
    stacks, tensors = defaultdict(list), {}
    for shard in layout.megatron_shards(position):
        param = torch.empty(shard.shape)
        fill_shard(param, shard, source)
        prefix, _, rest = (shard.alias or shard.name).partition("decoder.layers.")
        if rest:
            stacks["decoder.layers." + rest.partition(".")[2]].append(param * scale)
        else:
            tensors[prefix] = param * scale
    tensors |= {name: torch.stack(stack) for name, stack in stacks.items()}
    # rows beyond the vocabulary are padding, whatever is in them
    tensors["embedding.word_embeddings.weight"][layout.shape.vocab_size :] = 7.0
    return tensors | {f"optimizer.state.exp_avg.{name}": -one for name, one in tensors.items()}


def saved(tensors: dict[str, torch.Tensor]) -> WriteTrainer:
    return written_by(lambda folder: dcp.save(tensors, checkpoint_id=folder, no_dist=True))


def write_run(
    folder: Path, model: Path, *steps: int, tensors: dict[str, torch.Tensor] | None = None
) -> Path:
    """A run with one checkpoint a step, the weights of step N being the base model's times N."""
    store = CheckpointStore(folder / "checkpoints", keep=len(steps))
    for step in steps:
        state = tensors or trainer_tensors(model, step)
        save_checkpoint(store, step, saved(state), state={})
    config = {
        "run": {"folder": str(folder), "num_steps": 9},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"held_out": "arithmetic:held_out:64"},
        "algorithm": {"objective": {"clip_high": 0.28, "dual_clip": None}},
        "evaluation": {"temperature": 1.0, "top_p": 0.7},
        "trainer": {"optimizer": {"lr": 1e-6}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    with MetricsLog(folder) as log:
        for step in (0, *steps):
            values = {"standard_error": 0.0123, "response_length": 20.0 + step}
            log.record_evaluation(evaluation_record(step, step / 10, **values))
    return folder
