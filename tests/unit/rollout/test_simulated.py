"""Training with the ages of a simulated cluster's tokens, on engines of any speed."""

import random
from collections import Counter

import numpy as np
import pytest

from megadapo.data.prompts import PromptStream
from megadapo.errors import ConfigError
from megadapo.rollout.config import SamplingConfig
from megadapo.rollout.simulated import SimulatedSampler, SimulatedSchedule, ages_of
from megadapo.rollout.types import SamplingSettings
from tests.support.rollout.clocked_engines import ClockedEngines
from tests.support.rollout.samplers import HALF, MAX_TOKENS, contents, saved_state
from tests.support.rollout.scripted_engines import (
    AtOnce,
    FailsOn,
    PlainTokenizer,
    RightAtLeast,
    ScriptedEngines,
    make_prompts,
)

STALENESS, SIZE, RESPONSES = 3, 8, 4


def schedule(*, num_steps=12, size=SIZE, responses=RESPONSES, seed=0) -> SimulatedSchedule:
    """Return the ages of groups that begin, end and are trained in random periods."""
    source = random.Random(seed)

    def group(step):
        first = step - 1 - source.randint(0, min(STALENESS, step - 1))
        num_periods = source.randint(1, step - first)
        lengths = [source.randint(1, 1000) for _ in range(responses)]
        # all of them run at the same speed
        period = -(-max(lengths) // num_periods)
        return ages_of([first + np.arange(n) // period for n in lengths], step, STALENESS)

    return SimulatedSchedule(
        title="a cluster",
        max_staleness=STALENESS,
        responses_per_prompt=responses,
        batches=tuple(tuple(group(step) for _ in range(size)) for step in range(1, num_steps + 1)),
    )


class Run:
    """A run of sampler and engines, whose driver may be killed and resumed."""

    def __init__(
        self, simulated, engines, *, judge=None, max_tokens=MAX_TOKENS, state=None, version=0
    ):
        self.engines = engines
        engines.policy_version = version
        self.sampler = SimulatedSampler(
            simulated,
            self.engines,
            PromptStream(make_prompts(1000), 0),
            judge or RightAtLeast(HALF),
            SamplingConfig(
                mode="partial",
                max_staleness=STALENESS,
                prompts_per_step=SIZE,
                responses_per_prompt=RESPONSES,
            ),
            settings=SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=max_tokens),
            tokenizer=PlainTokenizer(),
            seed=0,
            saved_groups="all",
            new_executor=AtOnce,
        )
        if state is not None:
            self.sampler.load_state_dict(state)
        self.batches, self.states = [], []
        self.sampler.cut()
        self.sampler.go_on(version)

    def steps(self, number):
        for _ in range(number):
            self.batches.append(self.sampler.next_batch())
            self.sampler.cut()
            self.engines.policy_version += 1
            self.sampler.go_on(self.engines.policy_version)
            self.states.append(saved_state(self.sampler))
        return self.batches


def table(ages) -> np.ndarray:
    """Return the shares of at least 1, 2, ... publications, [responses, STALENESS]."""
    return np.array([[*shares, *[0] * (STALENESS - len(shares))] for shares in ages])


def ages(batches) -> list[Counter]:
    """Count the tokens of each batch by age."""
    return [
        Counter(
            int(age)
            for group in batch.groups
            for one in group.responses
            for age in step - 1 - one.policy_versions
        )
        for step, batch in enumerate(batches, 1)
    ]


def test_ages_are_shares_of_tokens_by_length():
    versions = [np.array([4, 4, 5, 6]), np.array([6]), np.array([3, 3])]
    # step 7 trains with weights 6
    assert ages_of(versions, 7, 3) == ((), (1000, 1000, 1000), (750, 500))


@pytest.mark.parametrize("seed", range(3))
def test_tokens_have_the_ages_of_the_simulation(seed):
    """Fails if a group is trained in another step, or is cut at another share."""
    simulated = schedule(seed=seed)
    # responses of other lengths, which no weights change
    run = Run(simulated, ScriptedEngines("at random"), max_tokens=1000, judge=RightAtLeast(2250))
    places = simulated.places(SIZE, RESPONSES)
    for step, batch in enumerate(run.steps(9), 1):
        expected = [place.ages for place in places if place.step == step]
        for group, place_ages in zip(batch.groups, expected, strict=True):
            versions = [one.policy_versions for one in group.responses]
            lengths = np.array(sorted(group.lengths))[:, None]
            error = (table(ages_of(versions, step, STALENESS)) - table(place_ages)) / 1000 * lengths
            assert np.abs(error).max() < 6, "tokens"


def test_speed_of_engines_decides_nothing():
    simulated = schedule()
    first = Run(simulated, ClockedEngines(random.Random(1), slots=12)).steps(9)
    second = Run(simulated, ClockedEngines(random.Random(2), num_engines=3, loss=0.02)).steps(9)
    assert contents(first) == contents(second)


def test_resumed_run_has_the_same_batches():
    simulated = schedule()
    whole = Run(simulated, ClockedEngines(random.Random(1)))
    whole.steps(9)
    rest = Run(simulated, ClockedEngines(random.Random(2)), state=whole.states[4], version=5)
    assert contents(rest.steps(4)) == contents(whole.batches[5:])


def test_responses_that_a_reward_failed_on_are_left_out():
    """Fails if a group with fewer responses than seeds goes back to the engines."""
    engines = ClockedEngines(random.Random(0))
    batches = Run(schedule(), engines, judge=FailsOn(0.1, HALF)).steps(9)
    assert any(group.failures for batch in batches for group in batch.groups)
    assert all(max(one) <= STALENESS for one in ages(batches))


def test_larger_batches_are_sampled():
    simulated = schedule(size=40, responses=9)
    assert (simulated.prompts_per_step, simulated.num_steps) == (40, 9)
    places = simulated.places(SIZE, RESPONSES)
    assert Counter(one.step for one in places) == dict.fromkeys(range(1, 13), SIZE)
    assert {len(one.ages) for one in places} == {RESPONSES}
    assert [one.version for one in places] == sorted(one.version for one in places)
    found = ages(Run(simulated, ClockedEngines(random.Random(0))).steps(9))
    assert all(max(one) <= STALENESS for one in found)


def test_file_survives_and_others_are_refused(tmp_path):
    path = tmp_path / "a.json"
    schedule().write(path)
    assert SimulatedSchedule.read(path) == schedule()
    for text in ("{}", "not json", '{"format":2,"batches":[]}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="a.json is no schedule of megadapo simulate"):
            SimulatedSchedule.read(path)
