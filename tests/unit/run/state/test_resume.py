"""A resumed run reports changes; it refuses changes to what it learns."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest

from megadapo.config import RunConfig, to_dict
from megadapo.errors import ConfigError
from megadapo.run.state.checkpoint import Checkpoint
from megadapo.run.state.resume import (
    LEARNING_KEYS,
    RESERVE_KEYS,
    SUPERVISED_KEYS,
    check_accepted,
    check_config_diff,
    samples_digest,
)
from tests.support.runs.runs_alone import config_of


def checkpoint_of(config: RunConfig) -> Checkpoint:
    path = config.run.folder / "checkpoints" / "step-2"
    return Checkpoint(path, 2, {}, config=json.loads(json.dumps(to_dict(config))))


def test_changes_of_other_keys_are_listed(tmp_path):
    before = checkpoint_of(config_of(tmp_path))
    changes = {"rollout.num_engines": 3, "trainer.optimizer.lr": 1e-5, "trainer.tensor_parallel": 2}
    after = config_of(tmp_path, changes, num_steps=9, resume="auto")
    assert check_config_diff(after, before) == [
        "changed: run.num_steps: 5 -> 9",
        "changed: rollout.num_engines: 1 -> 3",
        "changed: trainer.tensor_parallel: 1 -> 2",
        "changed: trainer.optimizer.lr: 1e-06 -> 1e-05",
    ]


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("reward.rule", "boxed", "reward.rule"),
        ("data.train", "arithmetic:train:32", "data"),
        ("rollout.temperature", 0.9, "rollout.temperature"),
        ("rollout.environments", [{"environment": "calculator"}], "rollout.environments"),
        ("sampling.prompts_per_step", 64, "sampling"),
        ("algorithm.objective.clip_high", 0.3, "algorithm"),
        ("trainer.router_aux_loss_coef", 0.1, "trainer.router_aux_loss_coef"),
        ("model.init", "random", "model"),
    ],
)
def test_changes_of_what_is_learned_are_accepted_by_name(tmp_path, key, value, accepted):
    """A command that accepts one change must not accept the next one."""
    before = checkpoint_of(config_of(tmp_path))
    after = config_of(tmp_path, {key: value, "run.seed": 9})
    with pytest.raises(ConfigError, match=rf"(?s){key}: .* -> .*--accept-changes=run.seed,{key}"):
        check_config_diff(after, before)
    with pytest.raises(ConfigError, match=r"(?s)run.seed: .*--accept-changes=run.seed$"):
        check_config_diff(after, before, accepted=[accepted])
    lines = check_config_diff(after, before, accepted=[accepted, "run.seed"])
    assert any(line.startswith(f"changed: {key}: ") for line in lines)


def test_key_that_the_checkpoint_does_not_know_is_asked_for(tmp_path):
    """After an upgrade in the middle of a run, a new key may change what is learned."""
    config = config_of(tmp_path)
    before = checkpoint_of(config)
    del before.config["algorithm"]["bapo"]
    with pytest.raises(ConfigError, match=r"algorithm\.bapo\.target_share: null -> "):
        check_config_diff(config, before)


def test_run_in_new_folder_may_differ(tmp_path):
    before = checkpoint_of(config_of(tmp_path / "one"))
    after = config_of(tmp_path / "two", {"reward.rule": "boxed"})
    assert check_config_diff(after, before) == ['changed: reward.rule: "answer" -> "boxed"']


OTHER = r"other model.safetensors than at the start of the run"


@pytest.mark.parametrize("key", ["model.path", "algorithm.reference.path", "critic.path"])
def test_other_files_of_a_model_are_accepted_by_name(tmp_path, key):
    """The reference policy was another one, and only the KL divergence showed it."""
    before = replace(checkpoint_of(config_of(tmp_path)), models={key: {"model.safetensors": "a"}})
    config, other = config_of(tmp_path), {key: {"model.safetensors": "b"}}
    with pytest.raises(ConfigError, match=rf"{key}: {OTHER}(?s:.*)--accept-changes={key}"):
        check_config_diff(config, before, models=other)
    lines = check_config_diff(config, before, models=other, accepted=[key])
    assert lines == [f"changed: {key}: {OTHER}"]
    in_new_folder = config_of(tmp_path / "new")
    assert check_config_diff(in_new_folder, before, models=other) == lines


def test_folder_of_a_model_may_move(tmp_path):
    """Without the files' digests it needs the name."""
    moved, before = config_of(tmp_path, {"model.path": "moved"}), checkpoint_of(config_of(tmp_path))
    files = {"model.path": {"model.safetensors": "a"}}
    with pytest.raises(ConfigError, match=r'model\.path: "somewhere" -> "moved"'):
        check_config_diff(moved, before, models=files)
    lines = check_config_diff(moved, replace(before, models=files), models=files)
    assert lines == ['changed: model.path: "somewhere" -> "moved"']


@pytest.mark.parametrize(
    ("name", "is_known"),
    [
        ("reward", True),
        ("data.train.math.source", True),
        ("weights.transport", True),
        ("reward.rul", False),
        ("bogus.key", False),
        ("", False),
    ],
)
def test_accepted_names_are_keys_of_the_run(tmp_path, name, is_known):
    """Keys of an earlier version count, if the configuration of the run has them."""
    (tmp_path / "config.json").write_text('{"weights": {"transport": "auto"}}')
    with nullcontext() if is_known else pytest.raises(ConfigError, match=f"accept-changes={name}:"):
        check_accepted(config_of(tmp_path), [name])


@pytest.mark.parametrize("name", [*RESERVE_KEYS, *LEARNING_KEYS, *SUPERVISED_KEYS])
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
        ({"data.chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"rollout.temperature": 0.5}, False),
        ({"reward.symbolic": "decide"}, False),
        ({"model.dtype": "float32"}, False),
        ({"trainer.router_replay": True}, False),
    ],
)
def test_samples_digest_covers_prompts_and_rewards(tmp_path, changes, stays):
    before, after = config_of(tmp_path), config_of(tmp_path, changes)
    assert before != after
    assert (samples_digest(before) == samples_digest(after)) == stays


def test_samples_digest_covers_the_source_of_reward_functions(tmp_path, monkeypatch):
    """Groups that an edited function has scored before must not be used."""
    monkeypatch.chdir(tmp_path)
    config = config_of(tmp_path, {"reward.functions": ["rules.mine:score"]})
    (tmp_path / "rules").mkdir()
    source = tmp_path / "rules" / "mine.py"
    source.write_text("raise RuntimeError('the driver must not import it')")
    before = samples_digest(config)
    assert samples_digest(config) == before
    source.write_text("def score(): return 1.0")
    assert samples_digest(config) != before
