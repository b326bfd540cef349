"""Engines and trainer route the tokens of a model with experts alike."""

import pytest

from tests.support.runs.whole_runs import metrics, run

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

ASYNC = [
    "--sampling.mode=async",
    "--sampling.max_staleness=2",
    "--cluster.placement=separate",
    "--evaluation.every=0",
    # few slots, so that publications stop responses
    "--rollout.max_num_seqs=4",
]


@pytest.mark.parametrize(
    "further",
    [
        [],
        ["--trainer.router_replay=false"],
        ["--sampling.mode=partial", "--sampling.max_staleness=2"],
        ASYNC,
    ],
    ids=["replayed", "free", "replayed-partial", "replayed-async"],
)
def test_experts_on_two_ranks_keep_parity(tmp_path, further):
    folder = tmp_path / "run"
    run(folder, *further, recipe="configs/experts.toml", num_steps=3)
    records = metrics(folder)
    assert [record["policy/ratio_first_max_error"] for record in records] == [0.0] * 3
    # None if the engines had no token of the newest weights
    parity = [record["parity/logprob_abs_max"] for record in records]
    assert parity[0] is not None and all(gap is None or gap < 1e-4 for gap in parity)
    assert further != ASYNC or max(record["staleness/max"] for record in records) > 0
    assert all(0.9 < record["experts/balance_loss"] < 2.0 for record in records)
    assert all(1.0 <= record["experts/max_load"] <= 4.0 for record in records)
