"""Shipped recipes fit on their GPUs, advice for others helps, and overhead is counted."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

import megadapo
from megadapo.cli import main
from megadapo.config import RunConfig, load_config
from megadapo.errors import DataError
from megadapo.models.description import describe_model
from megadapo.models.folder import find_hf_config, published_models
from megadapo.plan.cards import CARDS, GIB, H100, H200
from megadapo.plan.fit import ON_ONE, largest_sequence, overflows, problems, warnings
from megadapo.plan.phases import (
    GpuKind,
    gpu_kinds,
    host_items,
    longest_sequence,
    models_of,
    replayed_bytes,
)
from megadapo.plan.ranks import (
    CHANNEL_BYTES,
    NUM_TABLES,
    engine_bytes,
    message_bytes,
    rank_kinds,
    state_bytes,
)
from megadapo.plan.refit import plan_for
from megadapo.plan.responses import Responses
from megadapo.plan.step_time import train_seconds, update_flops
from megadapo.run.processes import sends_while_training
from megadapo.weights.layout.layout import ModelLayout

CONFIGS = Path(megadapo.__file__).parents[1] / "configs"
RECIPES = sorted(path.stem for path in CONFIGS.glob("qwen*.toml"))
SIZES = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-30B-A3B-Base": 30_532_122_624,
    "SmolLM2-135M-Instruct": 134_515_008,
}
"""Number of parameters on the models' pages."""
UNSPLIT = "trainer.sequence_parallel=false"
EVERYTHING = '["optimizer", "gradients", "parameters"]'
NUM_PARAMETERS = 7_615_616_512
"""Parameters of Qwen2.5-7B."""
ASYNC = ("cluster.placement=separate", "sampling.mode=async", "sampling.max_staleness=2")
EVALUATES = ("evaluation.placement=engine", "evaluation.every=5", "checkpoint.every=5")


def recipe(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}.toml", overrides)


def kinds_of(config: RunConfig) -> list[GpuKind]:
    return gpu_kinds(config, models_of(config), H100)


def items_in(kind: GpuKind, phase: str) -> dict[str, int]:
    return next(one.items for one in kind.phases if one.name == phase)


def bytes_in(kind: GpuKind, phase: str) -> int:
    return sum(items_in(kind, phase).values())


@pytest.mark.parametrize("name", published_models())
def test_built_in_models_have_their_published_size(name):
    model = describe_model(find_hf_config(f"/nowhere/{name}"))
    layout = ModelLayout(model.family, model.shape)
    sizes = layout.hf_shapes.values()
    assert sum(rows * (rest[0] if rest else 1) for rows, *rest in sizes) == SIZES[name]


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_fit_in_every_phase(name):
    config = recipe(name)
    models = models_of(config)
    assert problems(config, models, H100) == warnings(config, models, H100) == []
    for kind in gpu_kinds(config, models, H100):
        shares = {phase.name: phase.total / H100.memory_bytes for phase in kind.phases}
        assert max(shares.values()) < 0.95, shares
    largest, _ = largest_sequence(config, models, H100)
    assert largest >= longest_sequence(config)


def test_phases_are_those_of_a_run_in_order():
    """With names other than those of the run's status, a number has no phase to compare with."""
    engine = {"engine weights", "engine workspace", "KV cache"}
    for kind in kinds_of(recipe("qwen2.5-32b")):
        names = [phase.name for phase in kind.phases]
        assert names[:4] == ["start engines", "start trainer", "rollout", "restart engine"]
        assert names[4:] == ["train", "sync", "checkpoint"]
        items = {phase.name: phase.items.keys() for phase in kind.phases}
        assert not any("trainer" in name for name in items["start engines"])
        for asleep in ("start trainer", "train"):
            assert "engine, asleep" in items[asleep] and not engine & items[asleep]
        assert engine <= items["rollout"]
        assert engine & items["sync"] == {"engine weights"}
        assert items["checkpoint"] == items["rollout"] and "optimizer" not in items["checkpoint"]
    sources = [CONFIGS.parent / "megadapo" / "loop.py"]
    sources += (CONFIGS.parent / "megadapo" / "run").rglob("*.py")
    named = re.findall(r'phase\("([^"]+)"', "".join(path.read_text() for path in sources))
    assert set(names) - {"restart engine"} <= set(named)


def test_crowded_phase_is_a_warning_and_a_misfit_is_refused(capsys):
    argv = ["plan", str(CONFIGS / "qwen2.5-32b.toml")]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert "every phase is below 95% of a H100-80G" in captured.out and "GiB" not in captured.err
    assert main([*argv, "--rollout.gpu_memory_utilization=0.98"]) == 2
    captured = capsys.readouterr()
    assert "lower rollout.gpu_memory_utilization to 0.87" in captured.err
    assert "GiB" in captured.out
    assert main([*argv, "--rollout.gpu_memory_utilization=0.85"]) == 0
    captured = capsys.readouterr()
    assert "every phase" not in captured.out
    assert "warning: trainer rank of stage 1 of 2, rollout" in captured.err
    assert "more than 95% of a H100-80G, and the plan is an estimate; set" in captured.err
    dry_run = ["train", *argv[1:], "--dry-run", "--rollout.gpu_memory_utilization=0.85"]
    assert main(dry_run) == 0
    assert "megadapo: warning: trainer rank of stage 1" in capsys.readouterr().err


def test_parameters_of_all_stages_add_up_to_the_model():
    config = recipe("qwen2.5-32b")
    layout = ModelLayout(models_of(config).policy.family, models_of(config).policy.shape)
    kinds = rank_kinds(layout, config.trainer)
    held = config.trainer.tensor_parallel * sum(kind.num_parameters for kind in kinds)
    # norms are on every tensor-parallel rank
    assert SIZES["Qwen2.5-32B"] <= held < 1.001 * SIZES["Qwen2.5-32B"]
    state = state_bytes(kinds[0], config.trainer, itemsize=2)
    kept = state.weights + state.gradients + state.optimizer
    assert kept == pytest.approx((2 + 4 + 12 / 8) * kinds[0].num_parameters, rel=1e-6)


@pytest.mark.parametrize(
    ("override", "kind", "phase"),
    [
        ("trainer.recompute=[]", 0, "train"),
        ("trainer.tokens_per_micro_batch=65536", 1, "train"),
        ("trainer.sequence_parallel=false", 0, "train"),
        ("trainer.data_parallel=4", 0, "train"),
        ("rollout.gpu_memory_utilization=0.83", 0, "rollout"),
        ("rollout.gpu_memory_utilization=0.83", 0, "restart engine"),
        ("rollout.gpu_memory_utilization=0.83", 0, "start engines"),
        ('trainer.offload=["gradients"]', 0, "rollout"),
        ('trainer.offload=["optimizer"]', 1, "checkpoint"),
        ("trainer.data_parallel=4", 1, "train"),
        ("weights.bucket_mib=1024", 1, "sync"),
        ("rollout.tensor_parallel=2", 0, "sync"),
    ],
)
def test_each_key_takes_memory_where_it_should(override, kind, phase):
    before, after = kinds_of(recipe("qwen2.5-32b")), kinds_of(recipe("qwen2.5-32b", override))
    assert bytes_in(after[kind], phase) > bytes_in(before[kind], phase) + GIB / 2


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        (["trainer.tokens_per_micro_batch=200000"], "trainer.tokens_per_micro_batch = 22528"),
        (["trainer.recompute=[]", UNSPLIT], "trainer.sequence_parallel = true"),
        (["rollout.gpu_memory_utilization=0.9"], f"trainer.offload = {EVERYTHING}"),
        (["trainer.tensor_parallel=1", "trainer.data_parallel=64", UNSPLIT], "split the model"),
        (["rollout.gpu_memory_utilization=0.23"], "the KV cache holds"),
    ],
)
def test_misfit_has_the_key_to_change(overrides, advice):
    config = recipe("qwen2.5-32b", *overrides)
    assert advice in "\n".join(problems(config, models_of(config), H100))


def test_advice_helps():
    long = recipe("qwen2.5-7b", "rollout.max_response_tokens=60000")
    (problem,) = problems(long, models_of(long), H100)
    assert 'trainer.recompute = ["mlp"]' in problem
    helped = recipe("qwen2.5-7b", "rollout.max_response_tokens=60000", 'trainer.recompute=["mlp"]')
    assert problems(helped, models_of(helped), H100) == []


def test_largest_sequence_is_the_largest():
    config = recipe("qwen2.5-7b")
    models = models_of(config)
    largest, limit = largest_sequence(config, models, H100)
    assert "trainer" in limit
    prompt = config.data.max_prompt_tokens

    def overflows_at(num_tokens: int) -> bool:
        sizes = [f"rollout.max_response_tokens={num_tokens - prompt}"]
        sizes.append(f"trainer.tokens_per_micro_batch={num_tokens}")
        return bool(overflows(kinds_of(recipe("qwen2.5-7b", *sizes)), H100))

    assert not overflows_at(largest) and overflows_at(largest + 256)
    assert largest_sequence(config, models, H200)[0] > largest


def test_fit_names_the_longest_sequence_on_one_card(capsys):
    """Catches a table whose lengths do not fit, or that leaves memory unused."""
    assert main(["plan", str(CONFIGS / "qwen2.5-7b.toml"), "--fit"]) == 0
    _, head, *rows = capsys.readouterr().out.splitlines()
    found = {
        card: dict(zip(head.split(), longest, strict=True))
        for card, *longest in map(str.split, rows)
    }
    assert found.keys() == CARDS.keys()
    assert found["A100-40G"]["Qwen2.5-7B"] == found["B200"]["Qwen2.5-32B"] == "-"
    longest = int(found["RTX-4090"]["Qwen2.5-1.5B"].replace(",", ""))

    def fits(num_tokens: int, share: float) -> bool:
        sizes = (
            f"rollout.max_response_tokens={num_tokens - 2048}",
            f"trainer.tokens_per_micro_batch={num_tokens}",
            f"rollout.gpu_memory_utilization={share}",
            "model.path=Qwen2.5-1.5B",
        )
        own = recipe("qwen2.5-7b", *ON_ONE, *sizes)
        return problems(own, models_of(own), CARDS["RTX-4090"]) == []

    shares = [number / 100 for number in range(5, 95, 5)]
    assert any(fits(longest, share) for share in shares)
    assert not any(fits(longest + 512, share) for share in shares)
    assert main(["plan", str(CONFIGS / "qwen3-30b-a3b.toml"), "--fit"]) == 0


def test_separate_engines_are_a_kind_of_gpu():
    config = recipe("qwen2.5-32b", "cluster.placement=separate")
    *trainers, engine = kinds_of(config)
    assert engine.num_gpus == 128
    assert [phase.name for phase in engine.phases] == ["start engines", "rollout", "sync"]
    names = [phase.name for phase in trainers[0].phases]
    assert names == ["start trainer", "train", "sync", "checkpoint"]
    assert all("engine" not in name for phase in trainers[0].phases for name in phase.items)


def test_critic_takes_memory():
    changes = ("algorithm.advantage=gae", "sampling.selection=all")
    before, after = kinds_of(recipe("qwen2.5-7b")), kinds_of(recipe("qwen2.5-7b", *changes))
    for name in ("weights", "optimizer"):
        assert items_in(after[0], "train")[name] > 1.9 * items_in(before[0], "train")[name]


def test_teacher_takes_memory_in_training_only():
    """On the GPU beside the policy, and in main memory between its passes."""
    student = ("algorithm.objective.kl_coef=1.0",)
    taught = recipe("qwen2.5-7b", *student, "algorithm.reference.path=Qwen2.5-32B")
    alone = recipe("qwen2.5-7b", *student)
    (kind,) = kinds_of(taught)
    ranks = taught.trainer.tensor_parallel * taught.trainer.pipeline_parallel
    weights = items_in(kind, "train")["teacher's weights"]
    assert weights == pytest.approx(32.76e9 * 2 / ranks, rel=0.02)
    assert items_in(kind, "start trainer")["teacher's weights"] == weights
    assert "teacher's weights" not in items_in(kind, "rollout")
    hosts = [host_items(config, models_of(config), H100, 8) for config in (alone, taught)]
    before, after = (host["offloaded by the trainer"] for host in hosts)
    policy = items_in(kind, "train")["weights"]
    assert after - before == 8 * (weights - policy)


def test_cache_is_the_rest_of_the_engines_share():
    config = recipe("qwen2.5-32b")
    engine = engine_bytes(config, models_of(config).policy, H100)
    assert engine.token == 2 * 64 * 2 * 128 * 2
    budget = engine.weights + engine.workspace + engine.cache
    assert budget == pytest.approx(0.81 * H100.memory_bytes, rel=1e-6)


def test_replayed_experts_are_counted():
    """48 layers, 8 experts a token, 1 byte each: a mini-batch on GPUs, a step in main memory."""
    free, replayed = [
        recipe("qwen3-30b-a3b", *override) for override in (["trainer.router_replay=false"], [])
    ]
    (before, *_), (after, *_) = kinds_of(free), kinds_of(replayed)
    more = items_in(after, "train")["micro-batches"] - items_in(before, "train")["micro-batches"]
    responses = replayed.algorithm.responses_per_mini_batch // replayed.trainer.data_parallel
    share = responses * longest_sequence(replayed) // replayed.trainer.context_parallel
    assert more == pytest.approx(48 * 8 * share, rel=0.15)
    model = models_of(replayed).policy
    num_responses = replayed.sampling.prompts_per_step * replayed.sampling.responses_per_prompt
    assert replayed_bytes(replayed, model) == 48 * 8 * longest_sequence(replayed) * num_responses
    assert replayed_bytes(free, model) == 0


def test_everything_but_the_process_can_be_offloaded():
    (kind,) = kinds_of(recipe("qwen2.5-7b", f"trainer.offload={EVERYTHING}"))
    phases = {phase.name: phase.items.keys() for phase in kind.phases}
    found = {name: {"weights", "gradients", "optimizer"} & items for name, items in phases.items()}
    assert found["rollout"] == found["checkpoint"] == set()
    assert (len(found["train"]), found["sync"]) == (3, {"weights"})


def test_quantised_engines_halve_all_but_the_vocabulary():
    config = recipe("qwen2.5-32b", "rollout.quantization=fp8", "algorithm.importance.scope=all")
    model, ranks = models_of(config).policy, config.rollout.tensor_parallel
    whole, halved = (
        engine_bytes(one, model, H100).weights for one in (recipe("qwen2.5-32b"), config)
    )
    vocabulary = 2 * 2 * model.shape.vocab_size * model.shape.hidden_size // ranks
    assert halved == pytest.approx((whole + vocabulary) / 2, rel=1e-3)


def test_unknown_model_is_named():
    with pytest.raises(DataError, match=r"model.path = '/nowhere/unknown'.*Qwen2.5-32B"):
        find_hf_config("/nowhere/unknown")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "H101"], "choose one of H100-80G, H200, B200, A100-80G, "),
        (["--nodes", "15"], "128 GPUs are 16 nodes"),
        (["--nodes", "0"], "128 GPUs are 16 nodes"),
        (["--rollout.tensor_parallel=3"], "num_attention_heads"),
    ],
)
def test_impossible_plan_is_refused(arguments, message, capsys):
    assert main(["plan", str(CONFIGS / "qwen2.5-32b.toml"), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("gpu", [name.lower() for name in CARDS])
def test_every_card_has_a_plan(gpu, capsys):
    small = ["--model.path=Qwen2.5-1.5B"]
    small += ["--trainer.tensor_parallel=2", "--trainer.data_parallel=4"]
    argv = ["plan", str(CONFIGS / "qwen2.5-7b.toml"), "--gpu", gpu, "--nodes", "1"]
    small += ["--trainer.tokens_per_micro_batch=12288", '--trainer.recompute="full"']
    assert main([*argv, *small, "--rollout.gpu_memory_utilization=0.5"]) == 0
    printed = capsys.readouterr().out
    assert "longest sequence: 12,288 tokens" in printed
    assert "8 shared GPUs, a step of " in printed


def test_dry_run_on_gpus_checks_memory(capsys):
    argv = ["train", str(CONFIGS / "qwen2.5-32b.toml"), "--dry-run"]
    assert main(argv) == 0
    assert ", a trainer rank of stage 2 of 2 is fullest in rollout" in capsys.readouterr().err
    assert main(["train", str(CONFIGS / "qwen2.5-32b-async.toml"), "--dry-run"]) == 0
    assert ", an engine rank is fullest in rollout" in capsys.readouterr().err
    assert main([*argv, "--rollout.gpu_memory_utilization=0.98"]) == 2
    captured = capsys.readouterr()
    assert "rollout.gpu_memory_utilization" in captured.err and captured.out == ""
    assert main([*argv, "--rollout.gpu_memory_utilization=0.93", "--gpu", "H200"]) == 0


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ((), 4),
        (("algorithm.responses_per_mini_batch=2048",), 3),
        (("algorithm.responses_per_mini_batch=2048", "algorithm.objective.kl_coef=0.1"), 5),
        (('algorithm.objective.gate="kl_cov"', "algorithm.responses_per_mini_batch=512"), 4.75),
    ],
)
def test_one_update_a_step_computes_its_own_old_logprobs(changes, passes):
    """Catches a forecast with a forward pass that no GPU makes, or without the reference's."""
    config = recipe("qwen2.5-7b", "trainer.recompute=[]", *changes)
    model = models_of(config).policy
    many = recipe("qwen2.5-7b", "trainer.recompute=[]")
    shares = [train_seconds(one, model, H100, Responses.of(one)) for one in (config, many)]
    assert shares[0] / shares[1] == pytest.approx(passes / 4)


def test_flops_of_an_update_are_two_per_weight_and_token_for_each_pass():
    """Old log-probs and forward pass once, backward pass twice; the embedding multiplies nothing.

    Attention adds 4 x query width x keys for each layer and pass, with half of the tokens as keys.
    """
    model = describe_model(find_hf_config("/nowhere/Qwen2.5-7B"))
    lengths, shape = [1000, 3000], model.shape
    weights = SIZES["Qwen2.5-7B"] - shape.vocab_size * shape.hidden_size
    pairs = sum(length * length / 2 for length in lengths)
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    expected = 4 * (2 * weights * sum(lengths) + attention)
    assert update_flops(model, lengths) == pytest.approx(expected, rel=1e-4)
    shared = update_flops(model, lengths, with_logprobs=False)
    assert shared == pytest.approx(expected * 3 / 4, rel=1e-4)


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

    def counted(*overrides: str) -> tuple[float, ...]:
        items = host_items(recipe("qwen2.5-7b", *overrides), models, H100, 8)
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
    size = host_items(config, models, H100, 8)["weights for engines that join or evaluate"]
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
