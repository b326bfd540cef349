"""Whole runs through the command line: what they leave behind, and that a stop changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megadapo.errors import InfraError, OracleError, RunInterrupted
from megadapo.observe.metrics import METRIC_NAMES

REPOSITORY = Path(__file__).parents[2]
NUM_STEPS = 4
SMALL = [
    "--sampling.prompts_per_step=8",
    "--dapo.responses_per_mini_batch=32",
    "--evaluation.max_problems=8",
    "--evaluation.every=2",
    "--checkpoint.every=2",
]
TIMED = ("time/", "tokens_per_s")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def command(folder: Path, *overrides: str, num_steps: int = NUM_STEPS) -> list[str]:
    return [
        *(sys.executable, "-m", "megadapo.cli", "train", "configs/quickstart.toml"),
        *(f"--run.folder={folder}", f"--run.num_steps={num_steps}", *SMALL, *overrides),
    ]


def run(folder: Path, *overrides: str, num_steps: int = NUM_STEPS) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(folder, *overrides, num_steps=num_steps),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=500,
    )


def marked(folder: Path) -> dict[str, str]:
    """An environment by which all processes of a run are found, whatever they call themselves."""
    return {**os.environ, "RUN_UNDER_TEST": str(folder)}


def descendants(folder: Path) -> list[tuple[int, str]]:
    """Process number and command line of every living process that descends from the run."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"RUN_UNDER_TEST={folder}\0".encode() in (process / "environ").read_bytes():
                name = (process / "cmdline").read_text(errors="replace")
                found.append((int(process.name), name))
        except OSError:
            continue  # it has just ended
    return found


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(records: list[dict]) -> list[dict]:
    return [{k: v for k, v in r.items() if not k.startswith(TIMED)} for r in records]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    result = run(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "before and after" in result.stdout
    return folder


def test_a_run_leaves_what_it_promises(uninterrupted):
    records = metrics(uninterrupted)
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    for record in records:
        assert list(record) == list(METRIC_NAMES)
        assert record["groups/kept"] == 8
        assert record["policy/skipped_updates"] == 0
    assert [r["eval/accuracy"] is not None for r in records] == [False, True, False, True]
    for name in ("config.json", "log.txt", "plot.png", "checkpoints/step-4/manifest.json"):
        assert (uninterrupted / name).stat().st_size > 0, name
    assert list((uninterrupted / "tensorboard").iterdir())


def test_the_oracles_hold_on_every_step(uninterrupted):
    for record in metrics(uninterrupted):
        assert record["policy/ratio_first_max_error"] == 0.0
        assert record["parity/logprob_abs_max"] < 1e-4


def test_a_finished_run_starts_nothing(uninterrupted):
    start = time.monotonic()
    result = run(uninterrupted)
    assert result.returncode == 0, result.stderr
    assert "before and after" in result.stdout
    assert time.monotonic() - start < 30
    assert len(metrics(uninterrupted)) == NUM_STEPS


def start(folder: Path, *overrides: str) -> subprocess.Popen:
    """Start or resume the run in the background."""
    return subprocess.Popen(
        command(folder, *overrides),
        cwd=REPOSITORY,
        env=marked(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(process: subprocess.Popen, folder: Path, step: int) -> None:
    """Wait until the metrics of `step` are on disk."""
    path = folder / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not path.exists() or len(path.read_text().splitlines()) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no step within five minutes"
        time.sleep(0.05)


def test_a_run_stopped_twice_equals_one_that_was_not(uninterrupted, tmp_path):
    """Weights, moments, learning rate, prompts, seeds and reserve must all come back."""
    folder = tmp_path / "stopped"
    for step in (1, 3):
        process = start(folder)
        wait_for_step(process, folder, step)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == RunInterrupted.exit_code, output
        assert "SIGTERM" in output
        assert descendants(folder) == []
    result = run(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "resuming after step" in result.stdout
    assert untimed(metrics(folder)) == untimed(metrics(uninterrupted))


@pytest.mark.full
@pytest.mark.fault
def test_a_killed_run_leaves_no_process_and_loses_no_checkpoint(uninterrupted, tmp_path):
    """An engine that outlives its driver would keep its memory, or its GPU."""
    folder = tmp_path / "killed"
    process = start(folder)
    wait_for_step(process, folder, 3)
    process.kill()
    process.communicate(timeout=60)
    # engine and trainer end at once; Ray's own agents notice their dead parent a minute later
    deadline = time.monotonic() + 150
    while descendants(folder) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert descendants(folder) == []
    result = run(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "resuming after step 2" in result.stdout
    assert untimed(metrics(folder)) == untimed(metrics(uninterrupted))


@pytest.mark.full
@pytest.mark.fault
def test_a_rank_that_hangs_ends_the_run_in_time_and_the_run_resumes(uninterrupted, tmp_path):
    """A process that is stopped, not dead, is what waits without a deadline wait for forever."""
    folder = tmp_path / "hung"
    deadlines = (
        "--trainer.timeout_s=15",
        "--weights.deadline_s=15",
        "--rollout.round_timeout_s=30",
    )
    process = start(folder, *deadlines)
    wait_for_step(process, folder, 2)
    hung = [pid for pid, name in descendants(folder) if "TrainerWorker" in name]
    assert len(hung) == 1
    os.kill(hung[0], signal.SIGSTOP)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == InfraError.exit_code, output
    assert "within 15 s" in output
    assert descendants(folder) == []
    result = run(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert untimed(metrics(folder)) == untimed(metrics(uninterrupted))


def test_every_split_of_the_trainer_runs_by_overrides_alone(uninterrupted, tmp_path):
    """TP 2 x PP 2 with sequence parallelism and two engines learn what one process learns.

    The first step's samples come from equal weights and seeds, so they are the same responses; its
    loss may differ by rounding only.
    """
    folder = tmp_path / "split"
    result = run(
        folder,
        "--trainer.tensor_parallel=2",
        "--trainer.pipeline_parallel=2",
        "--trainer.sequence_parallel=true",
        "--rollout.num_engines=2",
        "--rollout.num_threads=1",
        num_steps=2,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    split, whole = metrics(folder)[0], metrics(uninterrupted)[0]
    assert split["response_length/mean"] == whole["response_length/mean"]
    assert split["accuracy/mean"] == whole["accuracy/mean"]
    assert split["policy/loss"] == pytest.approx(whole["policy/loss"], rel=1e-4, abs=1e-6)
    assert split["policy/entropy"] == pytest.approx(whole["policy/entropy"], rel=1e-5)


@pytest.mark.full
def test_an_oracle_stops_the_run_with_its_own_exit_code(tmp_path):
    """A parity bound of zero cannot hold between two programs."""
    result = run(tmp_path / "strict", "--oracles.logprob_abs_max=0.0", num_steps=1)
    assert result.returncode == OracleError.exit_code
    assert "parity/logprob_abs_max" in result.stderr and "oracles.logprob_abs_max" in result.stderr
