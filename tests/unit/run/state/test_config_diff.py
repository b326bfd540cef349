"""A resumed run reports changes; it refuses changes to what it learns."""

import json
from pathlib import Path

import pytest

from megadapo.config import RunConfig, to_dict
from megadapo.errors import ConfigError
from megadapo.run.state.config_diff import (
    LEARNING_KEYS,
    RESERVE_KEYS,
    check_config_diff,
    samples_digest,
)
from tests.support.runs.runs_alone import config_of


def checkpoint_of(config: RunConfig) -> Path:
    config.run.folder.mkdir(exist_ok=True)
    (config.run.folder / "config.json").write_text(json.dumps(to_dict(config)))
    return config.run.folder / "checkpoints" / "step-2"


def test_equal_configuration_has_no_diff(tmp_path):
    config = config_of(tmp_path)
    diff = check_config_diff(config, checkpoint_of(config), accept_changes=False)
    assert (diff.lines, diff.keeps_samples) == ((), True)


def test_changes_without_meaning_are_listed(tmp_path):
    path = checkpoint_of(config_of(tmp_path))
    changes = {"rollout.num_engines": 3, "trainer.optimizer.lr": 1e-5, "trainer.tensor_parallel": 2}
    after = config_of(tmp_path, changes, num_steps=9, resume="auto")
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
        ("reward.rule", "boxed", False),
        ("sampling.responses_per_prompt", 4, False),
        ("data.train", "arithmetic:train:32", False),
        ("rollout.temperature", 0.9, False),
        ("algorithm.objective.clip_high", 0.3, True),
        ("algorithm.advantage", "rloo", True),
    ],
)
def test_changes_of_meaning_need_accept_changes(tmp_path, key, value, keeps_samples):
    path = checkpoint_of(config_of(tmp_path))
    after = config_of(tmp_path, {key: value})
    with pytest.raises(ConfigError, match=rf"(?s){key}: .* -> .*--accept-changes"):
        check_config_diff(after, path, accept_changes=False)
    diff = check_config_diff(after, path, accept_changes=True)
    assert any(line.startswith(f"changed: {key}: ") for line in diff.lines)
    assert diff.keeps_samples == keeps_samples


def test_run_in_new_folder_may_differ(tmp_path):
    path = checkpoint_of(config_of(tmp_path / "one"))
    after = config_of(tmp_path / "two", {"reward.rule": "boxed"})
    diff = check_config_diff(after, path, accept_changes=False)
    assert not diff.keeps_samples
    assert diff.lines == ('changed: reward.rule: "answer" -> "boxed"',)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"other": 1}'])
def test_unreadable_configuration_is_reported(tmp_path, text):
    config = config_of(tmp_path)
    path = checkpoint_of(config)
    (tmp_path / "config.json").write_text(text)
    (line,) = check_config_diff(config, path, accept_changes=False).lines
    assert "config.json cannot be read" in line


@pytest.mark.parametrize("name", [*RESERVE_KEYS, *LEARNING_KEYS])
def test_listed_names_are_keys_or_tables(tmp_path, name):
    place = to_dict(config_of(tmp_path))
    for part in name.split("."):
        assert part in place
        place = place[part]


@pytest.mark.parametrize(
    ("changes", "stays"),
    [
        ({"rollout.num_engines": 3, "cluster.placement": "separate"}, True),
        ({"sampling.prompts_per_step": 64, "trainer.optimizer.lr": 1e-5}, True),
        ({"run.seed": 1}, False),
        ({"rollout.temperature": 0.5}, False),
        ({"reward.decide": "symbolic"}, False),
        ({"model.dtype": "float32"}, False),
    ],
)
def test_samples_digest_covers_prompts_and_rewards(tmp_path, changes, stays):
    before, after = config_of(tmp_path), config_of(tmp_path, changes)
    assert before != after
    assert (samples_digest(before) == samples_digest(after)) == stays
