"""Would catch: a share that counts clipped tokens, forgets a weight, or lets the KL term in."""

import pytest
import torch

from megadapo.algorithm.objective import PolicyObjective
from megadapo.algorithm.reference import token_losses
from megadapo.kernels.policy_head.tiles import PolicyInputs
from megadapo.trainer.update.metrics import gradient_sizes

OBJECTIVES = {
    "dapo": PolicyObjective(),
    "dual clip": PolicyObjective(dual_clip=1.5),
    "soft": PolicyObjective(gate="soft"),
    "weight": PolicyObjective(gate="weight", weight_max=1.2),
    "reinforce": PolicyObjective(ratio="none", gate="none"),
    "with more terms": PolicyObjective(kl_coef=0.5, entropy_coef=0.1),
}


def inputs(**changes: torch.Tensor | None) -> tuple[torch.Tensor, PolicyInputs]:
    old = torch.tensor([-1.0, -2.0, -0.5, -0.7, -1.5, -3.0])
    ratios = torch.tensor([1.0, 1.5, 1.1, 0.5, 0.9, 2.0])
    given = {
        "logprobs_old": old,
        "advantages": torch.tensor([1.0, 0.5, 2.0, -1.0, -0.5, -2.0]),
        "loss_weights": torch.tensor([0.1, 0.2, 0.3, 0.1, 0.2, 0.1]),
        "logprobs_ref": None,
        "importance_weights": torch.tensor([1.0, 1.0, 0.5, 1.0, 1.0, 0.0]),
    }
    return old + ratios.log(), PolicyInputs(**(given | changes))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_sizes_are_those_of_autograd(name):
    """It is the policy term's: the definition is computed without KL divergence and entropy."""
    logprobs, given = inputs(logprobs_ref=torch.full((6,), -1.0))
    objective = OBJECTIVES[name]
    asked = logprobs.clone().requires_grad_()
    losses = token_losses(
        asked,
        given.logprobs_old,
        given.advantages,
        objective=objective.model_copy(update={"kl_coef": 0.0, "entropy_coef": 0.0}),
        importance_weights=given.importance_weights,
    )
    (given.loss_weights * losses).sum().backward()
    assert asked.grad is not None
    sizes = asked.grad.abs()
    positive, total = gradient_sizes(logprobs, given, objective)
    assert total == pytest.approx(sizes.sum().item(), rel=1e-5)
    assert positive == pytest.approx(sizes[given.advantages > 0].sum().item(), rel=1e-5)


def test_clipped_and_dropped_tokens_have_no_gradient():
    logprobs, given = inputs(importance_weights=None)
    positive, total = gradient_sizes(logprobs, given, PolicyObjective())
    # the second is clipped above, the fourth below
    assert positive == pytest.approx(0.1 * 1.0 + 0.3 * 1.1 * 2.0, rel=1e-5)
    assert total - positive == pytest.approx(0.2 * 0.9 * 0.5 + 0.1 * 2.0 * 2.0, rel=1e-5)
    lost = torch.full((6,), float("nan"))
    assert gradient_sizes(logprobs, inputs(logprobs_old=lost)[1], PolicyObjective()) == (0.0, 0.0)
    nothing = inputs()[1].map(lambda values: values[:0])
    assert gradient_sizes(logprobs[:0], nothing, PolicyObjective()) == (0.0, 0.0)
