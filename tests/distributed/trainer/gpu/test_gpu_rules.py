"""GPU-only rules of a trainer rank, tested through stand-ins on the CPU."""

import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from megadapo.models.description import describe_model
from megadapo.models.folder import read_hf_config
from tests.support.trainer.batches import RAGGED, random_batch
from tests.support.trainer.probes import build, update
from tests.support.trainer.ranks import settings_for


def _entered_before_any_message(rendezvous, settings) -> dict[str, int]:
    import torch
    from megatron.core import parallel_state as mpu

    from megadapo.trainer.model.parallel import join_groups

    join_groups(rendezvous, settings.trainer, None, seed=0)
    groups = {
        "world": torch.distributed.group.WORLD,
        "stages": mpu.get_pipeline_model_parallel_group(),
        "context": mpu.get_context_parallel_group(),
    }
    return {name: group._get_sequence_number_for_group() for name, group in groups.items()}


def test_every_rank_enters_a_group_before_messages(ranks):
    """Catches NCCL waiting forever for the ranks that have no part in a group's first message."""
    for entered in ranks.on("qwen2-tied", _entered_before_any_message, pipeline=2, context=2):
        assert min(entered.values()) > 0, entered


def _calls_that_release_memory(rendezvous, settings, batch, folder) -> list[str]:
    from megadapo.trainer.trainer import complete_save
    from megadapo.trainer.types import UpdateRequest
    from megadapo.trainer.worker import TrainerWorker

    seen = []
    folder.mkdir()
    with mock.patch("torch.cuda.empty_cache", lambda: seen.append(call)):
        worker = TrainerWorker(rendezvous.rank)
        call = "start"
        worker.start(settings, rendezvous, uses_cuda=False)
        for call, arguments in {
            "update": (UpdateRequest(batch=batch, policy_version=0, step=1),),
            "begin_save": (folder,),
            "load": (folder, {}),
        }.items():
            getattr(worker, call)(*arguments)
            if call == "begin_save":
                while (report := worker.save_report()) is None:
                    time.sleep(0.01)
                complete_save(folder, [report])
    return seen


@pytest.mark.parametrize("shares", [True, False])
def test_long_calls_return_gpu_memory_that_engines_share(ranks, models, tmp_path, shares):
    """Catches engines that do not fit, and needless new allocations in each step elsewhere."""
    settings = replace(settings_for(models / "qwen2-tied"), shares_gpu=shares)
    arguments = (random_batch(RAGGED), tmp_path / "state")
    (seen,) = ranks.run(1, _calls_that_release_memory, settings, *arguments)
    assert seen == (["start", "update", "begin_save", "load"] if shares else [])


def _passes_of_each_mlp(rendezvous, settings, batch) -> list[int]:
    """Return how often each layer's MLP computed in one step."""
    rank = build(rendezvous, settings)
    (chunk,) = rank.chunks
    layers = chunk.module.decoder.layers
    passes = [0] * len(layers)

    def count(index: int) -> None:
        passes[index] += 1

    for index, layer in enumerate(layers):
        layer.mlp.register_forward_pre_hook(lambda *_, index=index: count(index))
    update(rank, batch, policy_version=0, step=1)
    return passes


@pytest.mark.parametrize(
    ("choice", "again"),
    [
        ({"recompute": "full"}, [1, 1]),
        ({"recompute": ("mlp",)}, [1, 1]),
        ({"recompute": ("core_attn",)}, [0, 0]),
    ],
)
def test_what_is_to_be_recomputed_is(ranks, choice, again):
    """Gradients are the same either way: catches a choice that megatron-core is not told of."""
    batch, sizes = random_batch(RAGGED), {"tokens_per_micro_batch": 4096}
    (once,) = ranks.on("qwen2-tied", _passes_of_each_mlp, batch, **sizes)
    (passes,) = ranks.on("qwen2-tied", _passes_of_each_mlp, batch, **sizes, **choice)
    assert [more - less for more, less in zip(passes, once, strict=True)] == again


def _updates_as_on_a_gpu(rendezvous, settings, batch) -> list[tuple[object, int]]:
    """Return the first ratio's error and the passes through a layer of each step."""
    import torch

    rank = build(rendezvous, settings)
    rank.device = torch.device("cuda")
    (chunk,) = rank.chunks
    passes = []
    chunk.module.decoder.layers[0].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    found = []
    for step, checks in ((1, True), (2, False)):
        passes.clear()
        result = update(rank, batch, step=step, checks_first_ratio=checks)
        found.append((result.metrics["policy/ratio_first_max_error"], len(passes)))
    return found


@pytest.mark.parametrize(("num_mini_batches", "less"), [(1, 1), (2, 0)])
def test_gpu_repeats_the_first_pass_only_to_check_the_first_ratio(ranks, num_mini_batches, less):
    """Catches a third more products in every step of one update, and a ratio that no pass checks
    but is reported as exact."""
    batch = random_batch(RAGGED, num_mini_batches=num_mini_batches)
    sizes = {"tokens_per_micro_batch": 4096}
    ((one, other),) = ranks.on("qwen2-tied", _updates_as_on_a_gpu, batch, **sizes)
    assert one[0] == 0.0 and other[0] == (None if less else 0.0)
    assert one[1] - other[1] == less


def _places_of_a_step(rendezvous, settings, batch) -> dict[str, set[str]]:
    import torch

    from megadapo.trainer.batch import mini_batch
    from megadapo.trainer.model.parallel import join_groups

    join_groups(rendezvous, settings.trainer, None, seed=0)
    model = describe_model(read_hf_config(Path(settings.model.path)))
    # where a model turns queries and keys by itself
    with mock.patch.object(mini_batch, "rotary_of_own_layers", lambda model: None):
        splitter = mini_batch.MicroBatchSplitter(model, settings.trainer, torch.device("meta"))
    split = splitter.split(batch, predicted=batch.is_trained, policy_version=0)
    assert len(split) > 1
    waiting = [micro_batch for part in split for micro_batch in part._waiting]
    on_device = [micro_batch for part in split for micro_batch in part]

    def places(micro_batches) -> set[str]:
        parts = [part for found in micro_batches for part in (found, found.packed)]
        tensors = [value for part in parts for value in vars(part).values()]
        return {value.device.type for value in tensors if isinstance(value, torch.Tensor)}

    tables = {
        name
        for micro_batch in on_device
        for name, value in vars(micro_batch.packed).items()
        if isinstance(value, torch.Tensor)
    }
    return {"waiting": places(waiting), "on_device": places(on_device), "tables": tables}


def test_a_step_waits_in_host_memory(ranks):
    """Catches all mini-batches on the GPU at once, the current one off it, unread rotary tables."""
    (found,) = ranks.on("qwen2-tied", _places_of_a_step, random_batch(RAGGED, num_mini_batches=2))
    assert found["waiting"] == {"cpu"}
    assert found["on_device"] == {"meta"}
    assert found["tables"] == {"cu_seqlens_q", "cu_seqlens_kv"}


def _graphs_that_are_handed_back(rendezvous, settings, batch) -> int:
    from megadapo.trainer.update import step

    seen = []
    run_schedule = step.run_schedule

    def watch(*args, **kwargs):
        outputs = run_schedule(*args, **kwargs)
        if not kwargs["forward_only"]:
            seen.extend(output.loss.grad_fn is not None for output in outputs)
        return outputs

    with mock.patch.object(step, "run_schedule", watch):
        update(build(rendezvous, settings), batch, step=1)
    assert seen or rendezvous.rank == 0
    return sum(seen)


def test_micro_batch_frees_its_graph(ranks):
    """Catches a last stage that keeps all it received: 3 GiB of the 32B recipe."""
    batch = random_batch(RAGGED)
    assert ranks.on("qwen2-tied", _graphs_that_are_handed_back, batch, pipeline=2) == [0, 0]


def _draw_on_a_gpu(rendezvous, settings) -> tuple[list[int], bool]:
    """Return the numbers drawn at once, and whether the tensors are freed with their source."""
    import gc
    import weakref
    from types import SimpleNamespace

    import torch

    from megadapo.trainer.model.cpu_platform import install_cpu_platform
    from megadapo.trainer.trained_model import DRAWN_AT_ONCE, RandomTensors

    install_cpu_platform()
    shapes = {"q_proj.weight": (3, DRAWN_AT_ONCE // 2), "q_proj.bias": (3,), "norm.weight": (3,)}
    layout = SimpleNamespace(hf_shapes=shapes, shape=SimpleNamespace(num_layers=2))
    draws, normal, generator = [], torch.Tensor.normal_, torch.Generator()

    def draw(tensor: torch.Tensor, *args: float, **keys: torch.Generator) -> torch.Tensor:
        draws.append(tensor.numel())
        return normal(tensor, *args, **keys)

    gc.disable()
    with mock.patch("torch.Generator") as made, mock.patch("torch.Tensor.normal_", draw):
        made.return_value.manual_seed.return_value = generator
        source = RandomTensors(layout, std=0.02, seed=3, device=torch.device("cuda"))
        read = [source.read(name, 0, 0, 2) for name in shapes]
        made.assert_called_once_with(torch.device("cuda"))
    assert [round(float(one.std()), 3) for one in read] == [0.02, 0.0, 0.0]
    memory = weakref.ref(read[0]._base)
    del source, read
    return draws, memory() is None


def test_random_weights_are_drawn_on_the_gpu(ranks):
    """Catches a minute of one CPU thread for 7B, numbers that depend on the kind of GPU, and whole
    tensors that stay on the GPU beside the optimizer."""
    assert ranks.on("qwen2-tied", _draw_on_a_gpu) == [([1 << 16, 1 << 15], True)]
