"""Differences of two schedules that are not named, or not noticed."""

from dataclasses import replace

import numpy as np
import pytest

from megadapo.errors import OracleError
from megadapo.rollout.sampling.schedule import SamplingSchedule
from tests.support.rollout.groups import BATCH, COUNTS, make_group, write_schedule


def changed(group, **values):
    responses = list(group.responses)
    responses[1] = replace(responses[1], **values)
    return replace(group, responses=tuple(responses))


LAST = BATCH[1]
OTHER_TOKEN = LAST.responses[1].token_ids.copy()
OTHER_TOKEN[2] += 1
OTHER_VERSION = LAST.responses[1].policy_versions.copy()
OTHER_VERSION[0] += 1
OTHER_LOGPROB = np.nextafter(LAST.responses[1].logprobs, np.float32(9))
OTHER_REWARD = (replace(LAST.scores[0], reward=0.5), LAST.scores[1])


VALUES = "5: its tokens, log-probs, versions or rewards differ"


@pytest.mark.parametrize(
    ("batch", "place"),
    [
        ([BATCH[0], changed(LAST, token_ids=OTHER_TOKEN)], VALUES),
        ([BATCH[0], changed(LAST, policy_versions=OTHER_VERSION)], VALUES),
        ([BATCH[0], changed(LAST, logprobs=OTHER_LOGPROB)], VALUES),
        ([BATCH[0], replace(LAST, scores=OTHER_REWARD)], VALUES),
        ([BATCH[0]], "5: it is in the batch of the schedule alone"),
        ([BATCH[0], make_group(7)], "5: it is in the batch of the schedule alone"),
        ([*BATCH, make_group(7)], "7: it is in the batch of the run alone"),
    ],
    ids=["token", "version", "log-prob", "reward", "missing group", "other group", "one too many"],
)
def test_difference_of_a_batch_names_step_and_group(tmp_path, batch, place):
    schedule = SamplingSchedule(None, "rules", source=write_schedule(tmp_path / "a"))
    schedule.pause(0, "00" * 32, 0, {})
    with pytest.raises(OracleError, match=f"^step 1, group {place}. The run does not repeat"):
        schedule.take(1, 8, [4, 6, 7], batch)


@pytest.mark.parametrize(
    ("weights", "counts", "place"),
    [
        ("bb" * 32, COUNTS, "version 1: the weights differ"),
        (
            "aa" * 32,
            COUNTS | {4: (7, 1, 12)},
            "version 1, group 4, response 1: it has 0 tokens at the pause in the schedule, and 1",
        ),
        ("aa" * 32, {6: (0, 0, 0)}, "version 1, group 4: it is open in the schedule alone"),
    ],
)
def test_difference_of_a_pause_names_version_group_and_response(tmp_path, weights, counts, place):
    schedule = SamplingSchedule(None, "rules", source=write_schedule(tmp_path / "a"))
    schedule.pause(0, "00" * 32, 0, {})
    schedule.take(1, 8, [4, 6, 7], BATCH)
    with pytest.raises(OracleError, match=place):
        schedule.pause(1, weights, 9, counts)


def test_differences_are_counted_if_bits_may_differ(tmp_path, caplog):
    schedule = SamplingSchedule(
        None, "rules", source=write_schedule(tmp_path / "a"), is_strict=False
    )
    schedule.pause(0, "11" * 32, 0, {})
    schedule.take(1, 8, [4, 6, 7], BATCH[:1])
    schedule.pause(1, "aa" * 32, 9, COUNTS)
    assert schedule.num_differences == 2 and schedule.next is None
    zeros, ones = "0" * 16, "1" * 16
    assert caplog.messages == [
        f"difference 1 from the schedule: version 0: the weights differ ({zeros} and {ones})",
        "difference 2 from the schedule: step 1, group 5: it is in the batch of the schedule alone",
    ]
