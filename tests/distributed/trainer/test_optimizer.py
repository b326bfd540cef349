"""The optimizer as ranks run it, on gradients that a test sets."""

from pathlib import Path

import pytest

from tests.support.trainer.probes import build
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
