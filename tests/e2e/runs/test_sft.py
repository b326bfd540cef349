"""Whole fine-tuning runs, on the correct responses of rollouts, and a run that starts from one."""

import json
import shutil
import sys

import pytest

from megadapo.errors import CheckpointError, ConfigError, DataError, RunInterruptedError
from tests.support.runs.whole_runs import (
    SMALL,
    descendants,
    marked,
    megadapo,
    metrics,
    run,
    start_command,
    untimed,
    wait_for_step,
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

NUM_STEPS = 4


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The correct responses of two steps of the quickstart's base model."""
    folder = tmp_path_factory.mktemp("rows") / "run"
    options = ("--steps", 2, "--keep", "correct", f"--run.folder={folder}", *SMALL)
    said = megadapo("rollout", "configs/quickstart.toml", *options).stdout
    path = folder.with_name("run-rollout") / "correct.jsonl"
    lines = path.read_text().splitlines()
    assert f"{len(lines)} correct responses to" in said
    return path


def words(folder, rows, *overrides, num_steps=NUM_STEPS):
    return [
        *("sft", "configs/quickstart.toml", f"--run.folder={folder}", f"--data.train={rows}"),
        *(f"--data.held_out={rows}", f"--run.num_steps={num_steps}", "--evaluation.every=2"),
        *("--supervised.rows_per_update=8", "--trainer.optimizer.warmup_steps=2"),
        *("--trainer.optimizer.lr=1e-4", "--checkpoint.every=2", *overrides),
    ]


def sft(folder, rows, *overrides, num_steps=NUM_STEPS, code=0):
    return megadapo(*words(folder, rows, *overrides, num_steps=num_steps), code=code)


@pytest.fixture(scope="module")
def whole(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    said = sft(folder, rows).stdout
    assert "before the first step: eval/loss = " in said and "megadapo sft" in said
    return folder


def test_rows_are_the_correct_responses(rows):
    for row in map(json.loads, rows.read_text().splitlines()):
        (ask, answer) = row["messages"]
        terms = ask["content"].removesuffix("=?").split("+")
        assert answer["content"].rpartition("Answer: ")[2] == str(sum(map(int, terms)))
    texts = [json.dumps(json.loads(line)["messages"]) for line in rows.read_text().splitlines()]
    assert len(set(texts)) == len(texts)


def test_loss_falls_and_is_recorded(whole):
    records = metrics(whole)
    assert [record["step"] for record in records] == list(range(1, NUM_STEPS + 1))
    losses = [record["policy/loss"] for record in records]
    held_out = [record["eval/loss"] for record in records]
    assert [loss is None for loss in held_out] == [True, False, True, False]
    assert held_out[3] < held_out[1] < min(losses[:2])
    assert {record["policy/ratio_mean"] for record in records} == {None}
    assert all(record["tokens/trained"] > 8 for record in records)
    for name in ("plot.png", "tensorboard", "config.json", "status.json"):
        assert (whole / name).exists()
    assert json.loads(megadapo("status", whole, "--json").stdout)["state"] == "finished"
    megadapo("report", whole)


def test_stopped_run_resumes_to_the_same_metrics(whole, rows, tmp_path):
    """Also at another split, whose sums differ by rounding only."""
    folder = tmp_path / "stopped"
    sft(folder, rows, num_steps=2)
    said = sft(folder, rows)
    assert "resuming after step 2" in said.stdout
    assert untimed(metrics(folder)) == untimed(metrics(whole))
    folder = tmp_path / "split"
    resume = f"--run.resume={whole / 'checkpoints' / 'step-2'}"
    sft(folder, rows, resume, "--trainer.tensor_parallel=2", "--trainer.data_parallel=2")
    for one, two in zip(metrics(folder), metrics(whole)[2:], strict=True):
        assert one["policy/loss"] == pytest.approx(two["policy/loss"], rel=1e-5)


def test_stop_signal_ends_the_run_after_a_saved_step(rows, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "megadapo.cli", *words(folder, rows, num_steps=4000)]
    process = start_command(command, marked(folder))
    wait_for_step(process, folder, 2)
    process.terminate()
    said = process.communicate(timeout=120)[0]
    assert process.returncode == RunInterruptedError.exit_code, said
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "stopped"
    assert 2 <= status["step"] == status["checkpoint_step"] == metrics(folder)[-1]["step"]
    assert not descendants(folder)


def test_other_rows_and_other_commands_are_refused(whole, rows, tmp_path):
    short = tmp_path / "short.jsonl"
    short.write_text("".join(rows.read_text().splitlines(keepends=True)[:-1]))
    own = tmp_path / "own"
    shutil.copytree(whole, own)
    said = sft(own, rows, f"--data.train={short}", num_steps=5, code=ConfigError.exit_code)
    assert "--accept-changes=data.train" in said.stderr
    sft(own, rows, "--accept-changes=data.train", f"--data.train={short}", num_steps=5)
    assert metrics(own)[-1]["step"] == 5
    short.write_text(rows.read_text())
    said = sft(own, short, num_steps=6, code=DataError.exit_code)
    assert "the rows of data.train have changed" in said.stderr
    said = run(whole, code=CheckpointError.exit_code)
    assert "megadapo sft wrote" in said.stderr and "megadapo export" in said.stderr
    said = sft(tmp_path / "new", "arithmetic:train:8", code=DataError.exit_code)
    assert "arithmetic:train:8" in said.stderr


def test_run_with_rollouts_starts_from_the_export(whole, tmp_path):
    megadapo("export", whole, tmp_path / "warm")
    said = run(tmp_path / "rl", f"--model.path={tmp_path / 'warm'}", num_steps=1)
    (record,) = metrics(tmp_path / "rl")
    assert record["policy/ratio_first_max_error"] == 0.0, said.stdout
