"""Whole steps on the virtual clock: the trainer's time passes beside or after the engines'."""

from itertools import islice

import pytest

from megadapo.config import load_config
from megadapo.lab.simulate.engines import EngineSettings, VirtualEngines
from megadapo.lab.simulate.measures import SimulatedStep
from megadapo.lab.simulate.policies import OurSampler
from megadapo.lab.simulate.step_times import (
    Absence,
    ClusterAssumptions,
    compare_steps,
    train,
)
from megadapo.lab.simulate.task import Task, TaskSettings
from megadapo.plan.cards import CARDS
from megadapo.plan.phases import models_of
from megadapo.plan.split import PUBLISH_S, SWITCH_S
from megadapo.rollout.config import SamplingConfig
from tests.support import REPOSITORY

TASK = TaskSettings(num_responses=4, keep_rate=0.5)


def steps(mode: str, staleness: int, train_s: float) -> tuple[VirtualEngines, list[SimulatedStep]]:
    sampling = SamplingConfig(
        mode=mode, max_staleness=staleness, prompts_per_step=16, responses_per_prompt=4
    )
    task = Task(TASK)
    engines = VirtualEngines(EngineSettings(num_engines=2, num_slots=32), task)
    sampler = OurSampler(sampling, engines, task).sampler
    return engines, list(islice(train(sampler, engines, train_s), 8))[2:]


def ages(step: SimulatedStep) -> set[int]:
    return {
        step.version - int(version)
        for group in step.groups
        for versions in group.policy_versions
        for version in versions[[0, -1]]
    }


@pytest.mark.parametrize(
    ("mode", "staleness", "oldest"),
    [("sync", 0, 0), ("partial", 1, 1), ("one_step_off", 1, 1), ("async", 2, 2)],
)
def test_time_adds_up_and_no_token_is_too_old(mode, staleness, oldest):
    """Fails if training overlaps where it must not, or weights reach engines early or late."""
    engines, found = steps(mode, staleness, train_s=100.0)
    overlaps = mode in ("one_step_off", "async")
    for step in found:
        published = PUBLISH_S if overlaps else SWITCH_S
        assert step.seconds == pytest.approx(step.waited_s + 100.0 + published)
        assert max(ages(step)) <= oldest and len(step.groups) == 16
        assert mode != "one_step_off" or ages(step) == {1}
        assert step.num_dropped == 0
    if not overlaps:
        # engines have no GPUs while the trainer works
        assert engines.engine_seconds == pytest.approx(2 * (engines.now - 8 * (100.0 + SWITCH_S)))


@pytest.mark.parametrize("mode", ["one_step_off", "async"])
def test_slow_trainer_never_waits(mode):
    """Fails if the engines stop while the trainer works."""
    _, found = steps(mode, 1 if mode == "one_step_off" else 2, train_s=5000.0)
    assert all(step.waited_s == 0.0 for step in found)


def small_cluster() -> ClusterAssumptions:
    """Return a sixteenth of the paper's batch on 32 GPUs."""
    sizes = ["sampling.prompts_per_step=32", "algorithm.responses_per_mini_batch=32"]
    config = load_config(str(REPOSITORY / "configs" / "qwen2.5-32b.toml"), sizes)
    return ClusterAssumptions.of(
        config,
        models_of(config).policy,
        CARDS["H200"],
        TaskSettings(keep_rate=0.35, solved_share=0.4),
        num_gpus=32,
        staleness=4,
    )


def test_modes_on_equally_many_gpus():
    """The order of the modes at a sixteenth of the paper's batch, and engines that leave."""
    assumptions = small_cluster()
    found = compare_steps(assumptions, num_steps=6, absence=Absence(num_engines=2, seconds=1000.0))
    by_name = {(one.name, one.max_staleness): one for one in found}
    sync, ahead = by_name["sync", 0], by_name["one_step_off", 1]
    best, away = found[-2:]
    assert best.step_s < 0.7 * sync.step_s and best.step_s < 0.8 * ahead.step_s
    assert best.engines_idle < 0.05 and best.num_dropped == 0 and best.staleness_max <= 4
    assert sync.length_bias == ahead.length_bias == 0.0 and abs(best.length_bias) < 0.05
    for one in found[:-1]:
        assert one.plan_s == pytest.approx(one.step_s, rel=0.15), one.name
    assert "2 of" in away.name and away.step_s >= best.step_s
    assert away.num_dropped == 0 and away.staleness_max <= 4
