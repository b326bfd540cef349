"""The split of GPUs between engines and trainer that `megadapo plan` recommends."""

from dataclasses import asdict

import pytest

from megadapo.cli import run_command
from megadapo.config import RunConfig, load_config
from megadapo.errors import ConfigError
from megadapo.lab.plan.cards import CARDS, H200
from megadapo.lab.plan.engine_speed import EngineSpeed, slots_of, speed_of
from megadapo.lab.plan.phases import models_of
from megadapo.lab.plan.split import by_estimate, describe_split, split_time, splits
from tests.support import REPOSITORY


def recipe(name: str = "qwen2.5-32b", *overrides: str) -> RunConfig:
    return load_config(str(REPOSITORY / "configs" / f"{name}.toml"), list(overrides))


def test_speed_of_the_32b_model_is_the_simulators_default():
    """Fails if a term of the engine's speed is lost or has another unit."""
    config = recipe()
    found = asdict(speed_of(config, models_of(config).policy, H200))
    for name, value in asdict(EngineSpeed()).items():
        assert found[name] == pytest.approx(value, rel=0.16), name


def test_trainers_are_whole_copies_of_the_model():
    config = recipe()
    found = splits(config, models_of(config).policy, H200, 128)
    assert [one.trainer.num_ranks for one in found] == list(range(8, 128, 8))
    assert {one.num_engine_gpus + one.trainer.num_ranks for one in found} == {128}
    assert [one.trainer.pipeline_parallel for one in found[:4]] == [1, 2, 1, 2]
    # the same work on more GPUs
    assert all(a.train_s > b.train_s for a, b in zip(found[::2], found[2::2], strict=False))
    with pytest.raises(ConfigError, match="8 GPUs are too few"):
        splits(config, models_of(config).policy, H200, 8)


def test_experts_are_spread_evenly():
    config = recipe("qwen3-30b-a3b")
    for one in splits(config, models_of(config).policy, CARDS["H100-80G"], 64):
        trainer = one.trainer
        ranks = trainer.tensor_parallel * trainer.num_replicas
        assert ranks % (trainer.expert_parallel * trainer.expert_tensor_parallel) == 0


def test_best_split_balances_engines_and_trainer():
    """`megadapo simulate` has 88 + 40 for async and 96 + 32 one step off on 128 GPUs."""
    config = recipe()
    model = models_of(config).policy
    speed, num_slots = speed_of(config, model, H200), slots_of(config, model, H200)
    found = splits(config, model, H200, 128)
    for mode, name in (("async", "88 + 40"), ("one_step_off", "96 + 32")):
        best = by_estimate(config, found, speed, num_slots, mode=mode, staleness=2)[0]
        assert best.name == name
        time = split_time(config, best, speed, num_slots, mode=mode, staleness=2)
        assert 900 < time.step_s < 1300 and time.trainer_idle < 0.1


ASYNC = (
    *("sampling.mode=async", "sampling.max_staleness=2", "cluster.placement=separate"),
    *("evaluation.every=0", "trainer.offload=[]", "rollout.num_engines=20"),
    "trainer.data_parallel=3",
)


def test_plan_has_one_time_of_a_step(capsys):
    """The roofline said 763 s beside the split's 1,460 s: it had another speed of the engines."""
    path = REPOSITORY / "configs" / "qwen2.5-32b.toml"
    run_command(["plan", str(path), "--gpu=H200", *(f"--{one}" for one in ASYNC)])
    printed = capsys.readouterr().out
    assert "the recipe's split" in printed and "a step at this roofline" not in printed


def test_recommended_split_is_described():
    config = recipe("qwen2.5-32b", *ASYNC)
    own, best, _ = describe_split(config, models_of(config), H200)
    assert "80 + 48 GPUs" in own
    assert "88 + 40 GPUs" in best and "rollout.num_engines = 22" in best
