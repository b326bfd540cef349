"""A small run whose tokens are as old as those of a simulated cluster."""

import numpy as np
import pytest

from megadapo.observe.rollouts.files import read_rollouts, rollouts_path
from tests.support.runs.whole_runs import (
    assert_same_metrics,
    megadapo,
    metrics,
    run,
    run_killed_at,
)

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

CLUSTER = (
    *("configs/qwen2.5-32b.toml", "--gpus=32", "--trainer-gpus=16", "--keep-rate=0.6"),
    *("--sampling.prompts_per_step=16", "--algorithm.responses_per_mini_batch=16"),
    *("--staleness=2", "--steps=4"),
)
DRIVEN = ("--sampling.mode=partial", "--sampling.max_staleness=2", "--observe.saved_groups=all")


def test_killed_run_has_the_ages_of_the_simulation_and_resumes_to_the_same(tmp_path):
    """Fails if speed, a kill or the number of engines decides what is trained."""
    schedule, whole, killed = tmp_path / "a.json", tmp_path / "whole", tmp_path / "killed"
    megadapo("simulate", *CLUSTER, f"--schedule={schedule}")
    out = run(whole, *DRIVEN, f"--schedule={schedule}").stdout
    assert "tokens have the ages of a simulation of 16 groups of 16 on 32 H100-80G" in out
    ages = []
    for record in metrics(whole):
        assert record["groups/kept"] == 8 and record["policy/ratio_first_max_error"] == 0.0
        for saved in read_rollouts(rollouts_path(whole, record["step"])):
            if saved.disposition == "trained":
                versions = [one.policy_versions for one in saved.group.responses]
                ages.append(record["step"] - 1 - np.concatenate(versions))
        assert record["staleness/max"] == max(one.max() for one in ages[-8:])
    found = np.concatenate(ages)
    assert set(found) == {0, 1, 2}
    # without the option, from the run's folder
    run_killed_at(3, killed, *DRIVEN, f"--schedule={schedule}")
    assert "resuming after step 2" in run(killed, *DRIVEN, "--rollout.num_engines=2").stdout
    assert_same_metrics(killed, whole)
