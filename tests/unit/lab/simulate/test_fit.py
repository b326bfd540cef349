"""A fit predicts a run's times and is proportional to them.

The recorded metrics come from the quickstart on two cores: lengths double, fewer groups are mixed.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megadapo.config import load_config
from megadapo.errors import DataError
from megadapo.lab.simulate.fit import RunFit, fit_run

RECIPE = Path(__file__).parents[4] / "configs" / "quickstart.toml"
RECORDED = Path(__file__).with_name("quickstart-metrics.jsonl").read_text().splitlines()


def fit_of(folder: Path, records: list[dict[str, Any]]) -> RunFit:
    config = load_config(str(RECIPE), [f"run.folder={folder}", "rollout.num_engines=1"])
    (folder / "config.json").write_text(config.model_dump_json())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return fit_run(folder)


def test_run_is_predicted_from_its_first_half(tmp_path):
    records = [json.loads(line) for line in RECORDED]
    fit = fit_of(tmp_path, records)
    assert fit.num_fitted == 15 and fit.steps == tuple(range(1, 31))
    measured, predicted = np.array(fit.measured[15:]), np.array(fit.predicted[15:])
    # metrics do not say which prompts were drawn, so single steps differ
    assert predicted.sum() == pytest.approx(measured.sum(), rel=0.15)
    assert np.abs(predicted / measured - 1.0).mean() < 0.2
    names = ("sampled", "all_correct", "all_wrong")
    sampled, *unmixed = (sum(one[f"groups/{name}"] for one in records) for name in names)
    assert fit.task.keep_rate == pytest.approx(1.0 - sum(unmixed) / sampled)


def test_short_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="3 steps"):
        fit_of(tmp_path, [json.loads(line) for line in RECORDED[:3]])


def test_slower_engines_scale_all_times(tmp_path):
    records = [json.loads(line) for line in RECORDED[:4]]
    fit = fit_of(tmp_path, records)
    slower = [{**one, "time/rollout_s": 3.0 * one["time/rollout_s"]} for one in records]
    again = fit_of(tmp_path, slower)
    assert again.engines.speed.step_s == pytest.approx(3.0 * fit.engines.speed.step_s)
    assert replace(again.task, lengths=fit.task.lengths) == fit.task


def test_idle_time_does_not_make_engines_slower(tmp_path):
    """The use of slots is over all time: dividing by it alone counted the idle time twice."""
    records = [json.loads(line) for line in RECORDED[:4]]
    idle = [
        {
            **one,
            "time/rollout_s": 2.0 * one["time/rollout_s"],
            "rollout/engine_busy_share": 0.5 * one["rollout/engine_busy_share"],
            "rollout/slot_use": 0.5 * one["rollout/slot_use"],
        }
        for one in records
    ]
    speeds = [fit_of(tmp_path, each).engines.speed for each in (records, idle)]
    assert speeds[1].step_s == pytest.approx(speeds[0].step_s)


@pytest.mark.parametrize("tokens", [0, None])
def test_step_without_engine_tokens_is_skipped(tmp_path, tokens):
    """A resumed step whose groups all came from the journal divided by 0."""
    records = [json.loads(line) for line in RECORDED[:5]]
    names = ("engine_tokens_min", "engine_tokens_max", "slot_use", "engine_busy_share")
    records[1] |= {f"rollout/{name}": tokens for name in names}
    assert fit_of(tmp_path, records).steps == (1, 3, 4, 5)
