"""The optimizer as ranks run it, on gradients that a test sets."""

from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.probes import build, train
from tests.support.trainer.ranks import Ranks, settings_for

LR = 0.5


def _step_without_gradient(rendezvous, settings) -> dict[str, tuple[int, float, float]]:
    """Return each parameter's dimensions, and the factors that one step multiplied it by."""
    import torch

    from megadapo.trainer.update.optimizer import step_if_finite

    rank = build(rendezvous, settings)
    before = {name: one.detach().clone() for name, one in rank.parameters.items()}
    for chunk in rank.chunks:
        chunk.zero_grad_buffer()
    assert step_if_finite(rank.optimizer, loss=0.0, lr=LR) == 0.0
    factors = {}
    for name, after in rank.parameters.items():
        used = before[name] != 0
        ratio = torch.unique((after.detach()[used] / before[name][used]).double())
        factors[name] = (after.dim(), ratio.min().item(), ratio.max().item())
    return factors


@pytest.mark.parametrize("layout", [{}, {"data": 2}, {"tensor": 2}])
def test_norms_and_biases_have_no_weight_decay(ranks: Ranks, models: Path, layout: dict) -> None:
    """megatron-core only marks them; without its scheduler they would shrink at every update."""
    settings = settings_for(str(models / "qwen2-tied"), lr=LR, **layout)
    for factors in ranks.run(settings.trainer.num_ranks, _step_without_gradient, settings):
        assert {dim for dim, *_ in factors.values()} == {1, 2}
        assert any(name.endswith("bias") for name in factors)
        for name, (dim, least, largest) in factors.items():
            expected = 1.0 if dim == 1 else 1.0 - LR * settings.trainer.optimizer.weight_decay
            bound = 0.0 if dim == 1 else 1e-6
            assert least == pytest.approx(expected, abs=bound), name
            assert largest == pytest.approx(expected, abs=bound), name


def _train_with_fused_adam(rendezvous, settings, batch, num_steps, **how):
    """Train as `train` does, with Transformer Engine's optimizer and NaN in fresh memory."""
    import torch

    from tests.support.trainer.te_stand_in import FusedAdam

    optimizer, distributed = "megatron.core.optimizer", "megatron.core.optimizer.distrib_optimizer"
    choice = {"Adam": FusedAdam, "HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True}
    with (
        mock.patch.multiple(optimizer, Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False),
        mock.patch.multiple(distributed, **choice),
    ):
        torch.use_deterministic_algorithms(True)
        try:
            return train(rendezvous, settings, batch, num_steps, **how)
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_adam_trains_like_torch(ranks: Ranks, tmp_path: Path, dtype: str) -> None:
    """Catches moments in uninitialized memory, and a resumed run that counts updates from 0."""
    batch, found = random_batch(RAGGED), []
    for function in (train, _train_with_fused_adam):
        state = tmp_path / function.__name__
        first = partial(function, save=state)
        then = partial(function, load=state, first_step=3)
        found.append(
            [
                ranks.on("qwen2-tied", part, batch, num_steps, dtype=dtype)[0][1]
                for part, num_steps in ((first, 2), (then, 1))
            ]
        )
    for own, of_te in zip(*found, strict=True):
        for name, weight in own.items():
            assert (of_te[name] == weight).all(), name
