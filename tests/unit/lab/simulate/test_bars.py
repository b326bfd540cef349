"""The sampler is faster than its baselines, wastes less, and has no bias towards short answers.

Full sizes: 512 groups of 16 on 16 engines (limited by throughput) and 128 groups on 32 (limited by
the tail). Lengths are log-normal with a mean of 4,800 tokens and 95 % below 12,000.
"""

import gc
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from megadapo.lab.simulate.engines import EngineSettings
from megadapo.lab.simulate.policies import Policy, policies_on_engines
from megadapo.lab.simulate.simulation import NUM_WARM_UP, StepMeasures, pooled, simulate
from megadapo.lab.simulate.task import Task, TaskSettings
from megadapo.rollout.config import SamplingConfig

BASELINES = ("rounds-1x", "rounds-3x", "first-finished")


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """Save a quarter of the time: garbage collection looks at millions of small objects."""
    gc.disable()
    yield
    gc.enable()


def results(
    sampling: SamplingConfig,
    num_engines: int,
    task: TaskSettings,
    steps: dict[str, int],
    seeds: Iterable[int] = (0,),
) -> dict[str, StepMeasures]:
    tasks = [Task(replace(task, seed=seed)) for seed in seeds]
    policies = policies_on_engines(sampling, EngineSettings(num_engines=num_engines))

    def simulated(policy: Policy) -> StepMeasures:
        # the baselines leave nothing to the next step
        num_warm_up = 0 if policy.name in BASELINES else NUM_WARM_UP
        options = {"num_steps": steps[policy.name], "num_warm_up": num_warm_up}
        return pooled([simulate(policy, known, **options) for known in tasks])

    return {policy.name: simulated(policy) for policy in policies if policy.name in steps}


@pytest.mark.slow
def test_order_of_the_policies_at_an_eighth_of_the_size():
    names = ("rounds-1x", "rounds-3x", "first-finished", "sync", "one_step_off", "partial")
    sampling, task = SamplingConfig(prompts_per_step=64), TaskSettings(keep_rate=0.55)
    found = results(sampling, 2, task, dict.fromkeys(names, 4))
    seconds = {name: one.step_s for name, one in found.items()}
    assert seconds["partial"] < 0.9 * seconds["sync"]
    assert seconds["sync"] < 0.8 * min(seconds["rounds-1x"], seconds["rounds-3x"])
    assert found["sync"].length_bias == 0.0 and found["sync"].staleness_max == 0
    assert abs(found["partial"].length_bias) < 0.03 and found["partial"].staleness_max <= 1
    assert found["first-finished"].length_bias < -0.02
    assert found["one_step_off"].staleness_mean == 1.0
    assert found["partial"].kept_tokens_trained > 0.95
    assert found["rounds-3x"].kept_tokens_trained < 0.8
    assert found["partial"].slot_use > found["sync"].slot_use


@pytest.mark.slow
def test_a_group_that_misses_its_batch_leaves_no_bias():
    """Kept surplus groups would prefer short ones; few responses make such a bias larger."""
    # only the bias of partial is a mean of chances
    steps = {"sync": 4, "one_step_off": 4, "partial": 16}
    sampling = SamplingConfig(prompts_per_step=32)
    task = TaskSettings(keep_rate=0.55, num_responses=4, between_prompts=0.0, length_difficulty=0.0)
    found = results(sampling, 4, task, steps, range(4))
    # whether a group is drawn again depends on its place alone
    assert found["sync"].length_bias == found["one_step_off"].length_bias == 0.0
    assert abs(found["partial"].length_bias) < 0.002


def test_batches_without_mixed_groups_are_measured():
    """Without dynamic sampling they are used too: the share of mixed tokens divided by 0."""
    sampling = SamplingConfig(prompts_per_step=8, selection="all")
    found = results(sampling, 1, TaskSettings(keep_rate=1e-6), {"sync": 1})
    assert found["sync"].kept_tokens_trained == 1.0


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("keep_rate", "size", "num_engines", "num_steps", "sync", "partial"),
    [
        pytest.param(0.35, 512, 16, 4, 0.88, 0.70, id="throughput, few kept"),
        pytest.param(0.55, 512, 16, 4, 0.68, 0.52, id="throughput, many kept"),
        pytest.param(0.35, 128, 32, 24, 1.0, 0.65, id="tail, few kept"),
        pytest.param(0.55, 128, 32, 24, 1.0, 0.78, id="tail, many kept"),
    ],
)
def test_sampler_meets_its_bars(keep_rate, size, num_engines, num_steps, sync, partial):
    """Rounds of three batches sometimes need a second round, which decides their time.

    With few groups kept of many that happens in 1 to 37 % of the steps, by seed (the drawn prompts
    keep 0.337 to 0.361 of their groups), so these cases run more seeds.
    """
    seeds = range(8) if (keep_rate, size) == (0.35, 512) else range(2)
    steps = dict.fromkeys(("rounds-1x", "first-finished", "sync", "partial"), num_steps)
    steps["rounds-3x"] = max(16, num_steps)
    sampling, task = SamplingConfig(prompts_per_step=size), TaskSettings(keep_rate=keep_rate)
    found = results(sampling, num_engines, task, steps, seeds)
    seconds = {name: one.step_s for name, one in found.items()}
    assert seconds["sync"] <= seconds["rounds-1x"]
    assert seconds["sync"] <= sync * seconds["rounds-3x"]
    assert seconds["partial"] <= partial * seconds["rounds-3x"]
    assert min(found[name].kept_tokens_trained for name in ("sync", "partial")) >= 0.95
    assert found["sync"].length_bias == 0.0 and abs(found["partial"].length_bias) < 0.01
    assert found["first-finished"].length_bias < -0.02
