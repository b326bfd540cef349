"""Several steps of one policy on the virtual clock, and what they come to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megadapo.lab.simulate.engines import EngineSettings, VirtualEngines
from megadapo.lab.simulate.policies import FillsBatches, Policy, TrainedGroup
from megadapo.lab.simulate.task import Draw, Task

NUM_STEPS = 4
NUM_WARM_UP = 4
"""Steps before those that count: the first has nothing left over from a step before it."""


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """What the steps that count came to."""

    name: str
    description: str
    seconds_per_batch: float
    """Mean time until a batch is full."""
    seconds_error: float | None
    """Standard error of that mean; none for one step."""
    seconds: tuple[float, ...]
    """Of each step."""
    generated_per_trained: float
    """Tokens generated for each token trained on."""
    kept_tokens_trained: float
    """Share trained on, of the tokens generated for groups with a signal."""
    length_bias: float
    """Mean response length of the groups trained on / that of all groups with a signal that were
    asked for from the first of them to the last, whenever they finish; minus 1."""
    staleness_mean: float
    """Publications between the weights that gave a token and those it is trained on."""
    staleness_max: int
    stale_token_share: float
    """Share of trained tokens that earlier weights gave."""
    slot_use: float
    """Mean running responses / rollout.max_num_seqs."""


def simulate(
    policy: Policy,
    engine_settings: EngineSettings,
    task: Task,
    *,
    num_steps: int = NUM_STEPS,
    num_warm_up: int = NUM_WARM_UP,
) -> PolicyResult:
    """Run a policy from a cold start; all of its batches are trained on at once.

    Raises:
        SamplingError: no batch can be filled.
    """
    engines = VirtualEngines(engine_settings, task, dealing=policy.dealing)
    source = policy.start(policy.sampling, engines, task)
    _run(source, engines, num_warm_up)
    while max(engines.asked, default=0) < policy.warm_up_epochs * task.settings.num_prompts:
        _run(source, engines, 1)
    before = _Counters.of(engines)
    steps = _run(source, engines, num_steps)
    return _result(
        policy, steps, _Counters.of(engines).since(before), engine_settings, engines.asked
    )


def pooled(results: Sequence[PolicyResult]) -> PolicyResult:
    """Return one result for repetitions of the same policy with as many steps each."""

    def mean(name: str) -> float:
        return float(np.mean([getattr(result, name) for result in results]))

    seconds = tuple(one for result in results for one in result.seconds)
    return replace(
        results[0],
        seconds_per_batch=mean("seconds_per_batch"),
        seconds_error=_standard_error(seconds),
        seconds=seconds,
        generated_per_trained=mean("generated_per_trained"),
        kept_tokens_trained=mean("kept_tokens_trained"),
        length_bias=mean("length_bias"),
        staleness_mean=mean("staleness_mean"),
        staleness_max=max(result.staleness_max for result in results),
        stale_token_share=mean("stale_token_share"),
        slot_use=mean("slot_use"),
    )


def _standard_error(seconds: Sequence[float]) -> float | None:
    if len(seconds) < 2:
        return None
    return float(np.std(seconds, ddof=1)) / math.sqrt(len(seconds))


@dataclass(frozen=True)
class _Step:
    seconds: float
    version: int
    """Of the engines' weights."""
    groups: Sequence[TrainedGroup]


@dataclass(frozen=True)
class _Counters:
    """What the engines have done."""

    seconds: float
    num_tokens: float
    signal_tokens: float
    running_seconds: float

    @classmethod
    def of(cls, engines: VirtualEngines) -> _Counters:
        engines.activity()  # brings every engine up to the present
        return cls(engines.now, engines.num_tokens, engines.signal_tokens, engines.running_seconds)

    def since(self, before: _Counters) -> _Counters:
        return _Counters(
            self.seconds - before.seconds,
            self.num_tokens - before.num_tokens,
            self.signal_tokens - before.signal_tokens,
            self.running_seconds - before.running_seconds,
        )


def _run(source: FillsBatches, engines: VirtualEngines, num_steps: int) -> list[_Step]:
    steps = []
    for _ in range(num_steps):
        start = engines.now
        groups = source.next_batch()
        steps.append(_Step(engines.now - start, engines.policy_version, groups))
        engines.publish()
    return steps


def _result(
    policy: Policy,
    steps: Sequence[_Step],
    done: _Counters,
    engine_settings: EngineSettings,
    asked: Mapping[int, Draw],
) -> PolicyResult:
    groups = [group for step in steps for group in step.groups]
    num_trained = sum(group.num_tokens for group in groups)
    # how many tokens are how far behind
    ages = sum(
        (
            _ages(group, step.version + policy.versions_behind)
            for step in steps
            for group in step.groups
        ),
        start=Counter[int](),
    )
    num_slots = engine_settings.num_engines * engine_settings.num_slots
    return PolicyResult(
        name=policy.name,
        description=policy.description,
        seconds_per_batch=done.seconds / len(steps),
        seconds_error=_standard_error([step.seconds for step in steps]),
        seconds=tuple(step.seconds for step in steps),
        generated_per_trained=done.num_tokens / num_trained,
        kept_tokens_trained=min(1.0, num_trained / done.signal_tokens),
        length_bias=_length_bias(groups, asked),
        staleness_mean=sum(age * number for age, number in ages.items()) / num_trained,
        staleness_max=max(age for age, number in ages.items() if number),
        stale_token_share=1.0 - ages[0] / num_trained,
        slot_use=done.running_seconds / done.seconds / num_slots,
    )


def _ages(group: TrainedGroup, version: int) -> Counter[int]:
    """Count a group's tokens by how many publications lie between them and `version`."""
    ages: Counter[int] = Counter()
    for versions in group.policy_versions:
        first, last = int(versions[0]), int(versions[-1])
        if first == last:  # they never decrease
            ages[version - first] += len(versions)
        else:
            for old, number in zip(*np.unique(versions, return_counts=True), strict=True):
                ages[version - int(old)] += int(number)
    return ages


def _length_bias(groups: Sequence[TrainedGroup], asked: Mapping[int, Draw]) -> float:
    kept = np.mean([asked[group.order].lengths.mean() for group in groups])
    first, last = min(group.order for group in groups), max(group.order for group in groups)
    everyone = np.mean(
        [
            draw.lengths.mean()
            for order, draw in asked.items()
            if first <= order <= last and draw.is_mixed
        ]
    )
    return float(kept / everyone) - 1.0
