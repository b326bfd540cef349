"""The policy head over 1, 2, 4 and 8 gloo ranks: equal bits, and slices of one gradient."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megadapo.algorithm.objective import PolicyObjective
from megadapo.kernels.policy_head import policy_head_loss, token_logprobs
from megadapo.kernels.policy_head.tiling import plan_shards
from tests.support.trainer.head_cases import HeadCase, make_case, relative_error
from tests.support.weights.ranks import run_ranks

TP_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Setting:
    """One set of options of the head; all of them run at every TP size."""

    num_tokens: int = 104
    hidden_size: int = 40
    vocab_size: int = 957
    padded: int = 1024
    dtype: torch.dtype = torch.float32
    masked: float = 0.4
    chunk_tokens: int = 64
    objective: PolicyObjective = PolicyObjective()
    sequence_parallel: bool = False
    tp_invariant: bool = True

    def case(self) -> HeadCase:
        """Return the call, the same on every rank and for every TP size."""
        case = make_case(
            self.num_tokens,
            self.hidden_size,
            self.vocab_size,
            padded=self.padded,
            dtype=self.dtype,
            masked=self.masked,
            objective=self.objective,
            temperature=0.9,
            extras=True,
        )
        if self.masked == 0.5:
            # a rank whose part of the sequence has no response token at all
            case.loss_weights[: self.num_tokens // 2] = 0.0
        return case


SETTINGS = {
    "plain": Setting(),
    "entropy_and_kl": Setting(objective=PolicyObjective(entropy_coef=0.1, kl_coef=0.2)),
    "all_rows": Setting(masked=0.0),
    "one_token": Setting(num_tokens=8, masked=0.97),
    "bf16": Setting(dtype=torch.bfloat16, hidden_size=64, num_tokens=160),
    "sequence_parallel": Setting(sequence_parallel=True),
    "sequence_parallel_all_rows": Setting(sequence_parallel=True, masked=0.0, chunk_tokens=24),
    "sequence_parallel_empty_rank": Setting(sequence_parallel=True, masked=0.5),
    "no_rows": Setting(masked=1.1),
    "sequence_parallel_no_rows": Setting(masked=1.1, sequence_parallel=True),
    # too small to be cut in 8 shards at every TP size
    "not_invariant": Setting(vocab_size=250, padded=256),
    "one_product": Setting(tp_invariant=False),
}
NOT_INVARIANT = ("not_invariant", "one_product")


def run_rank(
    setting: Setting, process_group: dist.ProcessGroup, rank: int, tp: int
) -> dict[str, Tensor]:
    case = setting.case()
    weight = case.weight.chunk(tp)[rank].clone().requires_grad_()
    hidden = case.hidden.chunk(tp)[rank] if setting.sequence_parallel else case.hidden
    hidden = hidden.clone().requires_grad_()
    options = {
        "process_group": process_group,
        "chunk_tokens": setting.chunk_tokens,
        "sequence_parallel": setting.sequence_parallel,
        "tp_invariant": setting.tp_invariant,
    }
    output = policy_head_loss(hidden, weight, case.targets, **case.kwargs, **options)
    (output.loss * 2.0).backward()
    result = {name: value.detach() for name, value in vars(output).items()}
    result |= {"d_hidden": hidden.grad, "d_weight": weight.grad}

    hidden.grad = weight.grad = None
    options |= {name: case.kwargs[name] for name in ("temperature", "vocab_size")}
    rows = case.loss_weights.nonzero()[:, 0]
    logprobs, entropy, _ = token_logprobs(hidden, weight, case.targets, rows=rows, **options)
    (logprobs * case.kwargs["advantages"] + 0.1 * entropy).sum().backward()
    result |= {"old": logprobs.detach(), "r_d_hidden": hidden.grad, "r_d_weight": weight.grad}
    return result


def run_process(rank: int, folder: Path) -> None:
    for tp in TP_SIZES:
        # not the first ranks of the world, so that group and global ranks differ
        members = list(range(max(TP_SIZES) - tp, max(TP_SIZES)))
        process_group = dist.new_group(members)
        if rank in members:
            me = members.index(rank)
            results = {name: run_rank(s, process_group, me, tp) for name, s in SETTINGS.items()}
            torch.save(results, folder / f"tp{tp}_rank{me}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict]:
    """results[tp][rank][setting], from one start of eight processes."""
    folder = tmp_path_factory.mktemp("policy_head_tp")
    run_ranks(run_process, max(TP_SIZES), folder, folder)
    yield {
        tp: [torch.load(folder / f"tp{tp}_rank{rank}.pt") for rank in range(tp)] for tp in TP_SIZES
    }


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in NOT_INVARIANT])
def test_values_are_bitwise_equal_for_every_tp_size(results, name):
    expected = results[1][0][name]
    values = [value for value in expected if value != "old" and "d_" not in value[:4]]
    for tp in TP_SIZES:
        for rank in range(tp):
            got = results[tp][rank][name]
            for value in values:
                assert torch.equal(got[value], expected[value]), (tp, rank, value)
            assert torch.equal(got["old"], expected["logprobs"]), (tp, rank)


@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize("tp", TP_SIZES[1:])
def test_gradients_are_slices_of_the_whole(results, name, tp):
    """d_hidden is summed over the group once; d_weight is the shard's own."""
    expected, setting = results[1][0][name], SETTINGS[name]
    tolerance = 2e-6 if setting.dtype == torch.float32 else 6e-3
    for prefix in ("", "r_"):
        parts = [results[tp][rank][name][prefix + "d_weight"] for rank in range(tp)]
        assert relative_error(torch.cat(parts), expected[prefix + "d_weight"]) <= tolerance
        hidden = [results[tp][rank][name][prefix + "d_hidden"] for rank in range(tp)]
        if setting.sequence_parallel:
            hidden = [torch.cat(hidden)]
        for got in hidden:
            assert relative_error(got, expected[prefix + "d_hidden"]) <= tolerance


@pytest.mark.parametrize("name", NOT_INVARIANT)
def test_other_shards_agree_up_to_rounding_and_with_old_logprobs_exactly(results, name):
    expected = results[1][0][name]
    for tp in TP_SIZES:
        got = results[tp][0][name]
        for value in ("loss", "logprobs", "entropy"):
            torch.testing.assert_close(got[value], expected[value], rtol=1e-6, atol=2e-6)
        assert torch.equal(got["old"], got["logprobs"]), tp


def test_one_product_is_what_a_rank_computes_without_invariance(results):
    """Eight products that fill a GPU less would still be right, and 2 % slower."""
    whole = plan_shards(torch.empty(1024, 1), None, None, False)
    assert (whole.num_local, whole.size) == (1, 1024)
    assert plan_shards(torch.empty(1024, 1), None, None, True).num_local == 8
    assert not torch.equal(results[1][0]["plain"]["loss"], results[1][0]["one_product"]["loss"])
