"""The policy head under Megatron's DistributedDataParallel, which reduces while backward runs."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megadapo.algorithm.objective import PolicyObjective
from megadapo.kernels.policy_head import policy_head_loss
from megadapo.kernels.policy_head.head import policy_head_loss_definition
from tests.support.weights.ranks import run_ranks

NUM_TOKENS, HIDDEN, VOCAB, NUM_MICRO_BATCHES, WORLD = 40, 16, 96, 3, 2


def micro_batch(rank: int, index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + index)
    return {
        "tokens": torch.randint(0, VOCAB, (NUM_TOKENS,), generator=generator),
        "targets": torch.randint(0, VOCAB, (NUM_TOKENS,), generator=generator),
        "logprobs_old": -4.5 + 0.3 * torch.randn(NUM_TOKENS, generator=generator),
        "advantages": torch.randn(NUM_TOKENS, generator=generator),
        "loss_weights": (torch.rand(NUM_TOKENS, generator=generator) > 0.5).float() / NUM_TOKENS,
    }


class TinyModel(torch.nn.Module):
    """Embedding, one layer and a head; if tied, both have one weight."""

    def __init__(self, tied: bool, in_forward: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(0.5 * torch.randn(*shape, generator=generator))

        self.in_forward = in_forward
        self.embedding = parameter(VOCAB, HIDDEN)
        self.layer = parameter(HIDDEN, HIDDEN)
        self.output = self.embedding if tied else parameter(VOCAB, HIDDEN)
        # what Megatron sets on a tied weight whose embedding lies on the same stage
        self.embedding.zero_out_wgrad = tied

    def hidden(self, tokens: Tensor) -> Tensor:
        return torch.tanh(torch.nn.functional.embedding(tokens, self.embedding) @ self.layer)

    def forward(self, tokens: Tensor, targets: Tensor, **inputs: Tensor) -> Tensor:
        return policy_head_loss(
            self.hidden(tokens),
            self.output,
            targets,
            objective=PolicyObjective(),
            accumulate_in_forward=self.in_forward,
            **inputs,
        ).loss


def run_process(rank: int, folder: Path) -> None:
    from megadapo.trainer.model.cpu_platform import install_cpu_platform

    install_cpu_platform()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, calculate_per_token_loss=True
    )
    for tied, overlap, in_forward in itertools.product((False, True), repeat=3):
        settings = DistributedDataParallelConfig(
            overlap_grad_reduce=overlap, grad_reduce_in_fp32=True
        )
        model = DistributedDataParallel(config, settings, TinyModel(tied, in_forward))
        results = []
        for _ in range(2):
            model.zero_grad_buffer()
            train_step(model, rank)
            results.append({n: p.main_grad.clone() for n, p in model.module.named_parameters()})
        torch.save(results, folder / file_name(tied, overlap, in_forward, rank))


def file_name(tied: bool, overlap: bool, in_forward: bool, rank: int) -> str:
    return f"tied{tied}_overlap{overlap}_forward{in_forward}_rank{rank}.pt"


def train_step(model: torch.nn.Module, rank: int) -> None:
    with model.no_sync():
        for index in range(NUM_MICRO_BATCHES - 1):
            model(**micro_batch(rank, index)).backward()
    model(**micro_batch(rank, NUM_MICRO_BATCHES - 1)).backward()
    model.finish_grad_sync()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy_head_ddp")
    run_ranks(run_process, WORLD, folder, folder)
    return folder


def expected_grads(tied: bool) -> dict[str, Tensor]:
    """Return the fp64 gradients of all micro-batches of all ranks, by the definition."""
    model = TinyModel(tied).double()
    for rank in range(WORLD):
        for index in range(NUM_MICRO_BATCHES):
            batch = micro_batch(rank, index)
            batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
            hidden = model.hidden(batch.pop("tokens"))
            policy_head_loss_definition(
                hidden, model.output, batch.pop("targets"), objective=PolicyObjective(), **batch
            ).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("in_forward", [False, True], ids=["in_backward", "in_forward"])
@pytest.mark.parametrize("overlap", [False, True], ids=["after", "overlapped"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_main_grad_is_the_sum_over_micro_batches_and_ranks(folder, tied, overlap, in_forward):
    expected = expected_grads(tied)
    for rank in range(WORLD):
        for step in torch.load(folder / file_name(tied, overlap, in_forward, rank)):
            assert set(step) == set(expected)
            for name, truth in expected.items():
                error = (step[name].double() - truth).norm() / truth.norm()
                assert error <= 2e-6, (name, error)
