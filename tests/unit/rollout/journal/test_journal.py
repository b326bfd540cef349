"""Would catch: a group that is generated twice after a kill, one of other weights or settings that
is trained on, and a run that a full or damaged disk ends or makes silently forget."""

from __future__ import annotations

import errno
import math
import os
import stat
from pathlib import Path

import pytest

from megadapo.rollout.journal import record_log
from megadapo.rollout.journal.journal import JOURNAL_FOLDER, Journal, forget_before
from megadapo.rollout.journal.repeated_steps import RepeatedSteps
from megadapo.rollout.sampling.ahead import AheadSampler
from megadapo.rollout.sampling.sampled_batch import GroupStats, SampledBatch
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.rollout.types import SamplingSettings
from tests.support.rollout.samplers import contents, make_sampler
from tests.support.rollout.scripted_engines import POLICY_VERSION, AtOnce, ScriptedEngines
from tests.unit.rollout.sampling.test_reserve import make_group

WEIGHTS = "weights"


class Killed(Exception):
    """The driver died."""


class Mortal(ScriptedEngines):
    """Engines whose driver is killed when so many groups have come back."""

    def __init__(self, lives: int, **keys) -> None:
        super().__init__(**keys)
        self._lives = lives

    def finished(self, timeout_s=None):
        if self.num_handed_back >= self._lives:
            raise Killed
        return super().finished(timeout_s)


def journal_in(
    folder: Path, *, weights: str = WEIGHTS, settings: str = "settings", version: int = 3
) -> Journal:
    journal = Journal(folder, settings, fsync="never")
    journal.begin(version, weights)
    return journal


def sampler_with(journal: Journal, engines: ScriptedEngines, **config) -> Sampler:
    # a group is in the journal when it is scored, not when it has come back
    return make_sampler(engines, sampler={"journal": journal, "scoring": AtOnce}, **config)


def killed_after(folder: Path, num_groups: int, **config) -> list[int]:
    """Orders of the groups that came back before the kill."""
    engines = Mortal(num_groups, finish="at random")
    with pytest.raises(Killed):
        sampler_with(journal_in(folder), engines, **config).next_batch()
    return [order for order in engines.asked if order not in engines._in_flight]


MODES = [{}, {"mode": "rounds"}, {"selection": "all"}, {"longest_first": True}]


@pytest.mark.parametrize("config", MODES)
@pytest.mark.parametrize("num_groups", [1, 7])
def test_a_killed_step_is_the_same_batch_and_asks_no_finished_group_again(
    tmp_path, config, num_groups
):
    config = {**config, "saved_groups": "all"}
    expected = make_sampler(ScriptedEngines(finish="at random"), **config).next_batch()
    finished = killed_after(tmp_path, num_groups, **config)
    engines = ScriptedEngines(finish="short first")
    batch = sampler_with(journal_in(tmp_path), engines, **config).next_batch()
    assert contents([batch]) == contents([expected])
    assert batch.num_from_journal > 0
    assert not set(engines.asked) & set(finished)
    again = ScriptedEngines()
    last = sampler_with(journal_in(tmp_path), again, **config).next_batch()
    assert contents([last]) == contents([expected])
    assert not set(again.asked) & {o for o in engines.asked if o not in engines._in_flight}


@pytest.mark.parametrize("num_groups", [1, 4])
def test_stopped_answers_go_on_from_the_same_tokens(tmp_path, num_groups):
    """The journal has a carried group under what it was asked with; one that began with other
    tokens is another question."""
    config = {"mode": "partial", "max_staleness": 1}
    first = make_sampler(ScriptedEngines(finish="last first", slots=60), **config)
    first.next_batch()
    state = first.state_dict()
    assert state["unfinished"]

    def goes_on(engines: ScriptedEngines) -> Sampler:
        engines.policy_version += 1
        sampler = sampler_with(journal_in(tmp_path, version=4), engines, **config)
        sampler.load_state_dict(state)
        return sampler

    mortal = Mortal(num_groups)
    with pytest.raises(Killed):
        goes_on(mortal).next_batch()
    engines = ScriptedEngines()
    batch = goes_on(engines).next_batch()
    assert batch.num_from_journal == num_groups
    assert not set(engines.asked) & {o for o in mortal.asked if o not in mortal._in_flight}


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"weights": "others"}, "other weights"),
        ({"settings": "others"}, "other data, rewards, settings or another seed"),
    ],
)
def test_groups_of_other_weights_or_settings_are_not_used(tmp_path, changed, word):
    killed_after(tmp_path, 5)
    journal = journal_in(tmp_path, **changed)
    [note] = journal.drain_warnings()
    assert f"it is of {word}" in note and "version-3.log" in note
    engines = ScriptedEngines()
    assert sampler_with(journal, engines).next_batch().num_from_journal == 0
    assert journal_in(tmp_path, **changed).drain_warnings() == []


def test_another_seed_or_temperature_is_another_question(tmp_path):
    killed_after(tmp_path, 5)
    engines = ScriptedEngines()
    assert sampler_with(journal_in(tmp_path), engines, seed=1).next_batch().num_from_journal == 0
    sampler = sampler_with(journal_in(tmp_path), engines)
    sampler._settings = SamplingSettings(temperature=0.5, top_p=1.0, max_tokens=12)
    assert sampler.next_batch().num_from_journal == 0


def test_a_record_that_is_no_group_is_named_and_asked_again(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            "megadapo.rollout.journal.journal.encode_group", lambda group: {"order": group.order}
        )
        finished = killed_after(tmp_path, 2)
    journal, engines = journal_in(tmp_path), ScriptedEngines()
    assert sampler_with(journal, engines).next_batch().num_from_journal == 0
    notes = journal.drain_warnings()
    assert len(notes) == 2 and all("KeyError('samples')" in note for note in notes)
    assert set(finished) <= set(engines.asked)


def test_what_is_counted_of_a_group_comes_back_exact(tmp_path):
    """With what only tools, branches and reward functions leave."""
    sampler = make_sampler(ScriptedEngines())
    question = sampler._question(2)
    group = make_group(2)
    outcome = GroupStats(
        **{"order": 2, "prompt_id": "id", "num_correct": 1, "num_responses": 2, "reward_sum": 0.1},
        **{"lengths": (1, 7), "num_truncated": 1, "is_mixed": True, "seconds": 1 / 3},
        **{"parts": (("judge", 0.1), ("judge/failed", 0.0)), "num_generated": 6},
        **{"num_output_tokens": 2, "num_calls": 3, "num_branches": 1},
        entropy_rises=(math.nan, -0.25),
    )
    journal_in(tmp_path).append(question, sampler._settings, group, outcome)
    found = journal_in(tmp_path).find(question, sampler._settings)
    assert found is not None and repr(found) == repr((group, outcome))


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 100])
def test_a_file_that_is_no_journal_is_begun_anew(tmp_path, content):
    killed_after(tmp_path, 5)
    path = tmp_path / JOURNAL_FOLDER / "version-3.log"
    path.write_bytes(content)
    journal = journal_in(tmp_path)
    assert bool(journal.drain_warnings()) == bool(content)
    sampler_with(journal, ScriptedEngines()).next_batch()
    batch = sampler_with(journal_in(tmp_path), ScriptedEngines()).next_batch()
    assert batch.num_from_journal > 0


def test_a_journal_of_another_format_is_named(tmp_path, monkeypatch):
    killed_after(tmp_path, 5)
    monkeypatch.setattr("megadapo.rollout.journal.journal.FORMAT", 2)
    [note] = journal_in(tmp_path).drain_warnings()
    assert "another version of megadapo" in note


def test_damage_in_the_middle_is_named_and_costs_what_lies_behind_it(tmp_path):
    expected = make_sampler(ScriptedEngines()).next_batch()
    finished = killed_after(tmp_path, 6)
    path = tmp_path / JOURNAL_FOLDER / "version-3.log"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    journal = journal_in(tmp_path)
    [note] = journal.drain_warnings()
    assert "a damaged record at byte" in note and str(path) in note
    batch = sampler_with(journal, ScriptedEngines()).next_batch()
    assert 0 < batch.num_from_journal < len(finished)
    assert contents([batch]) == contents([expected])


def test_a_full_disk_loses_the_journal_and_not_the_step(tmp_path, monkeypatch):
    expected = make_sampler(ScriptedEngines()).next_batch()
    journal = journal_in(tmp_path)
    sampler, real, calls = sampler_with(journal, ScriptedEngines()), os.pwrite, []

    def full(file, data, place):
        if not os.readlink(f"/proc/self/fd/{file}").startswith(str(tmp_path)):
            return real(file, data, place)
        calls.append(place)
        if len(calls) > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data, place)

    with monkeypatch.context() as patch:
        patch.setattr(record_log.os, "pwrite", full)
        assert contents([sampler.next_batch()]) == contents([expected])
    assert len(calls) == 5, "it is asked again only for the next weights"
    [note] = journal.drain_warnings()
    assert "version-3.log: cannot be written: No space left on device" in note
    assert sampler_with(journal_in(tmp_path), ScriptedEngines()).next_batch().num_from_journal == 3
    journal.begin(POLICY_VERSION + 1, WEIGHTS)
    sampler.next_batch()
    assert journal.drain_warnings() == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / JOURNAL_FOLDER).touch()
    journal = journal_in(tmp_path)
    sampler_with(journal, ScriptedEngines()).next_batch()
    assert "cannot be written" in journal.drain_warnings()[0]


@pytest.mark.parametrize(("fsync", "num_syncs"), [("never", 0), ("step", 1), ("group", 8)])
def test_the_disk_is_waited_for_as_the_configuration_says(tmp_path, monkeypatch, fsync, num_syncs):
    """Each wait is one of the driver, while groups come back."""
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file)), real(file)))
    journal = Journal(tmp_path, "settings", fsync=fsync)
    journal.begin(3, WEIGHTS)
    sampler_with(journal, ScriptedEngines(), selection="all").next_batch()
    files = [entry for entry in synced if stat.S_ISREG(entry.st_mode)]
    assert len(files) == num_syncs
    assert len(synced) - len(files) == (fsync != "never"), "the name of the file, once"


def test_a_batch_that_was_sampled_ahead_is_asked_for_once(tmp_path):
    """It is of the same weights as the one before it."""

    def ahead(engines: ScriptedEngines) -> AheadSampler:
        sampler = sampler_with(journal_in(tmp_path), engines, mode="one_step_off", max_staleness=1)
        return AheadSampler(sampler, engines, num_steps=10)

    def two_batches(sampler: AheadSampler) -> list[str]:
        batch = sampler.next_batch()
        sampler.wait()
        assert sampler._ready is not None
        return contents([batch, sampler._ready])

    expected = two_batches(ahead(ScriptedEngines(finish="at random")))
    again = ScriptedEngines()
    assert two_batches(ahead(again)) == expected
    assert again.asked == []


def test_what_a_checkpoint_holds_is_forgotten(tmp_path):
    for version in (2, 3, 10):
        journal = journal_in(tmp_path, version=version)
        sampler_with(journal, ScriptedEngines()).next_batch()
        journal.close()
    (tmp_path / JOURNAL_FOLDER / "version-x.log").touch()
    forget_before(tmp_path, 3)
    left = sorted(path.name for path in (tmp_path / JOURNAL_FOLDER).iterdir())
    assert left == ["version-10.log", "version-3.log", "version-x.log"]
    forget_before(tmp_path / "nothing", 3)


@pytest.mark.parametrize("config", [{"mode": "partial", "max_staleness": 1}, {"max_staleness": 1}])
def test_steps_in_which_groups_wait_are_repeated_as_they_were(tmp_path, config):
    """Asked again, other groups would have come back in time, and other weights would follow."""

    def steps_with(engines: ScriptedEngines, num_steps: int) -> list[SampledBatch]:
        journal = Journal(tmp_path, "settings")
        sampler = sampler_with(journal, engines, **config)
        steps = RepeatedSteps(sampler, journal, sampler._config)
        batches = []
        for _ in range(num_steps):
            journal.begin(engines.policy_version, f"weights {engines.policy_version}")
            batches.append(steps.next_batch())
            engines.policy_version += 1
        return batches

    first = steps_with(ScriptedEngines(slots=60, finish="short first", at_once=3), 3)
    again = ScriptedEngines(slots=90, finish="last first")
    repeated = steps_with(again, 4)
    assert contents(repeated[:3]) == contents(first)
    assert [batch.num_from_journal for batch in repeated[:3]] == [b.num_sampled for b in first]
    generated = {group.order for batch in first for group in batch.groups}
    assert again.asked and not generated & set(again.asked)
