"""Sections that cannot work together are refused by key, and engines are counted by machine."""

from pathlib import Path

import pytest

from megadapo.config import RunConfig, load_config, to_toml
from megadapo.errors import ConfigError
from tests.support import REPOSITORY
from tests.support.runs.recipes import refused

IMPOSSIBLE = """
algorithm.responses_per_mini_batch=24 -> algorithm.responses_per_mini_batch; multiple
algorithm.responses_per_mini_batch=48 -> algorithm.responses_per_mini_batch; does not divide
algorithm.responses_per_mini_batch=16384 -> = 16384 does not divide; 512 x 16 = 8192
algorithm.responses_per_mini_batch=16; trainer.data_parallel=32
    -> trainer.data_parallel = 32; without a response
trainer.context_parallel=16384
    -> trainer.context_parallel = 16384; 32768 chunks; max_response_tokens = 2
rollout.max_response_tokens=4096 -> algorithm.overlong_buffer; max_response_tokens
evaluation.every=5 -> evaluation.every; data.held_out
evaluation.every=10; evaluation.placement=engine
    -> evaluation.placement = "engine"; cluster.placement
evaluation.every=5; evaluation.placement=engine; cluster.placement=separate
    -> evaluation.every = 5; checkpoint.every = 10
trainer.sequence_parallel=true -> trainer.sequence_parallel; tensor_parallel
trainer.optimizer.cpu_offload_fraction=0.5; cluster.device=cpu
    -> trainer.optimizer.cpu_offload_fraction = 0.5; cluster.device
trainer.optimizer.cpu_offload_fraction=1.0; cluster.device=cuda; model.dtype=float32
    -> trainer.optimizer.cpu_offload_fraction = 1; model.dtype
algorithm.advantage=maxrl; algorithm.overlong_buffer=0; reward.functions=["length"]
    -> algorithm.advantage; reward.functions
trainer.router_replay=true; rollout.vllm.enable_prefix_caching=false
    -> trainer.router_replay; rollout.vllm.enable_prefix_caching
trainer.router_replay=true; rollout.pipeline_parallel=2
    -> trainer.router_replay; rollout.pipeline_parallel
rollout.quantization=fp8 -> rollout.quantization; algorithm.importance.scope
rollout.quantization=fp8; model.dtype=float32 -> rollout.quantization; model.dtype
rollout.quantization=fp8; cluster.device=cpu -> rollout.quantization; cluster.device
algorithm.advantage=grpo-process -> algorithm.advantage; reward.functions
algorithm.advantage=grpo-process; reward.functions=["arithmetic_steps"];
    sampling.accuracy_range=[0.1, 1.0] -> algorithm.advantage; sampling.accuracy_range
critic.warmup=1 -> critic: ; algorithm.advantage = "gae"
algorithm.advantage=gae; critic.warmup=3; critic.optimizer.warmup_steps=0
    -> critic.warmup = 3; run.num_steps
algorithm.advantage=gae; trainer.optimizer.decay_steps=20; trainer.optimizer.warmup_steps=2
    -> trainer.optimizer.decay_steps = 20; critic.optimizer.warmup_steps = 20
algorithm.objective.kl_coef=0.1; algorithm.reference.refresh_every=3
    -> algorithm.reference.refresh_every; run.num_steps
algorithm.objective.kl_coef=0.1; algorithm.reference={path = "a", refresh_every = 1}
    -> algorithm.reference.refresh_every; algorithm.reference.path
algorithm.objective.kl_coef=0.1; algorithm.reference.path="" -> algorithm.reference.path; empty
algorithm.reference.path=a -> algorithm.reference; kl_coef = 0
algorithm.advantage=rloo; algorithm.objective={kl_coef = 0.1, kl_in = 'reward', kl_value = 'k1'};
    algorithm.kl_control={target = 0.1, horizon = 8}
    -> algorithm.kl_control.horizon = 8; 0.2; sampling
algorithm.importance.stale_logprobs=rollout; algorithm.importance.high=3.0
    -> algorithm.importance.high; algorithm.importance.stale_logprobs
algorithm.importance.stale_logprobs='none'; sampling.max_staleness=1; sampling.mode=one_step_off;
    cluster.placement=separate -> algorithm.importance.stale_logprobs; sampling.mode; whole groups
sampling.max_staleness=2; sampling.mode=async -> sampling.mode; cluster.placement; separate
sampling.max_staleness=2; sampling.mode=async; cluster.placement=separate; evaluation.every=1
    -> evaluation.placement; engine; evaluation.every
sampling.branching.initial_rollouts=4 -> sampling.branching.initial_rollouts; rollout.environments
run.seed=-1 -> run.seed
run.num_steps=0 -> run.num_steps
run.resume= -> run.resume
run.folder= -> run.folder
weights.deadline_s=1801 -> weights.deadline_s = 1801; at most 1800
trainer.timeout_s=60 -> weights.deadline_s; trainer.timeout_s
rollout.top_p=0.9 -> rollout.top_p; evaluation.top_p
rollout.top_k=50 -> rollout.top_k; whole softmax
rollout.enforce_eager=true -> rollout.vllm.enforce_eager
"""
"""Overrides, and what the message must contain."""


@pytest.mark.parametrize("case", IMPOSSIBLE.strip().replace("\n    ", " ").split("\n"))
def test_impossible_combination_names_its_keys(recipe: Path, case: str) -> None:
    overrides, keys = (part.split("; ") for part in case.split(" -> "))
    message = refused(recipe, *overrides)
    assert all(key in message for key in keys), message


def test_an_engine_for_held_out_problems_is_one_more_and_only_where_there_are_evaluations(
    recipe: Path,
) -> None:
    own = ["evaluation.placement=engine", "cluster.placement=separate", "rollout.num_engines=3"]
    held_out = ["evaluation.every=10", "data.held_out=arithmetic:held_out:8"]
    assert load_config(recipe, [*own, *held_out]).num_engines == 4
    assert load_config(recipe, own).num_engines == 3
    assert load_config(recipe, [*held_out, "rollout.num_engines=3"]).num_engines == 3


def test_run_shorter_than_its_warmup_is_a_warning(recipe: Path) -> None:
    (warning,) = load_config(recipe, ["trainer.optimizer.warmup_steps=4"]).warnings()
    assert "trainer.optimizer.warmup_steps = 4" in warning and "run.num_steps = 3" in warning
    critic = ["algorithm.advantage=gae", "critic.optimizer.warmup_steps=5"]
    (warning,) = load_config(recipe, critic).warnings()
    assert "critic.optimizer.warmup_steps = 5" in warning
    assert load_config(recipe, ["trainer.optimizer.warmup_steps=3"]).warnings() == []


QUICKSTART = REPOSITORY / "configs" / "quickstart.toml"


def quickstart(*overrides: str) -> RunConfig:
    return load_config(QUICKSTART, overrides)


@pytest.mark.parametrize("overrides,has_gpu,expected", [
    ([], False, 2),
    ([], True, 1),
    (["cluster.device=cpu"], True, 2),
    (["cluster.device=cuda"], False, 1),
    (["trainer.data_parallel=4"], True, 4),
    (["trainer.data_parallel=4", "rollout.tensor_parallel=2"], True, 2),
    (["rollout.tensor_parallel=2"], True, 1),
    (["rollout.num_engines=3"], True, 3),
])  # fmt: skip
def test_engines_are_counted_by_the_trainers_gpus(
    overrides: list[str], has_gpu: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megadapo.config.run_config.has_gpu", lambda: has_gpu)
    assert quickstart(*overrides).rollout.num_engines == expected


def test_a_resolved_configuration_keeps_the_number_of_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megadapo.config.run_config.has_gpu", lambda: False)
    printed = tmp_path / "printed.toml"
    printed.write_text(to_toml(quickstart()))
    monkeypatch.setattr("megadapo.config.run_config.has_gpu", lambda: True)
    assert load_config(printed).rollout.num_engines == 2


def test_another_wrong_key_is_named_without_the_engines() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.data_parallel") as caught:
        quickstart("trainer.data_parallel=-1")
    assert "num_engines" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"rollout\.num_engines"):
        quickstart("rollout.num_engines=some")
