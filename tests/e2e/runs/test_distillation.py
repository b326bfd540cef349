"""A whole run of the recipe of distillation."""

import pytest

from tests.support.runs.whole_runs import metrics, run

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def test_teacher_with_the_policys_weights_teaches_nothing(tmp_path):
    """Rewards of weight 0 give no gradient either. This is the recipe as it stands."""
    run(tmp_path, recipe="configs/algorithms/distillation.toml", num_steps=2)
    for record in metrics(tmp_path):
        assert (record["kl/max"], record["policy/grad_norm"]) == (0.0, 0.0)
        assert 0.0 < record["accuracy/mean"] < 1.0
