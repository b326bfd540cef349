"""Files of saved groups: values that change on their way, half files, and unnoticed disk errors."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from megadapo.algorithm.groups import Branch
from megadapo.codec import decode, encode
from megadapo.data.group import NO_VERSION
from megadapo.errors import DataError, InfraError
from megadapo.observe.rollouts import files
from megadapo.observe.rollouts.files import (
    RolloutLog,
    read_rollouts,
    rollouts_path,
    saved_steps,
    step_file,
    steps_in,
    write_rollouts,
)
from megadapo.observe.rollouts.saved_group import SavedGroup
from tests.support.rollout.saved_groups import (
    awkward_group,
    saved_episode,
    saved_group,
    saved_response,
)

EXPERTS = {"shape": [1, 2, 2], "dtype": "uint8", "data": "AAECAw=="}
"""The experts 0, 1 and 2, 3 of a token in two layers."""


def write(folder: Path, step: int, *groups: SavedGroup) -> Path:
    path = rollouts_path(folder, step)
    write_rollouts(path, groups)
    return path


def compressed(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
        file.write(text.encode())
    return path


def assert_same(one: SavedGroup, two: SavedGroup) -> None:
    for name, value in vars(one).items():
        if name != "responses":
            assert getattr(two, name) == value, name
    for first, second in zip(one.responses, two.responses, strict=True):
        assert first.score == second.score
        for before, after in ((first, second), (first.response, second.response)):
            for name, value in vars(before).items():
                other = getattr(after, name)
                if isinstance(value, np.ndarray):
                    assert value.dtype == other.dtype
                    np.testing.assert_array_equal(value, other)
                elif name != "response":
                    assert repr(other) == repr(value), name


def test_groups_survive_exactly_and_in_order(tmp_path):
    groups = [
        awkward_group(2),
        saved_group(prompt_index=3),
        saved_group(saved_response(""), prompt_index=9),
    ]
    back = list(read_rollouts(write(tmp_path, 4, *groups)))
    assert len(back) == 3
    for one, two in zip(groups, back, strict=True):
        assert_same(one, two)


def test_tool_output_and_branch_survive(tmp_path):
    versions = np.array([3, NO_VERSION, 3], dtype=np.int32)
    first = saved_response("abc", policy_versions=versions)
    branched = saved_response("abd", policy_versions=versions, branch=Branch(0, 2))
    (back,) = read_rollouts(write(tmp_path, 1, saved_group(first, branched)))
    assert back.group.branches == (None, Branch(0, 2))
    assert back.group.num_sampled == (2, 2) and back.group.num_generated == 3


def test_names_of_control_tokens_survive_and_older_files_have_none(tmp_path):
    group = saved_group(saved_episode(("a", "b", 1.0)), control_tokens={7: "<|im_end|>"})
    (back,) = read_rollouts(write(tmp_path, 1, group))
    assert_same(group, back)
    entry = encode(group, readable=True)
    del entry["control_tokens"]
    assert decode(SavedGroup, entry).control_tokens == {}


@pytest.mark.parametrize(
    "changes",
    [
        *({"branch": one} for one in ([1, 1], [2, 1], [-1, 1], [0, 3], [0, -1], [0], "ab")),
        *({"policy_versions": one} for one in ([], [[1, 2]], [[1, 4], [2, -1]], [4], None)),
        *({"policy_versions": [[one, 3]]} for one in (2**31, -2, "a")),
        {"policy_versions": [[3, 10**11]]},
        {"reward_parts": [1]},
        {"correct": 1},
        {"reward": "0.5"},
        *({"steps": one} for one in ([[3, 0.1], [2, 0.1]], [[4, 0.1]], [[1]])),
        {"tokens": ["a"]},
        {"logprobs_old": [0.1]},
        {"experts": {**EXPERTS, "data": "AAAA"}},
        {"experts": {**EXPERTS, "data": "?"}},
        {"experts": {**EXPERTS, "shape": [2, 1, 3]}},
        {"experts": {**EXPERTS, "shape": [2, 2]}},
        {"experts": {**EXPERTS, "dtype": "object"}},
    ],
)
def test_response_that_was_changed_wrongly_is_rejected(changes):
    """A replay would train on other tokens; one expert twice in a token makes dispatchers hang."""
    entry = encode(saved_group(saved_response("ab"), saved_response("abc")), readable=True)
    entry["responses"][1]["experts"] = EXPERTS
    decode(SavedGroup, entry)
    entry["responses"][1].update(changes)
    with pytest.raises(ValueError, match="."):
        decode(SavedGroup, entry)


@pytest.mark.parametrize("name", ["branch", "turns", "experts", "advantages"])
def test_response_without_a_value_is_rejected(name):
    """A default would make shared tokens its own, or lose the experts."""
    entry = encode(saved_group(saved_response("ab")), readable=True)
    del entry["responses"][0][name]
    with pytest.raises(ValueError, match=f"without {name}"):
        decode(SavedGroup, entry)


def test_float32_survives_as_decimal_text(tmp_path):
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    response = saved_response("x" * len(values), logprobs=values)
    (back,) = read_rollouts(write(tmp_path, 1, saved_group(response)))
    read = back.responses[0].response.logprobs
    assert np.array_equal(read.view(np.uint32), values.view(np.uint32))
    entry = encode(saved_group(saved_response("x", logprobs=np.float32([-0.1]))), readable=True)
    assert entry["responses"][0]["logprobs_rollout"] == [-0.1], "more digits than it needs"


def test_non_finite_log_probs_are_null(tmp_path):
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    values = np.array([np.nan, np.inf, -np.inf, -1.0], dtype=np.float32)
    line = json.dumps(encode(saved_group(saved_response("abcd", logprobs=values)), readable=True))
    entry = json.loads(line, parse_constant=refuse)
    assert entry["responses"][0]["logprobs_rollout"] == [None, None, None, -1.0]


def test_group_is_rebuilt_as_sampled():
    saved = saved_group()
    group = saved.group
    assert (group.prompt_index, group.prompt) == (saved.prompt_index, saved.prompt)
    assert group.prompt_ids == saved.prompt_ids
    assert group.rewards == (1.0, -1.0) and group.correct == (True, False)
    assert group.scores == tuple(one.score for one in saved.responses)
    assert group.responses == tuple(one.response for one in saved.responses)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_truncated_file_is_an_error(tmp_path, share):
    path = write(tmp_path, 4, *(saved_group(prompt_index=index) for index in range(40)))
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=r"step-4\.jsonl\.zst"):
        list(read_rollouts(path))


LINE = json.dumps(encode(saved_group(), readable=True))


@pytest.mark.parametrize(
    "line",
    [
        "garbage",
        "[]",
        "{}",
        "[" * 100_000,
        LINE.replace('"trained"', '"sold"'),
        LINE.replace('"text": "3"', '"text": 3'),
        LINE.replace('"tokens": ["3"]', '"tokens": [3]'),
        LINE.replace('"tokens": ["3"]', '"tokens": ["3", "4"]'),
        LINE.replace('"reward": -1.0', '"reward": "much"'),
        LINE.replace('"answer": "2"', '"answers": "2"'),
        LINE.replace('"id": "id-7"', '"name": "id-7"'),
    ],
)
def test_malformed_line_error_names_file_and_line(tmp_path, line):
    path = compressed(rollouts_path(tmp_path, 1), f"{LINE}\n{line}\n")
    with pytest.raises(DataError, match=r"step-1\.jsonl\.zst, line 2"):
        list(read_rollouts(path))


def test_endless_line_is_not_read_whole(tmp_path, monkeypatch):
    """A few kilobytes of zstd can be gigabytes of text."""
    monkeypatch.setattr(files, "MAX_LINE_LENGTH", 2 * len(LINE))
    path = compressed(rollouts_path(tmp_path, 1), f"{LINE}\n{'0' * 5 * len(LINE)}")
    with pytest.raises(DataError, match=r"step-1\.jsonl\.zst, line 2: .*longer than"):
        list(read_rollouts(path))


def test_missing_and_damaged_files_are_data_errors(tmp_path):
    path = rollouts_path(tmp_path, 1)
    with pytest.raises(DataError, match="step-1"):
        list(read_rollouts(path))
    path.parent.mkdir()
    path.write_bytes(b"not zstd at all")
    with pytest.raises(DataError, match="step-1"):
        list(read_rollouts(path))
    compressed(path, "\udc80".encode("utf-8", "surrogatepass").decode("latin-1"))
    with pytest.raises(DataError, match="step-1"):
        list(read_rollouts(path))


def test_steps_are_listed_by_number(tmp_path):
    assert saved_steps(tmp_path) == []
    for step in (10, 9, 2):
        write(tmp_path, step, saved_group())
    for name in ("tmp-step-3.jsonl.zst", "step-x.jsonl.zst", "step-4.jsonl", "notes.txt"):
        (tmp_path / "rollouts" / name).touch()
    assert saved_steps(tmp_path) == [2, 9, 10]


def test_log_writes_in_background_and_rewinds(tmp_path):
    log = RolloutLog(tmp_path)
    for step in range(1, 5):
        log.write(step, iter([saved_group(step=step)]))
    log.wait()
    held_out = tmp_path / "rollouts" / "held_out"
    for step in (0, 3):
        write_rollouts(step_file(held_out, step), [saved_group(step=step)])
    (tmp_path / "rollouts" / "step-5.jsonl.zst.1.part").write_bytes(b"half")
    log.rewind(2)
    assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == [
        "held_out",
        "step-1.jsonl.zst",
        "step-2.jsonl.zst",
    ]
    assert steps_in(held_out) == [0]
    log.rewind(-1)
    assert saved_steps(tmp_path) == []
    log.close()


def test_groups_are_streamed(tmp_path):
    alive: list[int] = []

    def groups() -> Iterator[SavedGroup]:
        for index in range(50):
            text = "x" * 1000
            alive.append(index)
            yield saved_group(saved_response(text), prompt_index=index)

    path = rollouts_path(tmp_path, 1)
    write_rollouts(path, groups())
    reader = read_rollouts(path)
    assert next(reader).prompt_index == 0 and len(alive) == 50
    assert [group.prompt_index for group in reader] == list(range(1, 50))


def test_disk_error_names_the_file(tmp_path):
    (tmp_path / "rollouts").write_text("a file where the folder should be")
    log = RolloutLog(tmp_path)
    log.write(3, [saved_group()])
    with pytest.raises(InfraError, match=r"step-3\.jsonl\.zst.*observe\.saved_groups"):
        log.wait()
    log.wait()
    log.write(4, [saved_group()])
    log.close()


def test_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InfraError, match="No space left on device"):
        write(tmp_path, 3, saved_group())
    assert list((tmp_path / "rollouts").iterdir()) == []
