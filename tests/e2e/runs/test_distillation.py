"""Whole runs with a teacher of another family: from a folder, and from vLLM's own server."""

import pytest

from tests.support import REPOSITORY
from tests.support.processes.vllm_server import served
from tests.support.runs.whole_runs import SMALL, megadapo, metrics, untimed

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

TEACHER = REPOSITORY / "configs" / "experts-base"
RECIPE = "configs/algorithms/distillation.toml"


def distil(folder, num_steps, *overrides, code=0):
    steps = f"--run.num_steps={num_steps}"
    words = [f"--run.folder={folder}", steps, "--trainer.optimizer.warmup_steps=0", *SMALL]
    return megadapo("train", RECIPE, *words, *overrides, code=code)


def test_server_and_folder_teach_the_same(tmp_path):
    """Within the rounding of fp32. Without its server a run ends with the exit code of
    infrastructure."""
    folder, server = tmp_path / "folder", tmp_path / "server"
    by_folder = f"--algorithm.reference.path={TEACHER}"
    distil(folder, 2, by_folder)
    with served(TEACHER, tmp_path / "log") as url:
        words = [f"--algorithm.reference.server={url}", "--algorithm.reference.path=none"]
        distil(server, 2, *words)
    distil(server, 4, *words, code=5)
    taught, asked = metrics(folder), metrics(server)
    for one, other in zip(taught, asked, strict=True):
        assert one["kl/mean"] == pytest.approx(other["kl/mean"], rel=1e-4)
        assert one["kl/max"] == pytest.approx(other["kl/max"], rel=1e-4)
        assert one["kl/max"] > 0.1


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
