"""Which layers each pipeline stage holds, and the splits that cannot be."""

from __future__ import annotations

import pytest

from megadapo.errors import ConfigError
from megadapo.trainer.config import TrainerConfig
from megadapo.trainer.model_layout import validate_model_layout
from megadapo.trainer.stages import stage_chunks, stage_layers

QWEN_7B = {"num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944}


def refusal(num_layers: int, **split: int) -> str:
    with pytest.raises(ConfigError) as caught:
        validate_model_layout(QWEN_7B | {"num_hidden_layers": num_layers}, TrainerConfig(**split))
    return str(caught.value)


def test_chunks_go_round_the_stages() -> None:
    """Stage 0 of an interleaved pipeline does not hold the first half of the layers."""
    trainer = TrainerConfig(pipeline_parallel=2, virtual_pipeline=2)
    assert stage_layers(8, trainer) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert stage_chunks(8, trainer)[1] == [range(2, 4), range(6, 8)]


def test_the_ends_may_have_fewer_or_more_layers() -> None:
    trainer = TrainerConfig(pipeline_parallel=4, first_stage_layers=2, last_stage_layers=1)
    assert [len(stage) for stage in stage_layers(9, trainer)] == [2, 3, 3, 1]
    trainer = TrainerConfig(pipeline_parallel=2, last_stage_layers=12)
    assert [len(stage) for stage in stage_layers(28, trainer)] == [16, 12]
    trainer = TrainerConfig(pipeline_parallel=2, virtual_pipeline=2, last_stage_layers=2)
    assert stage_layers(6, trainer) == [(0, 1, 3, 4), (2, 5)]


@pytest.mark.parametrize("num_layers", range(1, 25))
def test_every_accepted_split_holds_every_layer_once(num_layers: int) -> None:
    num_accepted = 0
    for pipeline in range(2, 5):
        for virtual in range(1, 4):
            for first in range(5):
                for last in range(5):
                    trainer = TrainerConfig(
                        pipeline_parallel=pipeline,
                        virtual_pipeline=virtual,
                        first_stage_layers=first,
                        last_stage_layers=last,
                    )
                    try:
                        validate_model_layout(QWEN_7B | {"num_hidden_layers": num_layers}, trainer)
                    except ConfigError:
                        continue
                    num_accepted += 1
                    chunks = stage_chunks(num_layers, trainer)
                    in_order = [stage[chunk] for chunk in range(virtual) for stage in chunks]
                    assert all(in_order), "a chunk without layers"
                    assert [n for chunk in in_order for n in chunk] == list(range(num_layers))
    assert num_accepted or num_layers == 1


@pytest.mark.parametrize(
    ("num_layers", "split", "parts"),
    [
        (28, {"pipeline_parallel": 3}, ["trainer.pipeline_parallel = 3", "= 28", "2, 4, 7, 14"]),
        (28, {"pipeline_parallel": 3}, ["trainer.first_stage_layers, trainer.last_stage_layers"]),
        (
            28,
            {"pipeline_parallel": 4, "virtual_pipeline": 2},
            ["trainer.virtual_pipeline = 2", "the 7 layers of a pipeline stage", "stage: 1, 7"],
        ),
        (
            28,
            {"pipeline_parallel": 4, "first_stage_layers": 6},
            ["trainer.first_stage_layers = 6 of num_hidden_layers = 28", "22 layers", "3 other"],
        ),
        (
            28,
            {"pipeline_parallel": 2, "first_stage_layers": 14, "last_stage_layers": 13},
            ["first_stage_layers = 14 and trainer.last_stage_layers = 13", "1 layers are left"],
        ),
        (4, {"pipeline_parallel": 2, "first_stage_layers": 4}, ["0 layers are left for the 1"]),
        (4, {"pipeline_parallel": 3, "last_stage_layers": 9}, ["-5 layers are left"]),
    ],
)
def test_a_split_that_cannot_be_names_its_keys(
    num_layers: int, split: dict[str, int], parts: list[str]
) -> None:
    message = refusal(num_layers, **split)
    for part in parts:
        assert part in message
