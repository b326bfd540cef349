"""Loss and derivative of each token against fp64; in Triton by test_triton_interpreter.py."""

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from megadapo.algorithm.importance import sequence_log_ratios
from megadapo.algorithm.objective import MAX_LOG_RATIO, PolicyObjective
from megadapo.algorithm.reference import token_losses
from megadapo.kernels.launch import uses_triton
from megadapo.kernels.policy_head.terms import (
    CLIPPED_HIGH,
    CLIPPED_LOW,
    DROPPED,
    DUAL_CLIPPED,
    GATES,
    TokenTerms,
    describe_terms,
    policy_terms,
    token_terms,
)
from megadapo.kernels.policy_head.tiles import PolicyInputs

UNCLIPPED = {"clip_low": 1.0 - 1e-10, "clip_high": 1e10}
"""A clip window that contains e^-20 and e^20, so that only the clamp cuts gradients."""
STEPS = (0.125, 0.5, 3.0, 19.5, 20.0, 20.5, 30.0, 200.0)
LOG_RATIOS = (*(-step for step in STEPS), 0.0, *STEPS)
"""exp(200) is infinite in fp32 and exp(-200) is 0."""


@triton.jit
def _terms_kernel(
    LOGPROBS,
    ENTROPY,
    LOGPROBS_OLD,
    ADVANTAGES,
    IMPORTANCE_WEIGHTS,
    PENALTIES,
    LOGPROBS_REF,
    LOSS,
    D_LOGPROBS,
    D_POLICY,
    RATIO,
    FLAGS,
    num_rows,
    numbers,
    SWITCHES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # all rows in one program: the interpreter takes as long for a block as for a number
    row = tl.arange(0, BLOCK)
    inside = row < num_rows
    loss, d_logprob, d_policy, ratio, flags = token_terms(
        logprob=tl.load(LOGPROBS + row, mask=inside),
        entropy=tl.load(ENTROPY + row, mask=inside),
        logprob_old=tl.load(LOGPROBS_OLD + row, mask=inside),
        advantage=tl.load(ADVANTAGES + row, mask=inside),
        importance_weight=tl.load(IMPORTANCE_WEIGHTS + row, mask=inside),
        penalty=tl.load(PENALTIES + row, mask=inside),
        logprob_ref=tl.load(LOGPROBS_REF + row, mask=inside),
        numbers=numbers,
        SWITCHES=SWITCHES,
    )
    tl.store(LOSS + row, loss, mask=inside)
    tl.store(D_LOGPROBS + row, d_logprob, mask=inside)
    tl.store(D_POLICY + row, d_policy, mask=inside)
    tl.store(RATIO + row, ratio, mask=inside)
    tl.store(FLAGS + row, flags.to(tl.uint8), mask=inside)


def make_inputs(log_ratios: tuple[float, ...], ref_gaps: tuple[float, ...]) -> dict[str, Tensor]:
    """Return every combination of log-ratio, KL gap and sign of the advantage."""
    columns = zip(*itertools.product(log_ratios, ref_gaps, (-1.5, 0.0, 0.75)), strict=True)
    ratio, gap, advantages = (torch.tensor(column) for column in columns)
    # multiples of 1/8, so that their differences are exact in fp32
    logprobs = -torch.arange(len(ratio)).remainder(7) * 0.375 - 0.25
    return {
        "logprobs": logprobs,
        "logprobs_old": logprobs - ratio,
        "advantages": advantages,
        "logprobs_ref": logprobs + gap,
        "entropy": torch.linspace(0.0, 5.0, len(ratio)),
        "importance_weights": torch.linspace(0.25, 2.0, len(ratio)),
    }


def terms(values: dict[str, Tensor], objective: PolicyObjective) -> TokenTerms:
    inputs = PolicyInputs(
        loss_weights=torch.ones_like(values["logprobs"]),
        **{k: v for k, v in values.items() if k not in ("logprobs", "entropy")},
    )
    if not uses_triton(values["logprobs"]):
        return policy_terms(values["logprobs"], values["entropy"], inputs, objective)
    switches, numbers = describe_terms(
        objective,
        has_reference=True,
        has_importance_weights=True,
        has_penalties=inputs.penalties is not None,
    )
    loss, d_logprobs, d_policy, ratio = torch.empty(4, len(inputs.advantages)).unbind()
    flags = torch.empty(len(loss), dtype=torch.uint8)
    _terms_kernel[(1,)](
        LOGPROBS=values["logprobs"],
        ENTROPY=values["entropy"],
        LOGPROBS_OLD=inputs.logprobs_old,
        ADVANTAGES=inputs.advantages,
        IMPORTANCE_WEIGHTS=inputs.importance_weights,
        PENALTIES=inputs.advantages if inputs.penalties is None else inputs.penalties,
        LOGPROBS_REF=inputs.logprobs_ref,
        LOSS=loss,
        D_LOGPROBS=d_logprobs,
        D_POLICY=d_policy,
        RATIO=ratio,
        FLAGS=flags,
        num_rows=len(loss),
        numbers=numbers,
        SWITCHES=switches,
        BLOCK=triton.next_power_of_2(len(loss)),
    )
    return TokenTerms(loss=loss, d_logprobs=d_logprobs, d_policy=d_policy, ratio=ratio, flags=flags)


def definition(values: dict[str, Tensor], objective: PolicyObjective) -> tuple[Tensor, Tensor]:
    """Return (loss, d_logprobs) of the definition in fp64."""
    wide = {name: value.double() for name, value in values.items()}
    logprobs = wide.pop("logprobs").requires_grad_()
    losses = token_losses(
        logprobs, wide.pop("logprobs_old"), wide.pop("advantages"), objective=objective, **wide
    )
    losses.sum().backward()
    return losses.detach(), logprobs.grad


def check(values: dict[str, Tensor], objective: PolicyObjective) -> None:
    """Compare element by element, so that a gradient of 2e-9 that must be 0 is found."""
    got = terms(values, objective)
    expected_loss, expected_grad = definition(values, objective)
    assert not (got.flags & DROPPED).any()
    torch.testing.assert_close(got.loss.double(), expected_loss, rtol=4e-6, atol=1e-6)
    torch.testing.assert_close(got.d_logprobs.double(), expected_grad, rtol=4e-6, atol=1e-12)


def test_tokens_of_a_sequence_are_clipped_together():
    """Differences of fp32 log-probs of -20 would put 0.2 % of GSPO's window on both sides."""
    objective = PolicyObjective(ratio="sequence", clip_low=3e-4, clip_high=4e-4)
    values = make_inputs((0.0,) * 20, (0.5,))
    values["logprobs"] = -torch.linspace(0.1, 25.0, 60)
    values["advantages"] = torch.full((60,), 0.75)
    for excess in torch.linspace(-1e-6, 1e-6, 9).tolist():
        old = values["logprobs"] - (math.log1p(4e-4) + excess)
        values["logprobs_old"] = sequence_log_ratios(
            values["logprobs"], old, torch.zeros(60, dtype=torch.int64), num_sequences=1
        )
        got = terms(values, objective)
        assert len(got.ratio.unique()) == len(got.flags.unique()) == 1
        if abs(excess) > 7e-7:
            # nearer than that, the rounding of the ratio decides for the whole sequence
            check(values, objective)


@pytest.mark.parametrize("dual_clip", [None, 3.0, 1e9])
@pytest.mark.parametrize("window", [{}, UNCLIPPED], ids=["clipped", "unclipped"])
def test_policy_term(window, dual_clip):
    """Beyond +-20 the ratio is a constant: a gradient kept there would be e^20 times too large."""
    check(make_inputs(LOG_RATIOS, (0.0,)), PolicyObjective(dual_clip=dual_clip, **window))


GATED = {
    "soft": PolicyObjective(gate="soft", tau_pos=0.7),
    "weight": PolicyObjective(gate="weight", weight_max=5.0),
    "none": PolicyObjective(gate="none"),
    "logprob": PolicyObjective(ratio="none", gate="none"),
}


@pytest.mark.parametrize("gate", list(GATED))
def test_gates(gate):
    """Also where the ratio is 0 or infinite: inf * 0 would be NaN in a gate like SAPO's."""
    assert {"clip", *GATED} == set(GATES)
    check(make_inputs(LOG_RATIOS, (0.0,)), GATED[gate])


def test_bapo_clips_at_its_bounds():
    window = {"clip_low": 0.4, "clip_high": 1.0}
    values = make_inputs(LOG_RATIOS, (0.0,))
    searched = PolicyObjective(gate="bapo").model_copy(update=window)
    got, expected = terms(values, searched), terms(values, PolicyObjective(**window))
    assert torch.equal(got.d_logprobs, expected.d_logprobs) and got.flags.any()
    check(values, searched)


def test_penalty_of_chosen_tokens():
    """At the old log-prob it has no gradient, beyond +-20 it is a constant."""
    values = make_inputs(LOG_RATIOS, (0.0,))
    values["penalties"] = torch.tensor([0.0, 0.5, 2.0]).repeat(len(values["logprobs"]))[::3].clone()
    objective = PolicyObjective(gate="kl_cov", entropy_coef=0.02)
    check(values, objective)
    without = {name: value for name, value in values.items() if name != "penalties"}
    changed = terms(values, objective).loss != terms(without, objective).loss
    log_ratios = values["logprobs"] - values["logprobs_old"]
    assert torch.equal(changed, (values["penalties"] * log_ratios) != 0)


ESTIMATORS = ("k1", "k2", "k3", "corrected-k3")


@pytest.mark.parametrize(
    ("value", "gradient"), zip(ESTIMATORS, (*ESTIMATORS[1:], ESTIMATORS[0]), strict=True)
)
def test_kl_and_entropy_terms(value, gradient):
    """Each estimator's value and derivative alone; a far reference is clamped, without gradient."""
    objective = PolicyObjective(
        kl_coef=0.1, kl_value=value, kl_gradient=gradient, entropy_coef=0.02
    )
    values = make_inputs((-30.0, -0.5, 0.0, 0.125), LOG_RATIOS)
    values["advantages"] = torch.zeros_like(values["advantages"])
    check(values, objective)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_kl_of_the_old_policy(kl_coef):
    """Alone and beside the reference's; a ratio at the clamp has no gradient."""
    values = make_inputs(LOG_RATIOS, (-0.5, 0.125))
    values["advantages"] = torch.zeros_like(values["advantages"])
    check(values, PolicyObjective(gate="none", old_kl_coef=0.3, kl_coef=kl_coef))


def test_corrected_k3_gradient_without_cancellation():
    """r k3 + r (1 - e^gap) is r times the distance: summed up in fp32, e^20 would eat it."""
    objective = PolicyObjective(kl_coef=1.0, kl_gradient="corrected-k3")
    values = make_inputs((0.0,), (19.5,))
    values["advantages"] = torch.zeros_like(values["advantages"])
    assert torch.equal(terms(values, objective).d_logprobs, -19.5 * values["importance_weights"])


def test_kl_in_reward_is_not_in_loss():
    values = make_inputs((0.125,), (0.5,))
    got = terms(values, PolicyObjective(kl_coef=0.1, kl_in="reward", kl_value="k1"))
    expected = terms(values, PolicyObjective())
    assert torch.equal(got.loss, expected.loss) and torch.equal(got.d_logprobs, expected.d_logprobs)


def test_ratio_and_gradient_without_kl_are_reported_as_defined():
    """A wrong report would leave the training correct and its curves wrong."""
    values = make_inputs((-30.0, -20.0, 0.125, 20.5), (-30.0, -0.5, 0.0, 0.5))
    got = terms(values, PolicyObjective(kl_coef=0.1))
    without = terms(values, PolicyObjective())
    assert torch.equal(got.d_policy, without.d_logprobs)
    assert not torch.equal(got.d_policy, got.d_logprobs)
    log_ratio = (values["logprobs"] - values["logprobs_old"]).double()
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    torch.testing.assert_close(got.ratio.double(), ratio, rtol=4e-6, atol=0.0)


def test_flags_have_the_clipped_side():
    values = make_inputs((-3.0, -0.125, 0.125, 0.5, 3.0), (0.0,))
    negative = (CLIPPED_LOW, 0, 0, 0, DUAL_CLIPPED)
    positive = (0, 0, 0, CLIPPED_HIGH, CLIPPED_HIGH)
    expected = [
        flag for low, high in zip(negative, positive, strict=True) for flag in (low, 0, high)
    ]
    assert terms(values, PolicyObjective(dual_clip=3.0)).flags.tolist() == expected
    without = [0 if flag == DUAL_CLIPPED else flag for flag in expected]
    assert terms(values, PolicyObjective()).flags.tolist() == without


def test_zero_width_window_keeps_first_gradient():
    """Every first ratio is 1, the window's edge: a cut there would prevent all learning."""
    values = make_inputs((0.0,), (0.0,))
    got = terms(values, PolicyObjective(clip_low=0.0, clip_high=0.0))
    assert not got.flags.any()
    assert torch.equal(got.d_logprobs, -values["advantages"] * values["importance_weights"])


def test_ratio_at_dual_clip_is_not_clipped():
    """At the window's edges: a bound that counts itself would count one token more."""
    values = make_inputs((1.125,), (0.0,))
    bound = terms(values, PolicyObjective()).ratio[0].item()
    at_bound = terms(values, PolicyObjective(dual_clip=bound))
    assert at_bound.flags[0] == 0 and at_bound.d_logprobs[0] != 0.0
    assert terms(values, PolicyObjective(dual_clip=bound - 0.125)).flags[0] == DUAL_CLIPPED


@pytest.mark.parametrize("gate", ["clip", *GATED])
@pytest.mark.parametrize("name", ["logprobs_old", "importance_weights", "logprobs_ref"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_token_without_finite_inputs_is_dropped(name, value, gate):
    objective = GATED.get(gate, PolicyObjective(dual_clip=3.0))
    objective = objective.model_copy(update={"kl_coef": 0.1, "entropy_coef": 0.02})
    values = make_inputs((-0.5, 0.125, 3.0), (0.25,))
    whole = terms(values, objective)
    values[name][4] = value
    got = terms(values, objective)
    assert (got.flags == DROPPED).tolist() == [row == 4 for row in range(9)]
    for part in ("loss", "d_logprobs", "d_policy", "ratio"):
        expected = getattr(whole, part).clone()
        expected[4] = 0.0
        assert torch.equal(getattr(got, part), expected)


def test_terms_without_reference_and_importance_weights():
    """A reference that agrees and weights of 1, in fp32 and uint8."""
    values = make_inputs(LOG_RATIOS, (0.0,))
    values["importance_weights"] = torch.ones_like(values["importance_weights"])
    objective = PolicyObjective(kl_coef=0.1, entropy_coef=0.02)
    inputs = PolicyInputs(
        logprobs_old=values["logprobs_old"],
        advantages=values["advantages"],
        loss_weights=torch.ones_like(values["logprobs"]),
        logprobs_ref=None,
        importance_weights=None,
    )
    got = policy_terms(values["logprobs"], values["entropy"], inputs, objective)
    expected = terms(values, objective)
    for name, value in vars(got).items():
        assert value.dtype == (torch.uint8 if name == "flags" else torch.float32)
        torch.testing.assert_close(value, getattr(expected, name), rtol=4e-6, atol=1e-6)
    switches, _ = describe_terms(objective, has_reference=False, has_importance_weights=False)
    assert (switches.kl_value, switches.kl_gradient) == ("none", "none")
