"""The policy head against fp64; test_triton_interpreter.py runs most of these tests again."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megadapo.algorithm.objective import PolicyObjective
from megadapo.kernels.policy_head import policy_head_loss, token_logprobs
from megadapo.kernels.policy_head.head import token_logprobs_definition
from tests.support.trainer.head_cases import (
    HeadCase,
    check_head,
    loss_error,
    make_case,
    relative_error,
)

LOSS_TOLERANCE = 1e-6
GRAD_TOLERANCE = 2e-6
EVERYTHING = PolicyObjective(dual_clip=3.0, entropy_coef=0.02, kl_coef=0.1)


def check_fp32(case: HeadCase, **options) -> None:
    got, expected = check_head(case, logprobs=4e-6, **options)
    assert (got.output.entropy - expected.entropy).abs().max() <= 4e-6
    assert (got.output.distance - expected.distance).abs().max() <= 1e-6


@pytest.mark.parametrize("kind", ["random", "peaked", "negative"])
@pytest.mark.parametrize("num_tokens", [1, 2, 63, 130])
def test_matches_fp64(num_tokens, kind):
    check_fp32(make_case(num_tokens, 40, 1000, padded=1024, kind=kind), chunk_tokens=64)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("kl_kind", ["k1", "k2", "k3"])
def test_every_option_matches_fp64(kl_kind, temperature):
    objective = PolicyObjective(dual_clip=1.5, entropy_coef=0.02, kl_coef=0.1, kl_value=kl_kind)
    case = make_case(
        70, 24, 500, padded=504, temperature=temperature, objective=objective, extras=True
    )
    case.kwargs["logprobs_old"][::7] -= 1.0
    check_fp32(case, chunk_tokens=64)
    assert case.run().output.dual_clip_count > 0


@pytest.mark.parametrize(
    "options",
    [
        {"gate": "weight", "weight_max": 1.2, "entropy_coef": 0.02},
        {"gate": "none", "kl_coef": 0.1, "kl_gradient": "corrected-k3"},
    ],
)
def test_gate_beside_entropy_or_kl_matches_fp64(options):
    objective = PolicyObjective(**options)
    check_fp32(make_case(70, 24, 500, padded=504, objective=objective, extras=True))


@pytest.mark.parametrize("kind", ["random", "peaked", "negative"])
@pytest.mark.parametrize("vocab_size, padded", [(129_920, 129_920), (151_669, 151_680)])
def test_large_vocabularies(vocab_size, padded, kind):
    """The vocabularies where padded columns entered a baseline's log-sum-exp."""
    check_fp32(make_case(17, 32, vocab_size, padded=padded, kind=kind))


@pytest.mark.parametrize("num_tokens, vocab_size", [(4099, 320), (33, 1021)])
def test_many_tokens_and_vocabulary_not_divisible_by_eight(num_tokens, vocab_size):
    check_fp32(make_case(num_tokens, 16, vocab_size), chunk_tokens=512)


@pytest.mark.parametrize("padded", [2048, 2001], ids=["8 shards", "1 shard"])
def test_bf16_gradients_and_clip_counts(padded):
    """Logits rounded to bf16 would be wrong by 1e-2 and flip clip decisions."""
    case = make_case(200, 128, 2000, padded=padded, dtype=torch.bfloat16)
    got, _ = check_head(case, chunk_tokens=128)
    assert got.output.clip_low_count + got.output.clip_high_count > 0


def test_padded_vocabulary_never_enters():
    case = make_case(20, 16, 600, padded=640, objective=EVERYTHING, extras=True)
    expected = case.run()
    case.weight[600:] = 1e4
    got = case.run()
    got.assert_equal(expected)
    assert got.d_weight[600:].abs().max() == 0


def test_whole_shards_of_padding():
    """With 8 virtual shards of 100 columns, the last three hold no real one."""
    check_fp32(make_case(40, 16, 450, padded=800, objective=EVERYTHING, extras=True))


def test_masked_rows_never_enter():
    case = make_case(60, 16, 200)
    expected = case.run()
    masked = case.loss_weights == 0
    case.hidden[masked] = float("nan")
    case.targets[masked] = -100
    case.kwargs["advantages"][masked] = float("nan")
    got = case.run()
    got.assert_equal(expected)
    assert got.d_hidden[masked].abs().max() == 0
    assert got.output.logprobs[masked].abs().max() == 0
    assert got.output.num_tokens == (~masked).sum()


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_no_token_with_a_loss_weight(num_tokens):
    got = make_case(num_tokens, 16, 200, masked=1.1).run()
    output = got.output
    assert output.loss == 0 and output.num_tokens == 0 and output.ratio_max_error == 0
    assert output.ratio_sum == 0 and output.clip_low_count == 0
    assert got.d_hidden.shape == (num_tokens, 16) and not got.d_hidden.any()
    assert got.d_weight.shape == (200, 16) and not got.d_weight.any()


@pytest.mark.parametrize("name", ["logprobs_old", "importance_weights", "logprobs_ref"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_token_is_dropped(name, value):
    case = make_case(40, 16, 200, masked=0.0, objective=EVERYTHING, extras=True)
    case.kwargs[name][[3, 17]] = value
    got = case.run()
    case.kwargs["loss_weights"][[3, 17]] = 0.0
    case.kwargs[name][[3, 17]] = 0.0
    expected = case.definition()
    assert got.output.num_dropped == 2 and got.output.num_tokens == 38
    assert loss_error(got.output.loss, case, expected) <= LOSS_TOLERANCE
    got.assert_gradients(expected, GRAD_TOLERANCE)
    without = case.run().output
    for total in ("ratio_sum", "entropy_sum", "probability_sum", "clip_low_count"):
        torch.testing.assert_close(
            getattr(got.output, total), getattr(without, total), rtol=1e-6, atol=1e-6
        )


def test_non_finite_hidden_state_reaches_the_loss():
    """A NaN must not be hidden by a clamp: the trainer skips the update because it sees it."""
    case = make_case(20, 16, 200, masked=0.0)
    case.hidden[4, 2] = float("nan")
    assert case.run().output.loss.isnan()


@pytest.mark.parametrize("scale", [1.0, 3.5, -2.0, 0.0])
def test_any_upstream_scale(scale):
    case = make_case(50, 16, 200)
    got, expected = case.run(scale), case.definition(scale)
    got.assert_gradients(expected, GRAD_TOLERANCE)


def test_sums_match_tokens_and_add_over_micro_batches():
    case = make_case(90, 16, 200, objective=EVERYTHING, extras=True)
    whole, expected = case.run().output, case.definition()
    chosen = case.loss_weights != 0
    ratio = (expected.logprobs - case.kwargs["logprobs_old"])[chosen].exp()
    torch.testing.assert_close(whole.ratio_sum, ratio.sum(), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        whole.ratio_max_error.double(), (ratio - 1).abs().max(), rtol=1e-4, atol=0
    )
    torch.testing.assert_close(whole.entropy_sum, expected.entropy.sum(), rtol=1e-5, atol=0)
    probability = expected.logprobs[chosen].exp().sum()
    torch.testing.assert_close(whole.probability_sum, probability, rtol=1e-5, atol=0)
    parts = [_part(case, slice(0, 37)).run().output, _part(case, slice(37, 90)).run().output]
    for name in ("loss", "ratio_sum", "entropy_sum", "num_tokens", "clip_low_count"):
        total = sum(getattr(part, name) for part in parts)
        torch.testing.assert_close(total, getattr(whole, name), rtol=1e-6, atol=1e-7)


def _part(case: HeadCase, rows: slice) -> HeadCase:
    kwargs = {
        name: value[rows] if isinstance(value, torch.Tensor) else value
        for name, value in case.kwargs.items()
    }
    return HeadCase(case.hidden[rows], case.weight, case.targets[rows], kwargs)


def test_same_bits_on_every_run():
    case = make_case(80, 32, 512, objective=EVERYTHING, extras=True)
    case.run().assert_equal(case.run())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_first_ratio_is_exactly_one(dtype):
    case = make_case(48, 32, 512, dtype=dtype, temperature=0.9)
    old, entropy, _ = token_logprobs(
        case.hidden,
        case.weight,
        case.targets,
        temperature=0.9,
        vocab_size=512,
        rows=case.loss_weights.nonzero()[:, 0],
        chunk_tokens=32,
    )
    case.kwargs["logprobs_old"] = old
    output = case.run(chunk_tokens=32).output
    assert output.ratio_max_error == 0.0
    assert torch.equal(output.entropy, entropy)


def test_given_rows_change_no_bit():
    case = make_case(60, 16, 200)
    expected = case.run()
    rows = case.loss_weights.nonzero()[:, 0]
    for check in (True, False):
        got = case.run(rows=rows, check_inputs=check)
        got.assert_equal(expected)
        assert torch.equal(got.output.logprobs, expected.output.logprobs)


def test_rows_without_a_loss_weight_are_not_counted():
    """A trainer computes all response tokens, of which overlong filtering masks some."""
    case = make_case(60, 16, 200)
    expected = case.run().output
    got = case.run(rows=torch.arange(60)).output
    assert got.num_tokens == expected.num_tokens
    assert loss_error(got.loss, case, case.definition()) <= LOSS_TOLERANCE
    for name in ("ratio_sum", "entropy_sum", "clip_low_count", "clip_high_count"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=1e-6, atol=0)
    torch.testing.assert_close(got.ratio_max_error, expected.ratio_max_error, rtol=1e-5, atol=0)


def test_token_logprobs_gradient_of_any_objective():
    """A sequence-level ratio, which needs all log-probs of a response before its loss."""
    case = make_case(96, 24, 500, padded=504, temperature=0.8)
    old = case.kwargs["logprobs_old"]

    def objective(logprobs: torch.Tensor, entropy: torch.Tensor, *_) -> torch.Tensor:
        ratio = (logprobs - old).view(4, 24).mean(1).exp()
        return (ratio * torch.tensor([1.0, -0.5, 2.0, 0.3])).sum() - 0.1 * entropy.sum()

    grads = []
    for double in (False, True):
        dtype = torch.float64 if double else torch.float32
        hidden = case.hidden.to(dtype, copy=True).requires_grad_()
        weight = case.weight.to(dtype, copy=True).requires_grad_()
        head = token_logprobs_definition if double else token_logprobs
        options = {} if double else {"chunk_tokens": 64}
        values = head(hidden, weight, case.targets, temperature=0.8, vocab_size=500, **options)
        objective(*values).backward()
        grads.append((hidden.grad, weight.grad))
    assert relative_error(grads[0][0], grads[1][0]) <= GRAD_TOLERANCE
    assert relative_error(grads[0][1], grads[1][1]) <= GRAD_TOLERANCE
    assert not grads[0][1][500:].any()


class _LargestTensor(TorchDispatchMode):
    """Recorder of the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_of_tokens_times_vocabulary(dtype):
    case = make_case(512, 16, 512, dtype=dtype, masked=0.0)
    hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()
    with _LargestTensor() as largest:
        loss = policy_head_loss(hidden, weight, case.targets, chunk_tokens=64, **case.kwargs).loss
        loss.backward()
        values, entropy, _ = token_logprobs(hidden, weight, case.targets, chunk_tokens=64)
        (values.sum() + entropy.sum()).backward()
    assert largest.numel <= 64 * 512


def test_int32_targets_and_strided_hidden():
    case = make_case(30, 16, 200)
    expected = case.run()
    hidden = torch.stack([case.hidden, case.hidden], dim=1)[:, 0].requires_grad_()
    weight = case.weight.clone().requires_grad_()
    output = policy_head_loss(hidden, weight, case.targets.int(), **case.kwargs)
    assert torch.equal(output.loss, expected.output.loss)


def test_no_gradient_without_requires_grad():
    case = make_case(30, 16, 200)
    with torch.no_grad():
        loss = policy_head_loss(
            case.hidden.clone().requires_grad_(), case.weight, case.targets, **case.kwargs
        ).loss
    assert not loss.requires_grad
    hidden = case.hidden.clone().requires_grad_()
    policy_head_loss(hidden, case.weight, case.targets, **case.kwargs).loss.backward()
    assert relative_error(hidden.grad, case.definition().d_hidden) <= GRAD_TOLERANCE
    assert case.weight.grad is None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": torch.zeros(8, 15)}, "hidden must be"),
        ({"hidden": torch.zeros(8, 16, dtype=torch.float64)}, "must both be"),
        ({"targets": torch.zeros(7, dtype=torch.int64)}, "targets must be"),
        ({"targets": torch.zeros(8)}, "targets must be integers"),
        ({"targets": torch.full((8,), 200)}, "targets has 8 values outside 0..199"),
        ({"targets": torch.full((8,), -1)}, "targets has 8 values outside"),
        ({"advantages": torch.full((8,), float("nan"))}, "advantages has 8 values"),
        ({"loss_weights": torch.full((8,), float("nan"))}, "loss_weights has 8 values"),
        ({"rows": torch.arange(1, 8)}, "loss_weights has 1 tokens that rows leaves out"),
        ({"loss_weights": torch.ones(9)}, "loss_weights must be"),
        ({"logprobs_old": torch.ones(9)}, "logprobs_old must be"),
        ({"importance_weights": torch.ones(9)}, "importance_weights must be"),
        ({"temperature": 0.0}, "temperature must be"),
        ({"vocab_size": 217}, "vocab_size 217"),
        ({"chunk_tokens": 0}, "chunk_tokens must be"),
        ({"objective": PolicyObjective(kl_coef=0.1)}, "logprobs_ref is missing"),
    ],
)
def test_bad_input_is_named(change, message):
    case = make_case(8, 16, 200, padded=216, masked=0.0)
    call = {"hidden": case.hidden, "weight": case.weight, "targets": case.targets}
    with pytest.raises(ValueError, match=message):
        policy_head_loss(**(call | case.kwargs | change))
