"""Runs whose batches follow the engines' speed: repeated by their schedule, and resumed."""

import json
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest

from megadapo.data.group import Group
from megadapo.errors import OracleError
from megadapo.rollout.journal.journal import VERSION, Journal
from megadapo.rollout.journal.record_log import JOURNAL_FOLDER
from megadapo.rollout.sampling.schedule import WEIGHTS_DIGITS, SamplingSchedule, Take
from tests.support.rollout.clocked_engines import ClockedEngines, weights_after
from tests.support.rollout.groups import BATCH, COUNTS, make_group, payloads, write_schedule
from tests.support.rollout.samplers import contents, make_sampler, saved_state
from tests.support.rollout.scripted_engines import AtOnce, Slowly

ASYNC = {"mode": "async", "max_staleness": 2, "num_prompts": 1000}
PARTIAL = {"mode": "partial", "max_staleness": 2, "num_prompts": 1000}
SMALL = {"num_prompts": 40}
"""Prompts that are requested again after few steps."""
LAST = BATCH[1]
OTHER_TOKEN = LAST.responses[1].token_ids.copy()
OTHER_VERSION = LAST.responses[1].policy_versions.copy()
OTHER_LOGPROB = np.nextafter(LAST.responses[1].logprobs, np.float32(9))
OTHER_REWARD = (replace(LAST.scores[0], reward=0.5), LAST.scores[1])
VALUES = "5: its tokens, log-probs, versions or rewards differ"


class Run:
    """A run of sampler and engines, whose driver may be killed and resumed."""

    def __init__(
        self,
        mode,
        clock,
        schedule,
        *,
        state=None,
        version=0,
        weights="start",
        journal=None,
        executor=AtOnce,
        **engines,
    ):
        self.engines = ClockedEngines(clock, **engines)
        self.engines.policy_version = version
        self.schedule, self.clock = schedule, clock
        self.sampler = make_sampler(
            self.engines,
            saved_groups="all",
            sampler={"schedule": schedule, "new_executor": executor, "journal": journal},
            **mode,
        )
        if state is not None:
            self.sampler.load_state_dict(json.loads(state))
        self.weights = weights
        self.batches, self.states, self.fingerprints = [], [], []
        self.sampler.pause_for_weights()
        self.sampler.resume_sampling(version, weights)

    def steps(self, number, *, resizes=False):
        for _ in range(number):
            self.step(resizes=resizes)
        return self.batches

    def step(self, *, resizes=False, num_turns=None):
        while not self.sampler.can_take:
            self.sampler.turn()
        batch = self.sampler.take()
        self.batches.append(batch)
        if self.sampler.config.overlaps:
            # the trainer's time, in turns of the engines
            for _ in range(self.clock.randint(0, 6) if num_turns is None else num_turns):
                self.sampler.turn()
            while not self.sampler.can_pause:
                self.sampler.turn()
        if resizes:
            self.engines.resize(self.clock.randint(1, 3))
        self.sampler.pause_for_weights()
        version = self.engines.policy_version = self.engines.policy_version + 1
        self.weights = weights_after(version, batch)
        self.sampler.resume_sampling(version, self.weights)
        self.fingerprints.append(self.weights)
        if self.sampler.config.overlaps and self.sampler.config.carries:
            # the driver saves its state while the sampler's thread has gone on
            for _ in range(self.clock.randint(0, 2)):
                self.sampler.turn()
        self.states.append(json.dumps(saved_state(self.sampler)))


def repeated(source, path):
    return SamplingSchedule(path, source=source)


@pytest.mark.parametrize(
    "seed",
    [
        *range(3),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 8)),
        *(pytest.param(seed, marks=pytest.mark.full) for seed in range(8, 100)),
    ],
)
def test_random_schedule_is_repeated(seed, tmp_path):
    """One to three engines at random speeds, which join, leave and lose their groups, slow scoring,
    and a driver that is killed, whose journal has some groups: the repetition, which has none of
    these, has the batches, weights and records of what happened."""
    clock = random.Random(seed)
    mode = clock.choice([ASYNC, ASYNC, PARTIAL]) | {"max_staleness": clock.randint(2, 4)}
    mode |= clock.choice([{}, {}, {"num_prompts": 40}])
    engines = {"num_engines": clock.randint(1, 3), "loss": clock.choice([0.0, 0.02, 0.1])}
    if clock.random() < 0.5:
        engines |= {"executor": lambda: Slowly(clock)}
    engines |= {"journal": Journal(Group, tmp_path / JOURNAL_FOLDER, "settings", name=VERSION)}
    resizes, num_steps = clock.random() < 0.5, 8
    run = Run(mode, clock, SamplingSchedule(tmp_path / "a"), **engines)
    batches, weights, states = run.steps(num_steps, resizes=resizes), run.fingerprints, run.states
    for _ in range(clock.randint(0, 2)):
        # killed at a publication, and resumed from an earlier checkpoint, maybe without its last
        # record; it repeats its own schedule and goes on
        saved = clock.randint(1, num_steps - 1)
        state, at = states[saved - 1], weights[saved - 1]
        run.schedule.close()
        if clock.random() < 0.5:
            (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:-3])
        engines |= {"num_engines": clock.randint(1, 3), "version": saved, "weights": at}
        run = Run(mode, clock, SamplingSchedule(tmp_path / "a"), state=state, **engines)
        batches = batches[:saved] + run.steps(num_steps - saved, resizes=resizes)
        weights = weights[:saved] + run.fingerprints
        states = states[:saved] + run.states
    run.schedule.close()
    other = random.Random(1000 + seed)
    source = repeated(tmp_path / "a", tmp_path / "b")
    again = Run(mode, other, source, num_engines=1 + seed % 3, slots=21)
    assert contents(again.steps(num_steps)) == contents(batches)
    assert again.fingerprints == weights
    again.schedule.close()
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"mode": "rounds", "prompts_per_round": 24},
        {"mode": "one_step_off", "max_staleness": 1},
        PARTIAL | SMALL,
        ASYNC | SMALL,
    ],
    ids=["sync", "rounds", "one_step_off", "partial", "async"],
)
def test_run_resumed_at_a_cut_equals_an_undisturbed_one(mode, tmp_path):
    """State that a checkpoint lacks, or that decoding changes, would show in a later batch.

    The resumed run has other engines, so only state, seed and schedule can be what repeats it.
    """
    mode, num_steps = SMALL | mode, 6
    first = Run(mode, random.Random(1), SamplingSchedule(tmp_path / "a"), num_engines=2)
    expected = contents(first.steps(num_steps))
    first.schedule.close()
    carries = first.sampler.config.carries
    for at in range(1, num_steps):
        path = tmp_path / f"from-{at}"
        if carries:
            shutil.copy(tmp_path / "a", path)
        state, known = first.states[at - 1], first.fingerprints[at - 1]
        engines = {"num_engines": 1 + at % 3, "slots": 21, "version": at, "weights": known}
        resumed = Run(mode, random.Random(at), SamplingSchedule(path), state=state, **engines)
        if carries or not first.sampler.config.overlaps:
            assert json.dumps(saved_state(resumed.sampler)) == state, "decoding changed the state"
        assert contents(resumed.steps(num_steps - at)) == expected[at:]
        assert resumed.fingerprints == first.fingerprints[at:]
        resumed.schedule.close()
        if carries:
            assert path.read_bytes() == (tmp_path / "a").read_bytes()
        # each step has a take and a pause, and weights are also published before the first
        assert resumed.schedule.position == (2 * num_steps + 1 if carries else 0)


def test_async_trains_every_mixed_group_once_and_none_too_old():
    mode, oldest = ASYNC | {"max_staleness": 3}, 0
    for seed in range(3):
        run = Run(mode, random.Random(seed), SamplingSchedule(), num_engines=3, slots=90)
        batches = run.steps(14)
        trained = [group.prompt_index for batch in batches for group in batch.groups]
        assert len(trained) == len(set(trained)) == 14 * 8
        for version, batch in enumerate(batches):
            assert len(batch.dropped) == batch.counts["groups/stopped"] == 0
            ages = [version - group.oldest_version for group in batch.groups]
            oldest = max(oldest, *ages)
            assert max(ages) <= 3
        state = json.loads(run.states[-1])
        waiting = set(map(int, state["reserve"]["open"]))
        seen = {s.group.prompt_index for b in batches for s in b.saved}
        assert set(range(state["cursor"]["next_index"])) <= seen | waiting | {
            entry["prompt_index"] for entry in state["counters"]["stats"]
        }
    assert oldest == 3, "groups were awaited although a later step may train on them"


def test_records_name_the_batches_and_weights(tmp_path):
    """A digest of other groups would repeat too, and so compare nothing that is trained.

    Journals are deleted by their version, and used by their weights.
    """
    schedule = SamplingSchedule()
    journal = Journal(Group, tmp_path / JOURNAL_FOLDER, "settings", name=VERSION)
    run = Run(ASYNC, random.Random(0), schedule, num_engines=2, journal=journal)
    batches, takes, pauses = run.steps(4), [], []
    for position in range(schedule.position):
        schedule.resume_at(position)
        record = schedule.next
        if isinstance(record, Take):
            takes.append((record.step, set(record.digests)))
        else:
            pauses.append((record.policy_version, record.weights))
    groups = [{group.prompt_index for group in batch.groups} for batch in batches]
    assert takes == list(enumerate(groups, start=1))
    weights = [one[:WEIGHTS_DIGITS] for one in ("start", *run.fingerprints)]
    assert pauses == list(enumerate(weights))
    known = [json.loads(payloads(path)[0]) for path in (tmp_path / JOURNAL_FOLDER).iterdir()]
    known = {header["version"]: header["weights"] for header in known}
    assert len(known) > 2
    assert known.items() <= dict(enumerate(("start", *run.fingerprints))).items()
    run.sampler.pause_for_weights()
    run.sampler.resume_sampling(5, "weights")
    assert not run.sampler._digests, "digests of earlier requests fill the memory"


def test_fast_engines_do_not_make_tokens_old():
    """Catches engines that fill the whole staleness with batches for which no one waits."""
    run = Run(ASYNC | {"max_staleness": 4}, random.Random(1), SamplingSchedule(), slots=600)
    run.engines._speeds = [12]
    for _ in range(14):
        run.step(num_turns=60)
    ages = [
        version - group.oldest_version
        for version, batch in enumerate(run.batches)
        for group in batch.groups
    ]
    # the first batches were requested before anything was known of the engines' speed
    assert max(ages[:48]) == 3 and max(ages[48:]) == 2


class Steady:
    """A clock without chance: each turn has the same number of tokens."""

    def randint(self, low, high):
        return high if high == 12 else low

    def randrange(self, stop):
        return 0

    def choice(self, values):
        return values[-1]

    def shuffle(self, values):
        pass

    def random(self):
        return 1.0


def test_resumed_run_decides_as_an_undisturbed_one(tmp_path):
    """Engines that are faster than the trainer request less in advance, which a resumed run forgot:
    its tokens were as old as max_staleness allows, until it had found out again."""
    mode, at, num_steps = ASYNC | {"max_staleness": 4}, 8, 12
    first = Run(mode, Steady(), SamplingSchedule(tmp_path / "a"), slots=600)
    for step in range(num_steps):
        if step == at:
            shutil.copy(tmp_path / "a", tmp_path / "b")
        first.step(num_turns=60)
    saved = {"state": first.states[at - 1], "version": at, "weights": first.fingerprints[at - 1]}
    resumed = Run(mode, Steady(), SamplingSchedule(tmp_path / "b"), slots=600, **saved)
    for _ in range(at, num_steps):
        resumed.step(num_turns=60)
    assert contents(resumed.batches) == contents(first.batches[at:])
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


def changed(group, **values):
    responses = list(group.responses)
    responses[1] = replace(responses[1], **values)
    return replace(group, responses=tuple(responses))


OTHER_TOKEN[2] += 1
OTHER_VERSION[0] += 1


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
