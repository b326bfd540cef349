"""`megadapo diff` names step and place of small faults in whole runs.

The faults are in tests/support/injected/faults.py. Each is in step 2 of 3; a fault in one response
is in group 5, response 3, token 4. A fault of the publication is seen in step 3.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megadapo.lab.diff.compare import compare_runs
from megadapo.observe.rollouts.files import ROLLOUTS_FOLDER
from tests.support import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.full, pytest.mark.timeout(600)]

INJECTED = REPOSITORY / "tests" / "support" / "injected"
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
MOVED = "log-probs of the mini-batches before it are equal"
EXPECTED = {
    "label": (2, "rollout", f"{HERE}, token 4: policy version", "Only the label differs"),
    "token": (2, "rollout", f"{HERE}, token 4: token", "changed after sampling"),
    "engine log-prob": (2, "rollout", f"{HERE}, token 4: engine log-prob", "equal tokens"),
    "finish reason": (2, "rollout", f"{HERE}: finish reason", "The tokens are equal"),
    "swapped groups": (2, "rollout", "group 5: prompt", "groups 5 and 6 swapped"),
    "swapped responses": (2, "rollout", "group 5, response 1", "responses 1 and 3 swapped"),
    "seed": (2, "rollout", HERE, "1 of 8 responses differs"),
    "prompt": (2, "rollout", "group 5: prompt", "1 of 4 groups"),
    "reward": (2, "score", f"{HERE}: reward", "The response itself is the same"),
    "verdict": (2, "score", f"{HERE}: correct", "The response itself is the same"),
    "advantage": (2, "advantages", f"{HERE}: advantage", "1 of 4 groups"),
    "token in the batch": (2, "old log-probs", f"{HERE}, token 4", "1 of 8 responses"),
    "prompt in the batch": (2, "old log-probs", f"{HERE}, token 1", "1 of 8 responses"),
    "advantage in the batch": (2, "update", NEXT, MOVED),
    "loss weight": (2, "update", NEXT, MOVED),
    "order of the batch": (2, "update", "group 4, response 1", "mini-batch 1"),
    "not finite": (2, "update", "policy/skipped_updates", "not finite"),
    "learning rate": (2, "update", "policy/lr", "learning rate"),
    "silent learning rate": (2, "weights", "tensor embedding", "30 of 30 tensors"),
    "first update skipped": (2, "update", NEXT, MOVED),
    "last update skipped": (2, "weights", "tensor embedding", ""),
    "clipping": (2, "weights", "tensor embedding", ""),
    "weight": (2, "weights", f"tensor {QKV}: elements", "1 of 32768 elements"),
    "moment": (2, "optimizer", "tensor optimizer.state.exp_avg", "1 of "),
    "publication": (3, "rollout", "group 8", "The checkpoints of step 2 are equal"),
    "evaluation": (0, "evaluation", "accuracy", "problem is not known"),
}


WITH_ENGINES = ("seed", "prompt", "publication", "evaluation")
"""Faults that need engines. Others are put into a replay, which trains on the same groups."""


def run(folder: Path, fault: str | None = None, *, source: Path | None = None) -> Path:
    """Run the recipe with a fault; `source`: the run whose groups a replay trains on."""
    environment = dict(os.environ)
    if fault is not None:
        paths = [str(INJECTED), environment.get("PYTHONPATH", "")]
        environment |= {"FAULT": fault, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    words = ["train", "configs/quickstart.toml", f"--run.folder={folder}", *RECIPE]
    if source is not None and fault not in WITH_ENGINES:
        words.append(f"--replay={source / ROLLOUTS_FOLDER}")
    done = subprocess.run(
        [sys.executable, "-m", "megadapo.cli", *words],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
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
