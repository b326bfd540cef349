"""Would catch: a resumed run that silently learns something else, or is refused for a mere move."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megadapo.config import RunConfig, from_dict, to_dict
from megadapo.config.recipe import with_key
from megadapo.errors import ConfigError
from megadapo.run.state.config_diff import MEANING, SAMPLES, check_config_diff, samples_digest

RECIPE = {
    "run": {"folder": "runs/one", "num_steps": 5},
    "model": {"path": "somewhere"},
    "data": {"train": "arithmetic:train:64"},
    "trainer": {"optimizer": {"warmup_steps": 2}},
}


def config_of(folder: Path, **changes: object) -> RunConfig:
    table = with_key(RECIPE, ("run", "folder"), str(folder))
    for key, value in changes.items():
        table = with_key(table, tuple(key.split("__")), value)
    return from_dict(table)


def checkpoint_of(config: RunConfig) -> Path:
    config.run.folder.mkdir(exist_ok=True)
    (config.run.folder / "config.json").write_text(json.dumps(to_dict(config)))
    return config.run.folder / "checkpoints" / "step-2"


def test_the_same_configuration_says_nothing(tmp_path):
    config = config_of(tmp_path)
    diff = check_config_diff(config, checkpoint_of(config), accept_changes=False)
    assert (diff.lines, diff.keeps_samples) == ((), True)


def test_where_and_how_fast_may_change_and_is_said(tmp_path):
    path = checkpoint_of(config_of(tmp_path))
    after = config_of(
        tmp_path,
        **{"rollout__num_engines": 3, "run__num_steps": 9, "run__resume": "auto"},
        **{"trainer__optimizer__lr": 1e-5, "trainer__tensor_parallel": 2},
    )
    diff = check_config_diff(after, path, accept_changes=False)
    assert diff.lines == (
        "changed: run.num_steps: 5 -> 9",
        "changed: rollout.num_engines: 1 -> 3",
        "changed: trainer.tensor_parallel: 1 -> 2",
        "changed: trainer.optimizer.lr: 1e-06 -> 1e-05",
    )
    assert diff.keeps_samples


@pytest.mark.parametrize(
    ("key", "value", "keeps_samples"),
    [
        ("reward__rule", "boxed", False),
        ("sampling__responses_per_prompt", 4, False),
        ("data__train", "arithmetic:train:32", False),
        ("rollout__temperature", 0.9, False),
        ("algorithm__objective__clip_high", 0.3, True),
        ("algorithm__advantage", "rloo", True),
    ],
)
def test_what_is_learnt_changes_only_where_that_is_accepted(tmp_path, key, value, keeps_samples):
    path = checkpoint_of(config_of(tmp_path))
    after = config_of(tmp_path, **{key: value})
    dotted = key.replace("__", ".")
    with pytest.raises(ConfigError, match=rf"(?s){dotted}: .* -> .*--accept-changes"):
        check_config_diff(after, path, accept_changes=False)
    diff = check_config_diff(after, path, accept_changes=True)
    assert any(line.startswith(f"changed: {dotted}: ") for line in diff.lines)
    assert diff.keeps_samples == keeps_samples


def test_another_run_that_begins_with_a_checkpoint_may_be_another(tmp_path):
    path = checkpoint_of(config_of(tmp_path / "one"))
    after = config_of(tmp_path / "two", reward__rule="boxed")
    diff = check_config_diff(after, path, accept_changes=False)
    assert not diff.keeps_samples
    assert diff.lines == ('changed: reward.rule: "answer" -> "boxed"',)


def test_keys_that_an_older_program_did_not_know_have_their_defaults(tmp_path):
    """Every upgrade would be taken for a change of what keys mean."""
    config = config_of(tmp_path)
    path = checkpoint_of(config)
    table = to_dict(config)
    del table["algorithm"]["shared_prefix"]
    (tmp_path / "config.json").write_text(json.dumps(table))
    assert check_config_diff(config, path, accept_changes=False).lines == ()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"other": 1}'])
def test_a_configuration_that_cannot_be_read_is_said(tmp_path, text):
    config = config_of(tmp_path)
    path = checkpoint_of(config)
    (tmp_path / "config.json").write_text(text)
    (line,) = check_config_diff(config, path, accept_changes=False).lines
    assert "config.json cannot be read" in line


@pytest.mark.parametrize("name", [*SAMPLES, *MEANING])
def test_every_name_is_a_key_or_a_table(tmp_path, name):
    """A renamed key would change without a word."""
    place = to_dict(config_of(tmp_path))
    for part in name.split("."):
        assert part in place
        place = place[part]


@pytest.mark.parametrize(
    ("changes", "stays"),
    [
        ({"rollout__num_engines": 3, "cluster__placement": "separate"}, True),
        ({"sampling__prompts_per_step": 64, "trainer__optimizer__lr": 1e-5}, True),
        ({"run__seed": 1}, False),
        ({"rollout__temperature": 0.5}, False),
        ({"reward__decide": "symbolic"}, False),
        ({"model__dtype": "float32"}, False),
    ],
)
def test_groups_of_the_journal_are_of_the_same_questions_and_rewards(tmp_path, changes, stays):
    """And a run that goes on with more engines loses none."""
    before, after = config_of(tmp_path), config_of(tmp_path, **changes)
    assert before != after
    assert (samples_digest(before) == samples_digest(after)) == stays
