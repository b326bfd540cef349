import json
import math

import numpy as np
import pytest

from megadapo.data.batch import Group, Sample
from megadapo.errors import CheckpointError
from megadapo.rollout.sampling.reserve import Reserve, Unfinished, decode_group, encode_group
from megadapo.rollout.types import Response
from tests.support.rollout.scripted_engines import make_prompts

EXPERTS = np.argsort(np.random.default_rng(0).random((9, 2, 4))).astype(np.uint8)[..., :3]


def make_group(order: int) -> Group:
    samples = tuple(
        Sample(
            prompt_ids=(5, 151_000, 7),
            response_ids=np.arange(order, order + length, dtype=np.int32),
            logprobs_rollout=np.array(
                ([math.nan, -math.inf, -1.5, -0.1] * 3)[:length], dtype=np.float32
            ),
            finish_reason=reason,
            policy_versions=np.repeat([3, 4], [length // 2, length - length // 2]).astype(np.int32),
            text="5 \u00e9\n\x00",
            experts=EXPERTS[: 2 + length],
        )
        for length, reason in ((1, "stop"), (7, "length"))
    )
    return Group(
        order=order,
        prompt=make_prompts(order + 1)[order],
        samples=samples,
        rewards=(1.0, -1.0),
        correct=(True, False),
        answers=("5", "[INVALID]"),
        symbolic_correct=(None, False),
        reward_parts=((("judge", 0.1), ("judge/failed", 0.0)), ()),
        steps=((), ((3, 0.1), (7, -1.0))),
    )


def take(reserve: Reserve, num_groups: int) -> list[Group]:
    groups, expired = reserve.take(num_groups, oldest_version=0)
    assert expired == []
    return groups


def test_what_came_first_goes_first():
    reserve = Reserve(limit=10)
    reserve.put([make_group(0), make_group(1)])
    reserve.put([make_group(2)])
    assert [group.order for group in take(reserve, 2)] == [0, 1]
    assert [group.order for group in take(reserve, 5)] == [2]
    assert take(reserve, 1) == []


def test_what_has_grown_too_old_is_handed_over_and_not_forgotten():
    """Counted as used, it would be trained on with weights it knows nothing of."""
    reserve = Reserve(limit=10)
    reserve.put([make_group(order) for order in range(3)])
    oldest = make_group(0).oldest_version
    assert reserve.take(1, oldest_version=oldest + 1)[0] == []
    reserve.put([make_group(3)])
    usable, expired = reserve.take(1, oldest_version=oldest + 1)
    assert (usable, [group.order for group in expired], len(reserve)) == ([], [3], 0)


def test_an_unfinished_group_survives_json_exactly():
    """A token more or less, and what follows would continue another text."""
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
    before = Unfinished(order=9, responses=responses)
    after = Unfinished.from_json(json.loads(json.dumps(before.to_json(), allow_nan=False)))
    assert (after.order, after.oldest_version) == (9, 4)
    for one, two in zip(before.responses, after.responses, strict=True):
        assert (one.text, one.finish_reason) == (two.text, two.finish_reason)
        np.testing.assert_array_equal(one.token_ids, two.token_ids)
        np.testing.assert_array_equal(one.logprobs, two.logprobs)
        np.testing.assert_array_equal(one.policy_versions, two.policy_versions)
        np.testing.assert_array_equal(one.experts, two.experts)
    assert Unfinished(order=9, responses=responses[:1]).oldest_version == float("inf")


def test_the_limit_holds_and_what_is_thrown_away_is_known():
    reserve = Reserve(limit=3)
    assert reserve.put([make_group(i) for i in range(2)]) == 2
    assert reserve.put([make_group(i) for i in range(2, 6)]) == 1
    assert [group.order for group in take(reserve, 9)] == [0, 1, 2]
    assert Reserve(limit=0).put([make_group(0)]) == 0


def test_groups_survive_json_exactly():
    """Lost digits of a log-prob would make a resumed run differ from an uninterrupted one."""
    reserve, other = Reserve(limit=5), Reserve(limit=5)
    reserve.put([make_group(i) for i in range(4)])
    other.load_state_dict(json.loads(json.dumps(reserve.state_dict(), allow_nan=False)))
    before, after = take(reserve, 5), take(other, 5)
    for one, two in zip(before, after, strict=True):
        assert encode_group(one) == encode_group(two)
        for sample, same in zip(one.samples, two.samples, strict=True):
            assert sample.prompt_ids == same.prompt_ids
            np.testing.assert_array_equal(sample.response_ids, same.response_ids)
            np.testing.assert_array_equal(sample.logprobs_rollout, same.logprobs_rollout)
            np.testing.assert_array_equal(sample.policy_versions, same.policy_versions)
            np.testing.assert_array_equal(sample.experts, same.experts)


def test_a_group_is_encoded_once_however_many_states_it_is_in():
    """A reserve of long answers is megabytes, and there is a state after every step."""
    reserve = Reserve(limit=5)
    reserve.put([make_group(i) for i in range(3)])
    first = reserve.state_dict()
    take(reserve, 1)
    reserve.put([make_group(9)])
    second = reserve.state_dict()
    assert [entry["order"] for entry in second] == [1, 2, 9]
    assert second[0] is first[1] and second[1] is first[2]


def test_a_state_without_the_verifiers_answers_still_loads():
    """A run of before they were saved could not be resumed."""
    entry = encode_group(make_group(1))
    assert decode_group(entry).answers == make_group(1).answers
    assert decode_group(entry).symbolic_correct == (None, False)
    del entry["answers"], entry["symbolic_correct"]
    group = decode_group(entry)
    assert (group.answers, group.symbolic_correct) == (("", ""), (None, None))


def test_a_state_with_one_version_a_response_still_loads():
    entry = encode_group(make_group(1))
    for sample in entry["samples"]:
        del sample["policy_versions"]
        sample["policy_version"] = 6
    assert [s.policy_versions.tolist() for s in decode_group(entry).samples] == [[6], [6] * 7]


def test_a_smaller_limit_after_a_resume_keeps_the_oldest():
    reserve, smaller = Reserve(limit=5), Reserve(limit=2)
    reserve.put([make_group(i) for i in range(4)])
    smaller.load_state_dict(reserve.state_dict())
    assert [group.order for group in take(smaller, 5)] == [0, 1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry.pop("samples"),
        lambda entry: entry["samples"][0].update(response_ids="not base64!"),
        lambda entry: entry["samples"][0].update(response_ids="AA!AAAA=="),
        lambda entry: entry["samples"][0].update(logprobs="AAAA"),
        lambda entry: entry.update(prompt=None),
        lambda entry: entry["samples"][0].update(policy_versions=[[4, 2]]),
    ],
)
def test_damage_is_refused(damage):
    entry = encode_group(make_group(1))
    assert decode_group(entry).order == 1
    damage(entry)
    with pytest.raises(CheckpointError, match="reserve"):
        Reserve(limit=3).load_state_dict([entry])
