"""Weight gradients that go straight into main_grad, as on GPUs with apex, against sums by hooks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megadapo.trainer.types import TrainerSettings
from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.fresh_ranks import Place, with_stand_ins
from tests.support.trainer.ranks import layout, settings_for

pytestmark = pytest.mark.full

TENSORS = layout("tp2-sp")
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor, tied": ("deep-tied", TENSORS),
    "data, overlap": (
        "qwen2-untied",
        layout("dp2-overlap") | {"tokens_per_micro_batch": 96},
    ),
    "recompute, tied": ("deep-tied", TENSORS | {"recompute": "full"}),
    "experts": ("qwen3-moe", TENSORS | {"expert": 2}),
}
"""Model and layout; a rank has several micro-batches of each of two mini-batches."""
CONFIG = "megadapo.trainer.model.model.TransformerConfig"


def _build(place: Place, settings: TrainerSettings, *, is_fused: bool) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megadapo.trainer.rank import TrainerRank
    from tests.support.trainer.te_layers import trainers_as_on_gpus

    def configured(**options):
        return TransformerConfig(**options | {"gradient_accumulation_fusion": is_fused})

    with trainers_as_on_gpus(), mock.patch(CONFIG, configured):
        rank = TrainerRank(settings, *place)
    first = rank.chunks[0].module.decoder.layers[0].self_attention.linear_qkv
    assert first.fuse_wgrad_accumulation == is_fused
    return rank


def _updates(place, settings, *, is_fused: bool) -> tuple[list[bytes], list[str]]:
    """Return the rank's bits after two steps of two updates, and the metrics of each."""
    from tests.support.trainer.probes import state_bits, update

    rank = _build(place, settings, is_fused=is_fused)
    batch = random_batch(RAGGED, num_mini_batches=2)
    metrics = []
    for step in (1, 2):
        metrics.append(repr(update(rank, batch, step=step).metrics))
        rank.leave_to_engines()
        rank.take_gpu()
    rank.offload.load("parameters", "optimizer")
    return state_bits(rank), metrics


def _compare(meet: Callable[[], Place], models: Path) -> dict[str, Any]:
    from megadapo.trainer.model.parallel import leave_groups

    def run(function: Any, model: str, split: dict[str, Any], **how: Any) -> Any:
        found = function(meet(), settings_for(models / model, **split), **how)
        leave_groups()
        return found

    found: dict[str, Any] = {}
    for name, (model, split) in LAYOUTS.items():
        offload = {"offload": ("parameters", "gradients", "optimizer")}
        plain = run(_updates, model, split, is_fused=False)
        fused = run(_updates, model, split, is_fused=True)
        moved = run(_updates, model, split | offload, is_fused=True)
        found[name] = [fused == plain, moved == plain, len(plain[0])]
    return found


@pytest.fixture(scope="module")
def answers(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of both ranks, by layout."""
    return with_stand_ins(_compare, tmp_path_factory.mktemp("answers"), models, apex=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_updates_have_the_same_bits(answers, layout):
    """Catches gradients added twice or never, also after offload; in fp32 both ways sum alike."""
    for answer in answers:
        is_equal, is_equal_offloaded, num_tensors = answer[layout]
        assert num_tensors > 20
        assert is_equal and is_equal_offloaded
