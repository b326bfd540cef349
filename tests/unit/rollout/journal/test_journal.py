"""The journal: groups generated twice after a kill, groups of other weights, and disk errors."""

import errno
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from megadapo.data.group import Group
from megadapo.rollout.journal import record_log
from megadapo.rollout.journal.journal import (
    DIGEST_BYTES,
    JOURNAL_FOLDER,
    VERSION,
    Journal,
    delete_journals_before,
)
from megadapo.rollout.sampling.sampler import Sampler
from megadapo.rollout.types import SamplingSettings
from tests.support.rollout.groups import make_group
from tests.support.rollout.samplers import contents, make_sampler, saved_state
from tests.support.rollout.scripted_engines import (
    POLICY_VERSION,
    AtOnce,
    KilledAfter,
    KilledError,
    ScriptedEngines,
)

WEIGHTS = "weights"


def journal_in(
    folder: Path, *, weights: str = WEIGHTS, settings: str = "settings", version: int = 3
) -> Journal[Group]:
    journal = Journal(Group, folder / JOURNAL_FOLDER, settings, name=VERSION)
    journal.begin(version, weights)
    return journal


def sampler_with(journal: Journal[Group], engines: ScriptedEngines, **config) -> Sampler:
    # scoring at once makes the journal hold exactly the groups that have finished
    return make_sampler(engines, sampler={"journal": journal, "new_executor": AtOnce}, **config)


def finished(engines: ScriptedEngines) -> set[int]:
    """Return the prompt indices of groups that were generated to their end."""
    return set(engines.asked) - engines._in_flight.keys()


def killed_after(folder: Path, num_groups: int, **config) -> set[int]:
    """Return the prompt indices of groups that finished before the kill."""
    engines = KilledAfter(num_groups, finish="at random")
    with pytest.raises(KilledError):
        sampler_with(journal_in(folder), engines, **config).next_batch()
    return finished(engines)


def num_reused(journal: Journal[Group]) -> int:
    """Return the number of groups that a step takes from the journal."""
    return sampler_with(journal, ScriptedEngines()).next_batch().counts["groups/from_journal"]


MODES = [{}, {"mode": "rounds"}, {"selection": "all"}]


@pytest.mark.parametrize("config", MODES)
@pytest.mark.parametrize("num_groups", [1, 7])
def test_killed_step_reuses_finished_groups(tmp_path, config, num_groups):
    config = {**config, "saved_groups": "all"}
    expected = make_sampler(ScriptedEngines(finish="at random"), **config).next_batch()
    before = killed_after(tmp_path, num_groups, **config)
    engines = ScriptedEngines(finish="short first")
    batch = sampler_with(journal_in(tmp_path), engines, **config).next_batch()
    assert contents([batch]) == contents([expected])
    assert batch.counts["groups/from_journal"] > 0
    assert not set(engines.asked) & before
    again = ScriptedEngines()
    last = sampler_with(journal_in(tmp_path), again, **config).next_batch()
    assert contents([last]) == contents([expected])
    assert not set(again.asked) & finished(engines)


@pytest.mark.parametrize("num_groups", [1, 4])
def test_continued_group_is_found_by_its_first_tokens(tmp_path, num_groups):
    config = {"mode": "partial", "max_staleness": 1}
    first = make_sampler(ScriptedEngines(finish="last first", slots=60), **config)
    first.next_batch()
    state = saved_state(first)
    assert state["reserve"]["open"]

    def resumed(engines: ScriptedEngines) -> Sampler:
        engines.policy_version += 1
        sampler = sampler_with(journal_in(tmp_path, version=4), engines, **config)
        sampler.load_state_dict(state)
        return sampler

    killed = KilledAfter(num_groups)
    with pytest.raises(KilledError):
        resumed(killed).next_batch()
    engines = ScriptedEngines()
    batch = resumed(engines).next_batch()
    assert batch.counts["groups/from_journal"] == num_groups
    assert not set(engines.asked) & finished(killed)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"weights": "others"}, "weights"),
        ({"settings": "others"}, "data, rewards, settings or seed"),
    ],
)
def test_groups_of_other_weights_or_settings_are_ignored(tmp_path, caplog, changed, word):
    killed_after(tmp_path, 5)
    journal = journal_in(tmp_path, **changed)
    [note] = caplog.messages
    assert f"version-3.log: differs in {word}; results that it lacks are requested again" in note
    assert num_reused(journal) == 0
    journal_in(tmp_path, **changed)
    assert caplog.messages == [note]


def test_other_seed_or_temperature_is_another_request(tmp_path):
    killed_after(tmp_path, 5)
    engines = ScriptedEngines()
    assert (
        sampler_with(journal_in(tmp_path), engines, seed=1)
        .next_batch()
        .counts["groups/from_journal"]
        == 0
    )
    sampler = sampler_with(journal_in(tmp_path), engines)
    sampler._settings = SamplingSettings(temperature=0.5, top_p=1.0, max_tokens=12)
    assert sampler.next_batch().counts["groups/from_journal"] == 0


def test_group_of_another_form_is_requested_again(tmp_path, caplog):
    """It would end the run, and each restart."""
    journal = journal_in(tmp_path)
    journal.append(bytes(DIGEST_BYTES), replace(make_group(2), prompt_index="none"))
    assert journal.find(bytes(DIGEST_BYTES)) is None
    assert "cannot read a result (prompt_index" in caplog.text


def test_damage_costs_later_groups(tmp_path, caplog):
    expected = make_sampler(ScriptedEngines()).next_batch()
    before = killed_after(tmp_path, 6)
    path = tmp_path / JOURNAL_FOLDER / "version-3.log"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    journal = journal_in(tmp_path)
    [note] = caplog.messages
    assert "a damaged record at byte" in note and str(path) in note
    batch = sampler_with(journal, ScriptedEngines()).next_batch()
    assert 0 < batch.counts["groups/from_journal"] < len(before)
    assert contents([batch]) == contents([expected])


def test_full_disk_does_not_end_the_step(tmp_path, caplog, monkeypatch):
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
    assert len(calls) == 5, "writing is tried again only for the next weights"
    [note] = caplog.messages
    assert "version-3.log: cannot be written: No space left on device" in note
    assert num_reused(journal_in(tmp_path)) == 3
    journal.begin(POLICY_VERSION + 1, WEIGHTS)
    sampler.next_batch()
    assert caplog.messages == [note]


def test_folder_that_cannot_be_created_is_reported(tmp_path, caplog):
    (tmp_path / JOURNAL_FOLDER).touch()
    journal = journal_in(tmp_path)
    sampler_with(journal, ScriptedEngines()).next_batch()
    assert "cannot be written" in caplog.text


def test_groups_are_flushed_once_a_step(tmp_path, monkeypatch):
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file)), real(file)))
    sampler_with(journal_in(tmp_path), ScriptedEngines(), selection="all").next_batch()
    files = [entry for entry in synced if stat.S_ISREG(entry.st_mode)]
    assert len(files) == 1
    assert len(synced) - len(files) == 1, "the directory entry, once"


def test_delete_journals_before_a_checkpoint(tmp_path):
    for version in (2, 3, 10):
        journal = journal_in(tmp_path, version=version)
        sampler_with(journal, ScriptedEngines()).next_batch()
        journal.close()
    (tmp_path / JOURNAL_FOLDER / "version-x.log").touch()
    delete_journals_before(tmp_path, 3)
    left = sorted(path.name for path in (tmp_path / JOURNAL_FOLDER).iterdir())
    assert left == ["version-10.log", "version-3.log", "version-x.log"]
    delete_journals_before(tmp_path / "nothing", 3)


def test_journals_of_environments_stay_until_there_is_a_later_one(tmp_path):
    """The later one has a copy of the open episodes, which a resumed run continues."""
    folder = tmp_path / JOURNAL_FOLDER
    folder.mkdir()
    for version in (1, 2):
        (folder / f"environments-version-{version}.log").touch()
    delete_journals_before(tmp_path, 3)
    assert len(list(folder.iterdir())) == 2
    (folder / "environments-version-3.log").touch()
    delete_journals_before(tmp_path, 3)
    assert [path.name for path in folder.iterdir()] == ["environments-version-3.log"]
