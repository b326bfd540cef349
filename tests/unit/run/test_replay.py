"""A replay trains on the saved groups, in their order and step, and on nothing impossible."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from megadapo.codec import encode
from megadapo.config import RunConfig, from_dict, load_config
from megadapo.data.batch import in_training_order
from megadapo.errors import CheckpointError, ConfigError, DataError
from megadapo.observe.rollouts.files import read_rollouts, rollouts_path, write_rollouts
from megadapo.observe.rollouts.saved_group import SavedGroup
from megadapo.rollout.sampling.schedule import SCHEDULE_FILE
from megadapo.rollout.sampling.statistics import SampledBatch
from megadapo.run.replay import ReplayedRollouts, check_replay, check_schedule, open_schedule
from megadapo.run.rollouts import LiveRollouts
from megadapo.run.step.saved_groups import saved_groups
from tests.support import REPOSITORY
from tests.support.models.tiny_models import TRAINED
from tests.support.rollout.samplers import HALF, MAX_TOKENS, make_sampler
from tests.support.rollout.scripted_engines import POLICY_VERSION, FailsOn, ScriptedEngines

PARTIAL = {"mode": "partial", "max_staleness": 1}
STEPS = range(POLICY_VERSION, POLICY_VERSION + 3)
"""The second one is sampled by ScriptedEngines' policy."""


def config_of(folder: Path, **sections: dict[str, object]) -> RunConfig:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(
        json.dumps({"architectures": ["Qwen2ForCausalLM"], **TRAINED})
    )
    table = {
        "run": {"folder": str(folder / "replay"), "num_steps": STEPS[-1]},
        "model": {"path": str(model)},
        "data": {"train": "arithmetic:train:64", "max_prompt_tokens": 64},
        "rollout": {"max_response_tokens": MAX_TOKENS},
        "sampling": {"prompts_per_step": 8, "responses_per_prompt": 3} | PARTIAL,
        "algorithm": {"overlong_buffer": 4, "responses_per_mini_batch": 12},
        "trainer": {"optimizer": {"warmup_steps": 0}},
        "observe": {"saved_groups": "all"},
    }
    return from_dict({name: {**values, **sections.get(name, {})} for name, values in table.items()})


def sample(config: RunConfig, judge: FailsOn | None = None) -> list[SampledBatch]:
    """A batch for each of STEPS; those after the first begin with groups of the reserve."""
    engines = ScriptedEngines("last first", slots=200)
    sampling = config.sampling.model_dump()
    saved = config.observe.saved_groups
    sampler = make_sampler(engines, saved_groups=saved, judge=judge, **sampling)
    batches = []
    for step in STEPS:
        engines.policy_version = step - 1
        batch = sampler.next_batch()
        order = in_training_order(batch.groups, step - 1, config.groups_per_mini_batch)
        batches.append(replace(batch, groups=order))
    return batches


@pytest.fixture
def source(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> list[SampledBatch]:
    batches = sample(config_of(tmp_path))
    save(tmp_path, batches, tokenizer)
    return batches


def save(folder: Path, batches: list[SampledBatch], tokenizer: PreTrainedTokenizerFast) -> None:
    for step, batch in zip(STEPS, batches, strict=True):
        values = np.zeros(sum(len(group.responses) for group in batch.groups))
        parts = (step, batch, range(len(values)), values, None, config_of(folder), tokenizer)
        groups = saved_groups(*parts, lambda group: [None] * len(group.responses))
        write_rollouts(rollouts_path(folder, step), groups)


def replayed(config: RunConfig, folder: Path, *, first_step: int = STEPS[0]) -> list[SampledBatch]:
    rollouts = ReplayedRollouts(config, folder / "rollouts", first_step=first_step)
    batches = []
    for step in range(first_step, STEPS[-1] + 1):
        rollouts.publish(step - 1)
        batches.append(rollouts.next_batch())
    return batches


def contents(batch: SampledBatch) -> list[object]:
    """Return a batch without the facts about its generation, in the encoding of a checkpoint."""
    return [
        [encode(replace(group, seconds=0.0)) for group in batch.groups],
        [(encode(replace(one.group, seconds=0.0)), one.disposition) for one in batch.saved],
        [encode(replace(group, seconds=0.0)) for group in batch.stats],
        [len(batch.to_reserve), len(batch.dropped), batch.num_surplus],
    ]


def test_batches_are_replayed_exactly(tmp_path, source):
    batches = replayed(config_of(tmp_path), tmp_path)
    assert [contents(batch) for batch in batches] == [contents(batch) for batch in source]
    assert any(batch.num_from_reserve for batch in source)
    assert all(b.is_replay and b.engines == () for b in batches)
    assert [b.num_from_reserve for b in batches] == [b.num_from_reserve for b in source]


def test_groups_with_failures_are_replayed(tmp_path, tokenizer):
    """Catches saved groups that no replay accepts, and counts without the failures."""
    config = config_of(tmp_path)
    batches = sample(config, FailsOn(0.1, HALF))
    save(tmp_path, batches, tokenizer)
    for batch, whole in zip(replayed(config, tmp_path), batches, strict=True):
        assert contents(batch)[0] == contents(whole)[0]
        assert batch.num_excluded > 0 and batch.reward_parts["judge/failed"] > 0
        assert batch.num_at("all_correct") == whole.num_at("all_correct")


def test_partly_saved_groups_are_refused_at_the_start(tmp_path, source, tokenizer):
    """A replay of a default run stopped in step 2, and blamed the weight transfer."""
    config = config_of(tmp_path)
    folder = tmp_path / "rollouts"
    check_replay(config, folder)
    path = rollouts_path(tmp_path, STEPS[0])
    groups = list(read_rollouts(path))
    write_rollouts(path, [group for group in groups if group.disposition != "trained"][:1])
    with pytest.raises(ConfigError, match=r'0 of the 8 groups (?s:.*)saved_groups = "all"'):
        check_replay(config, folder)
    # a step that found fewer groups
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": STEPS[0], "groups/kept": 0}) + "\n")
    check_replay(config, folder)


def test_replay_resumes_after_a_checkpoint(tmp_path, source):
    last = replayed(config_of(tmp_path), tmp_path, first_step=STEPS[-1])
    assert [contents(batch) for batch in last] == [contents(source[-1])]


def test_publish_only_counts(tmp_path, source):
    rollouts = ReplayedRollouts(config_of(tmp_path), tmp_path / "rollouts", first_step=STEPS[0])
    assert rollouts.policy_version == STEPS[0] - 1
    rollouts.publish(STEPS[0])
    assert rollouts.policy_version == STEPS[0]
    rollouts.evaluate(1)
    assert rollouts.scored() == []
    assert rollouts.state_dict() == {} and list(rollouts.closing_messages()) == []


def test_partially_saved_batch_is_replayed(tmp_path, tokenizer):
    config = config_of(tmp_path, observe={"saved_groups": 5})
    batches = sample(config)
    save(tmp_path, batches, tokenizer)
    for step, batch, whole in zip(STEPS, replayed(config, tmp_path), batches, strict=True):
        kept = [s.group for s in whole.saved if s.disposition == "trained"]
        assert 0 < len(kept) < 8
        order = in_training_order(kept, step - 1, config.groups_per_mini_batch)
        assert [g.prompt_index for g in batch.groups] == [g.prompt_index for g in order]


def test_replayed_run_is_not_overwritten(tmp_path, source):
    config = config_of(tmp_path, run={"folder": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"choose another run\.folder"):
        check_replay(config, tmp_path / "model" / ".." / "rollouts")


def test_run_with_unsaved_steps_is_rejected(tmp_path, source):
    assert "parity" in check_replay(config_of(tmp_path), tmp_path / "rollouts")
    longer = config_of(tmp_path, run={"num_steps": 9})
    with pytest.raises(
        ConfigError, match=r"3 steps from 3 to 5 are saved.*num_steps.*saved_groups = \"all\""
    ):
        check_replay(longer, tmp_path / "rollouts")
    with pytest.raises(ConfigError, match=r"there is no step-N\.jsonl\.zst"):
        check_replay(longer, tmp_path)
    rollouts_path(tmp_path, STEPS[1]).unlink()
    with pytest.raises(ConfigError, match=f"step {STEPS[1]} is not saved"):
        ReplayedRollouts(config_of(tmp_path), tmp_path / "rollouts", first_step=STEPS[0])


def damage(folder: Path, group: SavedGroup, **values: object) -> None:
    write_rollouts(rollouts_path(folder, STEPS[0]), [replace(group, **values)])


def test_groups_that_do_not_fit_the_run_are_rejected(tmp_path, source):
    saved = list(read_rollouts(rollouts_path(tmp_path, STEPS[0])))
    group = next(g for g in saved if g.disposition == "trained")
    first, *others = group.responses
    negative = replace(first.response, token_ids=-1 - first.response.token_ids)
    strange = {
        "is from step 1": {"step": 1},
        "has 2 responses": {"responses": group.responses[:2]},
        "has 0 responses": {"responses": ()},
        "a prompt of 0 tokens": {"prompt_ids": ()},
        "a prompt of 65 tokens": {"prompt_ids": (1,) * 65},
        "vocabulary of 150": {"prompt_ids": (150,)},
        "tokens outside": {"responses": (replace(first, response=negative), *others)},
        "no group that was trained on|has no group": {"disposition": "all_wrong"},
    }
    for said, values in strange.items():
        damage(tmp_path, group, **values)
        with pytest.raises(DataError, match=f"step-{STEPS[0]}.jsonl.zst.*({said})"):
            replayed(config_of(tmp_path), tmp_path)
    damage(tmp_path, group)
    shorter = config_of(
        tmp_path,
        rollout={"max_response_tokens": max(group.group.lengths) - 1},
        algorithm={"overlong_buffer": 0},
    )
    with pytest.raises(DataError, match=r"a response of \d+ tokens, but rollout\.max_response"):
        replayed(shorter, tmp_path)


def test_sampling_cannot_resume_from_a_replay(tmp_path):
    live = LiveRollouts.__new__(LiveRollouts)
    with pytest.raises(CheckpointError, match="resume it with --replay"):
        live.load_state_dict({})


FITTING = (
    *('sampling.mode="partial"', "sampling.max_staleness=2", "sampling.prompts_per_step=2"),
    *("sampling.responses_per_prompt=2", "run.num_steps=3", "trainer.optimizer.warmup_steps=1"),
    *("algorithm.responses_per_mini_batch=4", "evaluation.every=0"),
)


def config(*overrides):
    return load_config(str(REPOSITORY / "configs" / "quickstart.toml"), [*FITTING, *overrides])


def test_folder_is_a_run_to_repeat(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no schedule\.log"):
        check_schedule(config(), tmp_path)


def test_schedule_of_another_configuration_is_refused_before_anything_starts(tmp_path):
    """The trainer and all engines started first, and --dry-run said that all was well."""
    run, again = config("sampling.prompts_per_step=4"), config()
    schedule = open_schedule(run, tmp_path, None)
    schedule.pause(0, "00" * 32, 0, {})
    schedule.close()
    assert check_schedule(run, tmp_path).startswith(f"repeating the schedule of {tmp_path}")
    with pytest.raises(ConfigError, match=r"other data, rewards.* in its config\.json"):
        check_schedule(again, tmp_path)
    path = tmp_path / SCHEDULE_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="record 1 is not whole"):
        check_schedule(run, tmp_path)
