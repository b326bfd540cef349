"""Engines and trainer route the tokens of a model with experts alike."""

import pytest

from tests.support import REPOSITORY
from tests.support.runs.whole_runs import metrics, run

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(600)]

MODEL = REPOSITORY / "configs" / "experts-base"


@pytest.mark.parametrize(
    "further",
    [
        [],
        ["--trainer.router_replay=true", "--sampling.mode=partial", "--sampling.max_staleness=2"],
    ],
    ids=["free", "replayed-partial"],
)
def test_experts_on_two_ranks_keep_parity(tmp_path, further):
    folder = tmp_path / "run"
    split = ["--trainer.data_parallel=2", "--trainer.expert_parallel=2"]
    aux = "--trainer.router_aux_loss_coef=0.001"
    run(folder, f"--model.path={MODEL}", *split, aux, *further, num_steps=3)
    records = metrics(folder)
    assert [record["policy/ratio_first_max_error"] for record in records] == [0.0] * 3
    assert all(record["parity/logprob_abs_max"] < 1e-4 for record in records)
    assert all(0.9 < record["experts/balance_loss"] < 2.0 for record in records)
    assert all(1.0 <= record["experts/max_load"] <= 4.0 for record in records)
