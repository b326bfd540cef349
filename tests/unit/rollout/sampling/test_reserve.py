"""The reserve: groups that are forgotten or changed by saving."""

import json

import numpy as np
import pytest

from megadapo.data.group import Response, encode_group
from megadapo.rollout.sampling.reserve import OpenEntry, Reserve
from megadapo.rollout.sampling.statistics import RejectedGroups, StepCounters
from tests.support.rollout.groups import EXPERTS, make_group


def test_finished_group_is_kept_if_it_is_mixed():
    reserve = Reserve(open={index: OpenEntry(5, ()) for index in (1, 2)})
    reserve.finish(make_group(1), is_mixed=True)
    reserve.finish(make_group(2), is_mixed=False)
    assert (reserve.versions, reserve.finished.keys(), reserve.open) == ({1: 5}, {1}, {})
    again = Reserve.from_json(json.loads(json.dumps(reserve.to_json(), allow_nan=False)))
    assert again.versions == {1: 5}
    assert encode_group(again.take(1)) == encode_group(make_group(1))
    assert again == Reserve()


def test_copy_does_not_change_with_the_reserve():
    """A checkpoint is encoded in a thread while the next groups finish."""
    reserve = Reserve(open={1: OpenEntry(5, ())})
    copy, text = reserve.copy(), json.dumps(reserve.to_json())
    reserve.finish(make_group(1), is_mixed=True)
    assert json.dumps(copy.to_json()) == text


def test_counts_of_a_batch_that_is_not_taken_survive_json():
    """A resumed run would report the accuracy of later groups only."""
    counters = StepCounters(rejected=RejectedGroups("all"), num_stopped=3, overdue_seconds=0.5)
    for index in range(3):
        counters.add(make_group(index), is_mixed=index == 1)
    counters.unscored.append(make_group(7))
    copy = counters.copy()
    text = json.dumps(counters.to_json(), allow_nan=False)
    again = StepCounters.from_json(json.loads(text), "all")
    assert repr(again.stats) == repr(counters.stats)
    assert (again.num_stopped, again.overdue_seconds) == (3, 0.5)
    assert json.dumps(again.to_json()) == text
    counters.add(make_group(4), is_mixed=False)
    assert json.dumps(copy.to_json()) == text


def test_unfinished_group_survives_json_exactly():
    """A changed token would make the engine continue another text."""
    responses = tuple(
        Response(
            token_ids=np.arange(size, dtype=np.int32),
            logprobs=np.linspace(-1.0, 0.0, size, dtype=np.float32),
            finish_reason=reason,
            text="x" * size,
            policy_versions=np.sort(np.arange(size) % 3).astype(np.int32) + 4,
            experts=EXPERTS[: 1 + size] if size else None,
        )
        for size, reason in ((0, "unfinished"), (7, "unfinished"), (5, "stop"))
    )
    reserve = Reserve(open={9: OpenEntry(4, responses)})
    after = Reserve.from_json(json.loads(json.dumps(reserve.to_json(), allow_nan=False)))
    assert after.open.keys() == {9} and after.open[9].version == 4
    again = after.open[9].responses
    assert [one.oldest_version for one in again] == [float("inf"), 4, 4]
    for one, two in zip(responses, again, strict=True):
        assert (one.text, one.finish_reason) == (two.text, two.finish_reason)
        for name in ("token_ids", "logprobs", "policy_versions", "experts"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


@pytest.mark.parametrize("part", ["finished", "open"])
def test_damaged_state_is_rejected(part):
    reserve = Reserve(open={9: OpenEntry(4, ())})
    reserve.open[8] = OpenEntry(4, ())
    reserve.finish(make_group(8), is_mixed=True)
    state = reserve.to_json()
    del state[part][0]["version"]
    with pytest.raises(KeyError):
        Reserve.from_json(state)
