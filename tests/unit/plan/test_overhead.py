"""Memory of GPUs besides state and activations, and the main memory of a node."""

import re
from collections import defaultdict

import pytest

from megadapo.cli import main
from megadapo.config import RunConfig, load_config
from megadapo.plan.cards import GIB, H100
from megadapo.plan.phases import GpuKind, gpu_kinds, host_items, models_of
from megadapo.plan.ranks import CHANNEL_BYTES, NUM_TABLES, engine_bytes, message_bytes
from megadapo.plan.refit import plan_for
from megadapo.run.processes import sends_while_training
from megadapo.weights.layout.layout import ModelLayout
from tests.support import REPOSITORY

CONFIGS = REPOSITORY / "configs"
NUM_PARAMETERS = 7_615_616_512
"""Parameters of Qwen2.5-7B."""
EVERYTHING = '["optimizer", "gradients", "parameters"]'


def recipe(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}.toml", overrides)


def kinds_of(config: RunConfig) -> list[GpuKind]:
    return gpu_kinds(config, models_of(config), H100)


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen2.5-32b", "qwen3-30b-a3b"])
def test_ranks_that_relay_weights_have_buffers_for_each_other(name):
    """NCCL allocates buffers for every rank with which a rank has exchanged a message."""
    config = recipe(name)
    layout = ModelLayout(models_of(config).policy.family, models_of(config).policy.shape)
    plan, hosts = plan_for(config, layout, gpus_per_node=8)
    peers = defaultdict(set)
    for transfer in plan.transfers:
        for one, other in ((transfer.relay, transfer.sender), (transfer.sender, transfer.relay)):
            if one != other and one // 8 == other // 8:
                peers[one].add(other)
    most = max(len(found) for found in peers.values())
    channels = 32 if config.trainer.num_ranks == 8 else 2
    assert message_bytes(config.trainer) >= most * channels * CHANNEL_BYTES


def test_position_tables_are_as_many_as_megatron_core_keeps():
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    assert RotaryEmbedding.forward.cache_parameters()["maxsize"] == NUM_TABLES
    (kind,) = kinds_of(recipe("qwen3-30b-a3b"))
    # 22,528 positions of 128 angles in fp32: 11 MiB, in segments of a multiple of 2 MiB
    assert {phase.items.get("position tables", 0) / 2**20 for phase in kind.phases} == {0, 32 * 12}


def test_main_memory_has_offloaded_tensors_and_the_snapshot_of_a_save():
    models = models_of(recipe("qwen2.5-7b"))
    engine = engine_bytes(models.policy, recipe("qwen2.5-7b").rollout, H100, itemsize=2)

    def counted(*overrides: str) -> tuple[float, ...]:
        items = host_items(recipe("qwen2.5-7b", *overrides), models, engine, 8)
        return tuple(size / GIB for size in items.values())

    size = NUM_PARAMETERS / GIB
    optimizer, engines, snapshot, copies = counted()
    assert engines == copies == 0.0
    assert optimizer == pytest.approx(12 * size, rel=0.01)
    # weights, masters and two moments of every parameter, each on one rank
    assert snapshot == pytest.approx(14 * size, rel=0.01)
    # fp32 weights are their own masters
    assert counted("model.dtype=float32")[2] == pytest.approx(12 * size, rel=0.01)
    assert counted('trainer.offload=["gradients"]') == (0.0, 0.0, snapshot, 0.0)
    assert counted(f"trainer.offload={EVERYTHING}")[0] - optimizer == 8 * 4
    # engines keep their weights while the trainer works
    delta = counted("weights.mode=delta")
    assert delta == (optimizer, pytest.approx(8 * 2 * size, rel=0.01), snapshot, 0.0)
    assert counted("cluster.placement=separate") == (0.0, 0.0, snapshot, 0.0)
    # masters, moments, and gradients on the CPU
    adam = counted('trainer.offload=["gradients"]', "trainer.optimizer.cpu_offload_fraction=0.5")
    assert adam[0] == pytest.approx(16 * size / 2, rel=0.01) and adam[2] == snapshot


ASYNC = ("cluster.placement=separate", "sampling.mode=async", "sampling.max_staleness=2")
EVALUATES = ("evaluation.placement=engine", "evaluation.every=5", "checkpoint.every=5")


@pytest.mark.parametrize(
    ("overrides", "num_copies"),
    [
        ([], 0),
        (["cluster.placement=separate"], 0),
        (["cluster.placement=separate", *EVALUATES], 1),
        ([*ASYNC, "evaluation.every=0"], 1),
        ([*ASYNC, *EVALUATES], 2),
    ],
)
def test_main_memory_has_the_weights_that_ranks_keep_for_engines(overrides, num_copies):
    """Ranks of the largest stage, eight on a node: each copies its own parameters in bf16."""
    config = recipe("qwen2.5-32b", "trainer.offload=[]", *overrides)
    models = models_of(config)
    engine = engine_bytes(models.policy, config.rollout, H100, itemsize=2)
    size = host_items(config, models, engine, 8)["weights for engines that join or evaluate"]
    # 16 model-parallel ranks
    assert size / GIB == pytest.approx(8 * num_copies * 32.76e9 * 2 / 16 / GIB, rel=0.02)
    evaluates = config.evaluation.every > 0 and config.evaluation.placement == "engine"
    assert num_copies == sends_while_training(config) + evaluates


def test_small_main_memory_is_a_warning(capsys):
    argv = ["plan", str(CONFIGS / "qwen2.5-32b.toml"), "--trainer.offload=[]"]
    argv += [f"--{override}" for override in [*ASYNC, "evaluation.every=0"]]
    argv += ["--rollout.gpu_memory_utilization=0.8"]
    main(argv)
    captured = capsys.readouterr()
    total = int(re.search(r"main memory of a node: (\d+) GiB = ", captured.out)[1])
    assert "+ 31 weights for engines that join or evaluate" in captured.out
    assert "main memory" not in captured.err
    main([*argv, f"--main-memory={total}"])
    assert (
        f"warning: main memory of a node: {total} GiB are more than 95% of its {total} GiB "
        "(--main-memory)"
    ) in capsys.readouterr().err
    main([*argv, f"--main-memory={2 * total}"])
    assert "main memory" not in capsys.readouterr().err


def test_plan_prints_the_snapshot(capsys):
    assert main(["plan", str(CONFIGS / "qwen2.5-7b.toml")]) == 0
    assert "99 snapshot of a save" in capsys.readouterr().out


def test_engine_that_restarts_finds_its_whole_budget_free():
    """vLLM refuses to start with less free memory than gpu_memory_utilization of the card."""
    config = recipe("qwen3-30b-a3b")
    (kind,) = kinds_of(config)
    phases = {phase.name: phase.items for phase in kind.phases}
    beside = set(phases["rollout"]) & set(phases["train"])
    assert {"weights", "trainer's CUDA, NCCL", "weight buckets", "position tables"} == beside
    restart = phases["restart engine"]
    train = phases["train"]
    assert all(restart[name] == train[name] for name in beside)
    budget = config.rollout.gpu_memory_utilization * H100.memory_bytes
    assert restart["engine's free budget"] == pytest.approx(budget, rel=1e-6)
    # the restarted engine gets its weights while it has a key-value cache
    assert sum(restart.values()) > sum(phases["rollout"].values())
