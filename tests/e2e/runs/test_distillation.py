"""Whole runs with a teacher, of the policy's family and of another."""

import pytest

from tests.support import REPOSITORY
from tests.support.runs.whole_runs import SMALL, megadapo, metrics, untimed

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

TEACHER = REPOSITORY / "configs" / "experts-base"
RECIPE = "configs/algorithms/distillation.toml"


def distil(folder, num_steps, *overrides, code=0):
    steps = f"--run.num_steps={num_steps}"
    words = [f"--run.folder={folder}", steps, "--trainer.optimizer.warmup_steps=0", *SMALL]
    return megadapo("train", RECIPE, *words, *overrides, code=code)


def test_teacher_with_the_policys_weights_teaches_nothing(tmp_path):
    """Rewards of weight 0 give no gradient either. This is the recipe as it stands."""
    distil(tmp_path / "own", 2)
    for record in metrics(tmp_path / "own"):
        assert (record["kl/max"], record["policy/grad_norm"]) == (0.0, 0.0)
        assert 0.0 < record["accuracy/mean"] < 1.0


def test_stopped_run_with_a_teacher_resumes_the_same(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    by_folder = f"--algorithm.reference.path={TEACHER}"
    distil(whole, 4, by_folder)
    distil(parts, 2, by_folder)
    distil(parts, 4, by_folder)
    assert untimed(metrics(whole)) == untimed(metrics(parts))
