"""The layers of each pipeline stage, impossible splits, and the head's options by device."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch._subclasses.fake_tensor import FakeTensorMode

from megadapo.algorithm.objective import PolicyObjective
from megadapo.errors import ConfigError
from megadapo.models.description import ModelDescription, describe_model
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.model.head import PolicyHead
from megadapo.trainer.model.model import transformer_config
from megadapo.trainer.model.model_layout import (
    chunks_of_stages,
    stage_problems,
    validate_model_layout,
)
from tests.support.models.large import QWEN_7B

PP2 = {"pipeline_parallel": 2}


def model_of(num_layers: int) -> ModelDescription:
    return describe_model(QWEN_7B | {"num_hidden_layers": num_layers})


def test_chunks_go_round_the_stages():
    """Stage 0 of an interleaved pipeline does not hold the first half of the layers."""
    trainer = TrainerConfig(pipeline_parallel=2, virtual_pipeline=2)
    first, second = chunks_of_stages(8, trainer)
    assert first == [range(0, 2), range(4, 6)]
    assert second == [range(2, 4), range(6, 8)]
    uneven = TrainerConfig(pipeline_parallel=4, first_stage_layers=2, last_stage_layers=1)
    assert [len(layers) for (layers,) in chunks_of_stages(9, uneven)] == [2, 3, 3, 1]


def accepted_splits(num_layers: int) -> Iterator[TrainerConfig]:
    for pipeline, virtual, first, last in product(range(2, 5), range(1, 4), range(5), range(5)):
        trainer = TrainerConfig(
            pipeline_parallel=pipeline,
            virtual_pipeline=virtual,
            first_stage_layers=first,
            last_stage_layers=last,
        )
        with suppress(ConfigError):
            validate_model_layout(model_of(num_layers), trainer)
            yield trainer


@pytest.mark.parametrize("num_layers", range(2, 25))
def test_every_accepted_split_holds_every_layer_once(num_layers):
    splits = list(accepted_splits(num_layers))
    assert splits
    for trainer in splits:
        chunks = chunks_of_stages(num_layers, trainer)
        in_order = [stage[chunk] for chunk in range(trainer.virtual_pipeline) for stage in chunks]
        assert all(in_order), "a chunk without layers"
        assert [n for chunk in in_order for n in chunk] == list(range(num_layers))


@pytest.mark.parametrize("num_layers", range(2, 13))
def test_megatron_builds_every_accepted_split_alike(num_layers):
    """A split that megatron-core cuts otherwise, or cannot cut, would end every rank."""
    for trainer in accepted_splits(num_layers):
        config = transformer_config(model_of(num_layers), trainer, dtype=torch.bfloat16)
        for stage, chunks in enumerate(chunks_of_stages(num_layers, trainer)):
            for number, layers in enumerate(chunks):
                chunk = number if trainer.virtual_pipeline > 1 else None
                assert get_num_layers_to_build(config, chunk, stage) == len(layers)
                assert get_transformer_layer_offset(config, chunk, stage) == layers.start


@pytest.mark.parametrize(
    ("num_layers", "split", "parts"),
    [
        (
            28,
            {"pipeline_parallel": 4, "virtual_pipeline": 2},
            ["trainer.virtual_pipeline = 2", "the 7 layers of a pipeline stage", "stage: 1, 7"],
        ),
        (
            28,
            {**PP2, "first_stage_layers": 14, "last_stage_layers": 13},
            ["first_stage_layers = 14 and trainer.last_stage_layers = 13", "1 layers are left"],
        ),
        (
            4,
            {**PP2, "virtual_pipeline": 2, "first_stage_layers": 2, "last_stage_layers": 2},
            ["leave no other stage", "trainer.virtual_pipeline = 2"],
        ),
        (4, {**PP2, "first_stage_layers": 4}, ["0 layers are left for the 1"]),
        (4, {"pipeline_parallel": 3, "last_stage_layers": 9}, ["-5 layers are left"]),
    ],
)
def test_impossible_split_names_its_keys(num_layers, split, parts):
    with pytest.raises(ConfigError) as caught:
        validate_model_layout(model_of(num_layers), TrainerConfig(**split))
    assert all(part in str(caught.value) for part in parts)


def test_problem_names_keys_and_sizes_that_fit():
    assert stage_problems(28, TrainerConfig(pipeline_parallel=3)) == [
        "trainer.pipeline_parallel = 3 does not divide the model's num_hidden_layers = 28; sizes "
        "that fit this model: 1, 2, 4, 7, 14, 28 (or give the ends fewer layers: "
        "trainer.first_stage_layers, trainer.last_stage_layers)"
    ]
    assert stage_problems(28, TrainerConfig(pipeline_parallel=4, first_stage_layers=6)) == [
        "trainer.first_stage_layers = 6 of num_hidden_layers = 28: 22 layers are left for the "
        "3 other stages of trainer.pipeline_parallel = 4; each of them must get as many, and at "
        "least one"
    ]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_both_passes_get_the_options_of_the_device(monkeypatch, device):
    """Sums over micro-batches that start in the forward pass would have other bits on a CPU."""
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_group", lambda: None)
    head = PolicyHead(
        objective=PolicyObjective(),
        temperature=1.0,
        vocab_size=64,
        wait_for_weight=lambda _: None,
        tp_invariant=device == "cpu",
    )
    with FakeTensorMode():
        hidden, weight = torch.empty(4, 1, 8, device=device), torch.empty(64, 8, device=device)
        layer = SimpleNamespace(weight=weight, sequence_parallel=False)
        _, _, options = head._operands(hidden, layer, None, SimpleNamespace(rows=None))
    assert options["accumulate_in_forward"] == (device == "cuda")
    assert options["tp_invariant"] == (device == "cpu")
