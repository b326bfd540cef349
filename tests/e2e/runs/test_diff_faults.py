"""`megadapo diff` names step and place of small faults in whole runs.

The faults are in tests/support/injected/faults.py, one for each kind of data that shows it first;
tests/unit/lab/diff has those of all phases. Each is in step 2 of 3; a fault in one response is in
group 5, response 3, token 4. A fault of the publication is seen in step 3.
"""

import sys
from pathlib import Path

import pytest

from megadapo.lab.diff.compare import compare_runs
from megadapo.observe.rollouts.files import ROLLOUTS_FOLDER
from tests.support.runs.whole_runs import injecting, marked, start_command

pytestmark = [pytest.mark.fault, pytest.mark.full, pytest.mark.timeout(600)]

RECIPE = [
    "--run.num_steps=3",
    "--trainer.optimizer.warmup_steps=2",
    "--rollout.num_engines=1",
    "--rollout.num_threads=2",
    "--sampling.prompts_per_step=4",
    "--algorithm.responses_per_mini_batch=16",
    "--data.held_out=arithmetic:held_out:8",
    "--evaluation.every=3",
    "--checkpoint.every=1",
    "--checkpoint.keep=3",
    "--observe.saved_groups=all",
    # a fault must not end the run
    "--oracles.logprob_abs_mean=none",
    "--oracles.logprob_abs_max=none",
    "--oracles.ratio_first_max_error=1e9",
]
HERE = "group 5, response 3"
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
NEXT = "group 6, response 1, token 1: log-prob in the update"
"""The first token of the second mini-batch, after an update that differs."""
EXPECTED = {
    "seed": (2, "rollout", HERE, "1 of 8 responses differs"),
    "token in the batch": (2, "old log-probs", f"{HERE}, token 4", "1 of 8 responses"),
    "loss weight": (2, "update", NEXT, "log-probs of the mini-batches before it are equal"),
    "weight": (2, "weights", f"tensor {QKV}: elements", "1 of 32768 elements"),
    "publication": (3, "rollout", "group 8", "The checkpoints of step 2 are equal"),
}


WITH_ENGINES = ("seed", "publication")
"""Faults that need engines. Others are put into a replay, which trains on the same groups."""


def run(folder: Path, fault: str | None = None, *, source: Path | None = None) -> Path:
    """Run the recipe with a fault; `source`: the run whose groups a replay trains on."""
    words = ["train", "configs/quickstart.toml", f"--run.folder={folder}", *RECIPE]
    if source is not None and fault not in WITH_ENGINES:
        words.append(f"--replay={source / ROLLOUTS_FOLDER}")
    environment = marked(folder) | (injecting(FAULT=fault) if fault is not None else {})
    process = start_command([sys.executable, "-m", "megadapo.cli", *words], environment)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "undisturbed")


def test_replay_is_equal(undisturbed, tmp_path):
    found = compare_runs(undisturbed, run(tmp_path / "replay", source=undisturbed))
    assert (found.first, found.equal_steps) == (None, [1, 2, 3])


def test_repeated_run_is_equal(undisturbed, tmp_path):
    found = compare_runs(undisturbed, run(tmp_path / "again"))
    assert (found.first, found.equal_steps, found.gaps) == (None, [1, 2, 3], {})


@pytest.mark.parametrize("fault", EXPECTED)
def test_fault_in_a_run_is_named(undisturbed, tmp_path, fault):
    step, phase, place, evidence = EXPECTED[fault]
    found = compare_runs(undisturbed, run(tmp_path / "faulty", fault, source=undisturbed)).first
    assert found is not None
    assert (found.step, found.phase) == (step, phase)
    assert found.place.startswith(place)
    assert evidence in " ".join(found.evidence)
