"""Every gate with every ratio where ratios are 0 or infinite and sequences are masked or empty.

exp(200) is infinite in fp32: times a gate that has closed it would be NaN, and reach every weight.
Triton's form runs in test_triton_interpreter.py.
"""

import pytest
import torch
from torch import Tensor

from megadapo.algorithm.importance import sequence_log_ratios
from megadapo.algorithm.objective import PolicyObjective
from megadapo.kernels.policy_head import token_logprobs
from megadapo.kernels.policy_head.terms import policy_terms
from megadapo.kernels.policy_head.tiles import PolicyInputs
from tests.support.trainer.head_cases import HeadCase, HeadResult, loss_error, make_case

GATES = {
    "clip": {},
    "dual-clip": {"dual_clip": 3.0},
    "bapo": {"gate": "bapo"},
    "soft": {"gate": "soft"},
    "weight": {"gate": "weight", "weight_max": 5.0},
    "none": {"gate": "none"},
}
OBJECTIVES = {
    **{f"token-{name}": PolicyObjective(**gate) for name, gate in GATES.items()},
    **{
        f"sequence-{name}": PolicyObjective(ratio="sequence", **gate)
        for name, gate in GATES.items()
        if name != "bapo"
    },
    "no-ratio": PolicyObjective(ratio="none", gate="none"),
    "corrected-kl": PolicyObjective(kl_coef=0.1, kl_value="k3", kl_gradient="corrected-k3"),
    "entropy": PolicyObjective(entropy_coef=0.02),
}
EDGES = torch.tensor([0, 3, 3, 5, 7, 8, 10, 12])
"""Seven sequences: usual, empty, masked, ratio 0, one token, ratio infinite, usual."""
MASKED, RATIO_0, RATIO_INFINITE = slice(3, 5), slice(5, 7), slice(8, 10)


def edge_case(objective: PolicyObjective) -> HeadCase:
    case = make_case(12, 8, 61, padded=64, masked=0.0, objective=objective, extras=True)
    case.loss_weights[MASKED] = 0.0
    case.kwargs["logprobs_old"][RATIO_0] += 200.0
    case.kwargs["logprobs_old"][RATIO_INFINITE] -= 200.0
    case.kwargs["logprobs_ref"][1] += 200.0
    case.kwargs["logprobs_ref"][2] -= 200.0
    return case


def run(case: HeadCase) -> HeadResult:
    """Run the head as the trainer does: give it the ratios of sequences."""
    if case.kwargs["objective"].ratio == "sequence":
        rows = case.loss_weights.nonzero()[:, 0]
        with torch.no_grad():
            logprobs, *_ = token_logprobs(
                case.hidden, case.weight, case.targets, vocab_size=61, rows=rows
            )
        sequences = torch.repeat_interleave(EDGES.diff())
        old = case.kwargs["logprobs_old"] = case.kwargs["logprobs_old"].clone()
        old[rows] = sequence_log_ratios(logprobs[rows], old[rows], sequences[rows], num_sequences=7)
    return case.run()


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_ratios_of_0_and_infinity(name, passes):
    """A ratio of e^200 counts as e^20 without a gradient; the tokens beside it keep theirs."""
    case = edge_case(OBJECTIVES[name])
    expected = case.definition(cu_seqlens=EDGES)
    got = run(case)
    assert loss_error(got.output.loss, case, expected) <= 1e-6
    got.assert_gradients(expected, 2e-6)
    assert got.output.num_dropped == 0 and got.output.num_tokens == 10
    assert not got.d_hidden[MASKED].any() and got.d_hidden[:3].any() and got.d_hidden[10:].any()


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_only_masked_sequences(name, passes):
    case = edge_case(OBJECTIVES[name])
    case.loss_weights[:] = 0.0
    case.kwargs["logprobs_old"][::3] = float("nan")
    got = run(case)
    assert got.output.loss == 0 and got.output.num_tokens == 0 and got.output.ratio_sum == 0
    assert not got.d_hidden.any() and not got.d_weight.any()


def derivative_of_sequence(log_ratio: float) -> Tensor:
    """The gradient of s_i, in each of a sequence's tokens, in fp32."""
    logprobs, ones = -torch.arange(1.0, 9.0) / 7.0, torch.ones(8)
    ratios = sequence_log_ratios(
        logprobs, logprobs - log_ratio, torch.zeros(8, dtype=torch.int64), num_sequences=1
    )
    inputs = PolicyInputs(
        logprobs_old=ratios,
        advantages=-ones,
        loss_weights=ones,
        logprobs_ref=None,
        importance_weights=None,
    )
    objective = PolicyObjective(ratio="sequence", gate="none")
    return policy_terms(logprobs, 0 * ones, inputs, objective).d_logprobs


@pytest.mark.parametrize("log_ratio", [-200.0, -20.5, 20.5, 200.0])
def test_clamped_sequence_has_no_gradient(log_ratio):
    """Its mean is the clamp's edge, which must not count as inside."""
    assert not derivative_of_sequence(log_ratio).any()
    inside = derivative_of_sequence(19.5)
    torch.testing.assert_close(inside, torch.full((8,), 19.5).exp(), rtol=1e-5, atol=0.0)
