"""Branching points, compared with hand-computed numbers."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megadapo.algorithm.groups import Branch
from megadapo.data.group import Response, Turn
from megadapo.rollout.config import BranchingConfig, SamplingConfig
from megadapo.rollout.engine import in_flight
from megadapo.rollout.engine.in_flight import (
    choose_branches,
    normalized_entropy,
    response_prefix,
)
from megadapo.rollout.types import OpenGroup, SamplingSettings

ON = BranchingConfig(initial_rollouts=2)


def table(*positions: list[float]) -> SimpleNamespace:
    """Return a table; each position has the probabilities of the sampled and the top tokens."""
    ends = np.cumsum([len(position) for position in positions]).tolist()
    logs = [math.log(p) if p else -math.inf for position in positions for p in position]
    return SimpleNamespace(
        start_indices=[0, *ends][: len(ends)],
        end_indices=ends,
        token_ids=[0] * len(logs),
        logprobs=logs,
    )


def response(start: float, *calls: tuple[int, float], branch: Branch | None = None) -> Response:
    return Response(
        token_ids=np.zeros(40, dtype=np.int32),
        logprobs=np.zeros(40, dtype=np.float32),
        finish_reason="stop",
        text="",
        policy_versions=np.zeros(40, dtype=np.int32),
        turns=tuple(Turn(end=end, entropy=entropy) for end, entropy in calls),
        entropy=start,
        branch=branch,
    )


def branches(responses: list[Response], config: BranchingConfig = ON, **numbers: int):
    seeds = range(100, 100 + len(responses))
    return choose_branches(responses, seeds, config, **{"num_seen": 0, "num_left": 9, **numbers})


def test_entropy_is_the_mean_of_the_first_positions_divided_by_log_v():
    """The sampled token is not counted twice; a token of probability 0 adds 0."""
    positions = table([0.5, 0.5, 0.25], [0.1, 1.0, 0.0], [0.9, 0.3, 0.3])
    first = 0.5 * math.log(2) + 0.25 * math.log(4)
    found = normalized_entropy(positions, num_tokens=2, vocab_size=16)
    assert found == pytest.approx((first + 0.0) / 2 / math.log(16))
    uniform = table([0.25] * 5)
    assert normalized_entropy(uniform, num_tokens=20, vocab_size=4) == pytest.approx(1.0)
    assert math.isnan(normalized_entropy(table(), num_tokens=20, vocab_size=4))


def test_responses_branch_at_entropy_rises_call_by_call(monkeypatch):
    """First calls come before second ones; unmeasured entropies never branch."""
    first = response(0.1, (10, 0.2), (20, 0.1), (30, 0.3))
    second = response(0.1, (12, 0.05), (22, 0.4), (32, math.nan))
    expected = [Branch(0, 10), Branch(1, 22), Branch(0, 30)]
    assert branches([first, second]) == expected
    assert branches([first, second], num_left=2) == expected[:2]
    wide = ON.model_copy(update={"beam_size": 3})
    assert branches([first, second], wide, num_left=5) == [
        *[Branch(0, 10)] * 2,
        *[Branch(1, 22)] * 2,
        Branch(0, 30),
    ]
    # alpha + beta dH with the paper's 0.5 and 0.2: rises of 0.1, 0.2 and 0.3 give 0.52, 0.54, 0.56
    for threshold, num_left in ((0.519, 3), (0.521, 2), (0.541, 1), (0.559, 1), (0.561, 0)):
        monkeypatch.setattr(in_flight, "THRESHOLD", threshold)
        assert len(branches([first, second])) == num_left
    monkeypatch.undo()
    unmeasured = response(math.nan, (10, 0.9))
    assert branches([unmeasured]) == [] and branches([]) == []


def test_branch_considers_its_own_calls_only():
    """Its parent's calls and the responses of an earlier round were considered before."""
    parent = response(0.1, (10, 0.2))
    child = response(0.1, (10, 0.9), (25, 0.2), branch=Branch(0, 10))
    assert branches([parent, child], num_seen=1) == [Branch(1, 25)]


def test_draws_follow_the_probability_and_repeat():
    """Half of the points without a rise branch."""
    config = BranchingConfig(initial_rollouts=2, decision="draw")
    responses = [response(0.1, (10, 0.1)) for _ in range(4000)]
    found = branches(responses, config, num_left=4000)
    assert abs(len(found) - 2000) < 5 * math.sqrt(1000)
    assert branches(responses, config, num_left=4000) == found


def test_draws_use_the_scale_of_the_authors_code():
    """ARPO's code sums the entropy of 20 positions over log V, for which its weight 0.2 was made.
    By the mean, 0.3 nats more at each position would give 0.505 instead of 0.601: a coin flip."""
    rise = 0.3 / math.log(152_064)
    assert 20 * rise == pytest.approx(0.503, abs=5e-4)
    config = BranchingConfig(initial_rollouts=2, decision="draw")
    responses = [response(0.1, (10, 0.1 + rise)) for _ in range(20_000)]
    share = len(branches(responses, config, num_left=20_000)) / 20_000
    assert share == pytest.approx(0.601, abs=4 * math.sqrt(0.601 * 0.399 / 20_000))
    # fewer positions have a smaller sum
    fewer = config.model_copy(update={"num_tokens": 10})
    share = len(branches(responses, fewer, num_left=20_000)) / 20_000
    assert share == pytest.approx(0.550, abs=4 * math.sqrt(0.25 / 20_000))


def test_branching_group_takes_as_many_slots_as_start_at_the_prompt():
    """Counting all of its responses would leave half of the slots empty."""
    plain = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=5)
    settings = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=5, branching=ON)
    seeds = (1, 2, 3, 4, 5)
    for one, expected in ((plain, 5), (settings, 2)):
        request = OpenGroup(key=0, prompt_ids=(1,), seeds=seeds, settings=one)
        assert request.num_at_once == expected
    assert SamplingConfig(responses_per_prompt=4, branching=ON).responses_at_once == 2


def test_branch_counts_what_its_environment_counted_in_the_turns_that_it_shares():
    """It counted from its branching point on only, so calls of its parent were missing."""
    turns = [
        Turn(end=end, metrics=(("search/calls", 1.0), ("python/calls", python)))
        for end, python in ((10, 0.0), (20, 2.0), (30, 1.0))
    ]
    whole = replace(response(0.1), turns=tuple(turns))
    assert whole.metrics == {"search/calls": 3.0, "python/calls": 3.0}
    for end, searches, python in ((10, 1.0, 0.0), (25, 2.0, 2.0)):
        found = response_prefix(whole, end, num_prompt=5).metrics
        assert found == {"search/calls": searches, "python/calls": python}
    assert response_prefix(whole, 9, num_prompt=5).metrics == {}
