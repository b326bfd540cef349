"""`megadapo diff` names step and place of each fault in a recorded run, and the evidence for it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megadapo.cli import main
from megadapo.errors import DataError
from megadapo.lab.diff.compare import (
    about_schedules,
    compare_metrics,
    compare_runs,
    text_of_comparison,
)
from megadapo.lab.diff.difference import Difference
from megadapo.observe.metrics.records import MetricsLog, read_metrics
from megadapo.observe.rollouts.files import read_rollouts, rollouts_path
from megadapo.observe.rollouts.saved_group import SavedResponse
from megadapo.rollout.sampling.schedule import SCHEDULE_FILE, SamplingSchedule
from tests.support.rollout.groups import make_group
from tests.support.runs.diff_runs import (
    MOMENT,
    NUM_STEPS,
    NUM_TOKENS,
    copy_of,
    edit_config,
    edit_groups,
    edit_metrics,
    edit_response,
    record,
    tensors,
    write_checkpoint,
)
from tests.support.runs.recorded_runs import evaluation_record

Fault = Callable[[Path], None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("runs") / "a")


def response_of(folder: Path, step: int, place: int, number: int) -> SavedResponse:
    return list(read_rollouts(rollouts_path(folder, step)))[place].responses[number]


def changed(values: np.ndarray, *places: int, by: float = 1) -> np.ndarray:
    values = values.copy()
    values[list(places)] += values.dtype.type(by)
    return values


def label(folder: Path) -> None:
    versions = response_of(folder, 2, 1, 2).response.policy_versions
    edit_response(folder, 2, 1, 2, policy_versions=changed(versions, 3, by=-1))


def token(folder: Path) -> None:
    ids = response_of(folder, 2, 1, 2).response.token_ids
    edit_response(folder, 2, 1, 2, token_ids=changed(ids, 3))


def other_seed(folder: Path) -> None:
    saved = response_of(folder, 1, 3, 0)
    everywhere = range(NUM_TOKENS)
    ids, logprobs = saved.response.token_ids, saved.response.logprobs
    other = {"token_ids": changed(ids, *everywhere), "reward": -1.0, "correct": False}
    edit_response(folder, 1, 3, 0, logprobs=changed(logprobs, *everywhere), **other)


def longer(folder: Path) -> None:
    """A response that one run cut one token earlier."""
    saved = response_of(folder, 2, 0, 0)
    parts = ("token_ids", "logprobs", "policy_versions")
    shorter = {name: getattr(saved.response, name)[:-1] for name in parts}
    trained = {name: getattr(saved, name)[:-1] for name in ("logprobs_old", "logprobs_update")}
    edit_response(folder, 2, 0, 0, tokens=saved.tokens[:-1], **shorter, **trained)


def other_logprob(folder: Path) -> None:
    """The last bit of the first log-prob that other weights change."""
    logprobs = response_of(folder, 3, 0, 1).response.logprobs.copy()
    logprobs[2] = np.nextafter(logprobs[2], np.float32(0))
    edit_response(folder, 3, 0, 1, logprobs=logprobs)


def swapped_groups(folder: Path) -> None:
    def swap(groups):
        one, two = groups[1], groups[2]
        groups[1] = replace(two, prompt_index=one.prompt_index)
        groups[2] = replace(one, prompt_index=two.prompt_index)
        return groups

    edit_groups(folder, 2, swap)


def shifted_prompts(folder: Path) -> None:
    def shift(groups):
        return [replace(one, prompt_index=one.prompt_index - 1) for one in groups[1:]]

    edit_groups(folder, 2, shift)


def finish_reason(folder: Path) -> None:
    edit_response(folder, 2, 3, 3, finish_reason="length")


def reward(folder: Path) -> None:
    edit_response(folder, 2, 1, 3, reward=-0.5, shaped_reward=-0.5, advantage=-0.7)
    edit_metrics(folder, 2, reward__mean=0.4, policy__loss=0.4)


def verdict(folder: Path) -> None:
    """A group that turns all wrong, so another prompt takes its place in the batch."""

    def edit(groups):
        wrong = [
            replace(one, score=replace(one.score, correct=False)) for one in groups[0].responses
        ]
        groups[0] = replace(groups[0], responses=tuple(wrong), disposition="all_wrong")
        return [*groups, replace(groups[3], prompt_index=99)]

    edit_groups(folder, 2, edit)
    edit_metrics(folder, 2, response_length__mean=0.6)


def penalty(folder: Path) -> None:
    edit_response(folder, 2, 0, 1, penalty=-0.5, shaped_reward=0.5)


def disposition(folder: Path) -> None:
    edit_groups(folder, 2, lambda groups: [*groups[:3], replace(groups[3], disposition="dropped")])


def advantage(folder: Path) -> None:
    edit_response(folder, 2, 2, 0, advantage=1.5)


def token_advantage(folder: Path) -> None:
    values = np.ones(NUM_TOKENS, dtype=np.float32)
    edit_response(folder, 2, 2, 0, advantages=changed(values, 4))


def trainer_token(folder: Path) -> None:
    """A token that differs in the trainer's batch only changes log-probs from there on."""
    old = response_of(folder, 2, 2, 1).logprobs_old
    edit_response(folder, 2, 2, 1, logprobs_old=changed(old, 4, 5))
    edit_metrics(folder, 2, parity__logprob_abs_max=0.9, policy__loss=0.4)


def update_logprob(folder: Path) -> None:
    """An update that differs changes the log-probs of the next mini-batch."""
    for number in range(4):
        old = response_of(folder, 2, 2, number).logprobs_update
        edit_response(folder, 2, 2, number, logprobs_update=changed(old, 0))


def loss(folder: Path) -> None:
    edit_metrics(folder, 2, policy__loss=0.25, policy__grad_norm=0.25)


def learning_rate(folder: Path) -> None:
    edit_metrics(folder, 2, policy__lr=2e-5)
    update_logprob(folder)


def skipped(folder: Path) -> None:
    write_checkpoint(folder, 2, tensors(1))


def counted_skip(folder: Path) -> None:
    edit_metrics(folder, 2, policy__skipped_updates=1.0)
    skipped(folder)


def far_update(folder: Path) -> None:
    write_checkpoint(folder, 2, tensors(3))


def weight(folder: Path) -> None:
    values = tensors(2)
    values["decoder.layers.self_attention.linear_qkv.weight"][1, 3, 2] += 0.5
    values["decoder.layers.mlp.linear_fc2.weight"][1, 0, 0] += 0.5
    write_checkpoint(folder, 2, values)


def moment(folder: Path) -> None:
    values = tensors(2)
    values[MOMENT + "embedding.word_embeddings.weight"][9, 1] += 0.5
    write_checkpoint(folder, 2, values)


def other_type(folder: Path) -> None:
    values = tensors(2)
    values["decoder.final_layernorm.weight"] = values["decoder.final_layernorm.weight"].half()
    write_checkpoint(folder, 2, values)


def without_tensor(folder: Path) -> None:
    values = tensors(2)
    del values["decoder.final_layernorm.weight"]
    write_checkpoint(folder, 2, values)


def evaluation(folder: Path) -> None:
    with MetricsLog(folder) as log:
        log.record_evaluation(evaluation_record(NUM_STEPS, accuracy=0.75))


def no_record(folder: Path) -> None:
    records = read_metrics(folder)[:2]
    lines = (json.dumps(one) + "\n" for one in records)
    (folder / "metrics.jsonl").write_text("".join(lines))


QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
FAULTS: list[tuple[Fault, int, str, str, str]] = [
    (label, 2, "rollout", "group 5, response 3, token 4: policy version", "Only the label differs"),
    (token, 2, "rollout", "group 5, response 3, token 4: token", "was changed after sampling"),
    (other_seed, 1, "rollout", "group 3, response 1, token 1: token", "0 of 5 later tokens agree"),
    (longer, 2, "rollout", "group 4, response 1, token 6: token", "0 of 0 later tokens"),
    (
        *(other_logprob, 3, "rollout", "group 8, response 2, token 3: engine log-prob"),
        "The checkpoints of step 2 are equal",
    ),
    (swapped_groups, 2, "rollout", "group 5: prompt", "groups 5 and 6 swapped"),
    (shifted_prompts, 2, "rollout", "group 4: prompt", "Group 5 of A is group 4 of B"),
    (finish_reason, 2, "rollout", "group 7, response 4: finish reason", "tokens are equal"),
    (reward, 2, "score", "group 5, response 4: reward", "The response itself is the same"),
    (verdict, 2, "score", "group 4, response 1: correct", "1 of 5 groups differs"),
    (penalty, 2, "score", "group 4, response 2: penalty", "1 of 4 groups"),
    (disposition, 2, "selection", "group 7: disposition", "1 of 4"),
    (advantage, 2, "advantages", "group 6, response 1: advantage", "1 of 4 groups"),
    (token_advantage, 2, "advantages", "group 6, response 1", "1 of 4 groups"),
    (
        *(trainer_token, 2, "old log-probs", "group 6, response 2, token 5: old log-prob"),
        "1 of 4 responses differs in the group",
    ),
    (
        *(update_logprob, 2, "update", "group 6, response 1, token 1: log-prob in the update"),
        "in mini-batch 2",
    ),
    (loss, 2, "update", "policy/loss", "all 4 groups were compared"),
    (learning_rate, 2, "update", "policy/lr", "learning rate of the step differs"),
    (skipped, 2, "weights", "tensor embedding.word_embeddings.weight", "B skipped the update"),
    (counted_skip, 2, "update", "policy/skipped_updates", "not finite"),
    (far_update, 2, "weights", "tensor embedding", "B moved it 2 times as far as A"),
    (weight, 2, "weights", f"tensor {QKV}: elements", "1 of 32 elements differ, by at most 0.5"),
    (moment, 2, "optimizer", f"tensor {MOMENT}embedding", "the first is [9, 1]"),
    (other_type, 2, "weights", "tensor decoder.final_layernorm.weight: type", "1 of 6 tensors"),
    (without_tensor, 2, "weights", "names of tensors", "Only one run has decoder.final_layernorm"),
    (evaluation, 3, "evaluation", "accuracy", "problem is not known"),
    (no_record, 3, "record", "step", "B has no record"),
]


def first_difference(one: Path, two: Path) -> Difference:
    found = compare_runs(one, two).first
    assert found is not None, "no difference was found"
    return found


@pytest.mark.parametrize(
    ("fault", "step", "phase", "place", "evidence"),
    FAULTS,
    ids=[fault.__name__ for fault, *_ in FAULTS],
)
def test_fault_is_named(run, tmp_path, fault, step, phase, place, evidence):
    """An effect named instead of its cause would send people to the wrong place."""
    other = copy_of(run, tmp_path / "b")
    fault(other)
    found = first_difference(run, other)
    assert (found.step, found.phase) == (step, phase)
    assert found.place.startswith(place)
    assert evidence in " ".join(found.evidence)
    assert compare_runs(run, other).equal_steps == list(range(1, step))
    text = text_of_comparison(compare_runs(run, other))
    assert f"in step {step}, {phase}: {place}" in text


def test_equal_runs_are_equal_whatever_their_times(run, tmp_path, capsys):
    """Times, memory and speed differ between any two runs."""
    other = copy_of(run, tmp_path / "b")
    timed = {"time__step_s": 9.0, "memory__driver_mib": 9.0, "groups__dropped": 9.0}
    edit_metrics(other, 2, **timed, tokens_per_s=9.0, eval__accuracy=0.9)
    assert main(["diff", str(run), str(other)]) == 0
    assert "The runs are equal in 3 steps (1-3)." in capsys.readouterr().out
    assert compare_runs(run, other).gaps == {}


def test_command_prints_json_and_says_that_runs_differ(run, tmp_path, capsys):
    other = copy_of(run, tmp_path / "b")
    reward(other)
    assert main(["diff", str(run), str(other), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["equal_steps"]) == (False, [1])
    first = found["first"]
    assert (first["group"], first["response"], first["field"]) == (5, 4, "reward")
    assert first["rows"][0] == {"name": "reward", "a": "-1.0", "b": "-0.5"}
    assert [one["phase"] for one in found["also"]] == ["advantages", "update"]


def test_folder_without_run_is_refused(run, tmp_path, capsys):
    assert main(["diff", str(run), str(tmp_path)]) == DataError.exit_code
    assert "no steps are recorded in metrics.jsonl" in capsys.readouterr().err


def test_settings_are_a_note(run, tmp_path):
    """Runs with other settings may still be equal, as with another number of engines."""
    other = copy_of(run, tmp_path / "b")
    edit_config(other, "run", "seed", 2)
    edit_config(other, "rollout", "num_engines", 3)
    found = compare_runs(run, other)
    assert found.first is None
    assert found.learning_keys == [("run.seed", "1", "2")]
    assert found.other_keys == [("rollout.num_engines", "1", "3")]
    assert "run.folder" not in text_of_comparison(found)


def test_missing_data_is_named_with_its_key(run, tmp_path):
    """Without the gap a reader takes weights of steps that were never compared for equal."""
    other = copy_of(run, tmp_path / "b")
    shutil.rmtree(other / "checkpoints" / "step-1")
    edit_config(other, "observe", "saved_groups", 2)
    for step in (1, 2):
        edit_groups(other, step, lambda groups: groups[1:3])
    edit_metrics(other, 2, reward__mean=0.1)
    found = compare_runs(run, other)
    text = " ".join(text_of_comparison(found).split())
    assert found.first is not None and found.first.field == "reward/mean"
    assert "Only the 2 groups that both runs saved were compared" in text
    assert "steps 1-2: the other groups: B saved 2 (observe.saved_groups = 2; " in text
    assert "step 1: weights: no checkpoint of the step in B (checkpoint.every = 1" in text


def test_logprobs_without_checkpoints_may_be_of_other_weights(run, tmp_path):
    other = copy_of(run, tmp_path / "b")
    shutil.rmtree(other / "checkpoints")
    other_logprob(other)
    evidence = " ".join(first_difference(run, other).evidence)
    assert "The weights of step 2 were not compared: suspect them" in evidence


def test_surplus_group_of_a_faster_engine_is_no_difference(run, tmp_path):
    other = copy_of(run, tmp_path / "b")
    surplus = lambda groups: [*groups, replace(groups[0], prompt_index=9, disposition="dropped")]  # noqa: E731
    edit_groups(other, 2, surplus)
    assert compare_runs(run, other).first is None


def test_resumed_run_is_compared_from_its_first_step(run, tmp_path):
    other = copy_of(run, tmp_path / "b")
    lines = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join(lines[1:]))
    found = compare_runs(run, other)
    assert (found.first, found.equal_steps) == (None, [2, 3])
    assert "steps 1: only one run has them" in text_of_comparison(found)


def test_run_without_rollouts_is_compared_by_metrics_and_weights(run, tmp_path):
    """Supervised runs have no groups, so none is missing; their evaluation is in the metrics."""
    runs = [copy_of(run, tmp_path / name) for name in ("a", "b")]
    for one in runs:
        shutil.rmtree(one / "rollouts")
        for step in range(1, NUM_STEPS + 1):
            edit_metrics(one, step, groups__kept=None, tokens__generated=None)
    edit_metrics(runs[1], 2, eval__loss=0.7)
    found = compare_runs(*runs)
    assert found.first is not None and found.gaps == {}
    assert (found.first.step, found.first.place) == (2, "eval/loss")
    weight(runs[1])
    found = first_difference(*runs)
    assert (found.phase, found.tensor) == ("weights", QKV)


def test_metric_of_an_environment_is_of_the_rollout_or_the_score():
    """Turns that differ were blamed on the update."""
    names = ("environment/sum/return", "environment/sum/turns", "tokens/recomputed")
    phases = [compare_metrics(1, {name: 1.0}, {name: 2.0}).keys() for name in names]
    assert phases == [{"score"}, {"rollout"}, {"rollout"}]


@pytest.mark.parametrize(("differing", "group", "number"), [((1,), 5, 2), ((1, 2), 6, 1)])
def test_mini_batch_is_that_of_the_training_order(run, tmp_path, differing, group, number):
    """Even, planned sizes (2 + 2), and stale groups (4 and 5) that are spread over the updates."""
    folders = [copy_of(run, tmp_path / name) for name in "ab"]
    for folder in folders:
        edit_config(folder, "algorithm", "responses_per_mini_batch", 24)
        edit_config(folder, "sampling", "responses_per_prompt", 8)
        for place in (0, 1):
            for response in range(4):
                versions = np.zeros(NUM_TOKENS, dtype=np.int32)
                edit_response(folder, 2, place, response, policy_versions=versions)
    for place in differing:
        old = response_of(folders[1], 2, place, 0).logprobs_update
        edit_response(folders[1], 2, place, 0, logprobs_update=changed(old, 0))
    found = first_difference(*folders)
    assert (found.phase, found.group) == ("update", group)
    assert f"in mini-batch {number}" in " ".join(found.evidence)


def test_replay_has_no_generated_tokens(run, tmp_path):
    other = copy_of(run, tmp_path / "b")
    for step in range(1, NUM_STEPS + 1):
        edit_metrics(other, step, tokens__generated=None)
    found = compare_runs(run, other)
    assert found.first is None
    assert list(found.gaps.values()) == [[1, 2, 3]]


@pytest.mark.parametrize(("other", "differs"), [(None, False), (0.0, False), (1e-6, True)])
def test_first_ratio_that_one_run_did_not_measure_is_no_difference(other, differs):
    """GPUs measure it with each checkpoint, and runs may save other steps."""
    name = "policy/ratio_first_max_error"
    found = compare_metrics(3, {name: 0.0, "policy/loss": 1.0}, {name: other, "policy/loss": 1.0})
    assert list(found) == (["update"] if differs else [])


def test_update_names_how_far_the_weights_moved(run, tmp_path):
    other = copy_of(run, tmp_path / "b")
    loss(other)
    skipped(other)
    assert "B skipped the update" in " ".join(first_difference(run, other).evidence)


def test_damaged_checkpoint_is_no_difference(run, tmp_path, capsys):
    other = copy_of(run, tmp_path / "b")
    weight(other)
    shard = other / "checkpoints" / "step-2" / "trainer" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert main(["diff", str(run), str(other)]) == 4
    assert "__0_0.distcp" in capsys.readouterr().err


BATCH = [make_group(index) for index in (3, 5)]


def write(folder, batch=BATCH, counts=(7, 0), rules="rules", num_records=3):
    """Write a schedule with a batch between two publications."""
    folder.mkdir()
    schedule = SamplingSchedule(folder / SCHEDULE_FILE, rules)
    schedule.pause(0, "00" * 32, 0, {})
    if num_records > 1:
        schedule.take(1, 8, [4], batch)
        schedule.pause(1, "aa" * 32, 9, {4: counts})
    schedule.close()
    return folder


OTHER = [BATCH[0], replace(BATCH[1], scores=(replace(BATCH[1].scores[0], reward=0.5),))]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "The schedules agree in 3 takes and publications, with all their tokens."),
        ({"num_records": 1}, "The schedules agree in 1 takes and publications"),
        ({"rules": "other"}, "The schedules have other rules"),
        ({"batch": OTHER}, "part at step 1, group 5: its tokens, log-probs, versions or rewards"),
        ({"batch": BATCH[:1]}, "part at step 1, group 5: it is in the batch of A alone."),
        (
            {"counts": (7, 2)},
            "version 1, group 4, response 1: it has 0 tokens at the pause in A, and",
        ),
        # responses that one run has not begun have no counts
        (
            {"counts": ()},
            "version 1, group 4, response 0: it has 7 tokens at the pause in A, and 0",
        ),
    ],
)
def test_first_difference_is_named_by_step_and_group(tmp_path, changes, told):
    """Catches two asynchronous runs that differ for no reason that anyone can see."""
    assert told in about_schedules(write(tmp_path / "a"), write(tmp_path / "b", **changes))


def test_runs_without_a_schedule_have_nothing_to_tell(tmp_path):
    write(tmp_path / "a")
    (tmp_path / "b").mkdir()
    assert about_schedules(tmp_path / "a", tmp_path / "b") == ""
    (tmp_path / "b" / SCHEDULE_FILE).write_bytes(b"")
    assert "agree in 0 takes" in about_schedules(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(("damaged", "num_left"), [("a", 2), ("b", 0)])
def test_damage_is_named(tmp_path, damaged, num_left):
    """Catches two runs that are said to agree, although one of the files cannot be read on."""
    for name in ("a", "b"):
        write(tmp_path / name)
    path = tmp_path / damaged / SCHEDULE_FILE
    data = bytearray(path.read_bytes())
    data[-1 if num_left else 30] ^= 1
    path.write_bytes(data)
    told = about_schedules(tmp_path / "a", tmp_path / "b")
    assert told.startswith(f"The schedules agree in {num_left} takes and publications, with all")
    record = num_left + 1 if num_left else 0
    assert f" {path}: record {record} is not whole (a damaged record at byte " in told


def test_schedule_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def fail(path, read):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("megadapo.lab.diff.compare.read_records", fail)
    with pytest.raises(DataError, match="schedule.log cannot be read: Input/output error"):
        about_schedules(write(tmp_path / "a"), write(tmp_path / "b"))
