"""A fit predicts a run's times and is proportional to them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megadapo.config import load_config
from megadapo.errors import DataError
from megadapo.lab.simulate.engine import EngineSpeed
from megadapo.lab.simulate.engines import EngineSettings, VirtualEngines
from megadapo.lab.simulate.fit import fit_run
from megadapo.lab.simulate.policies import OurSampler
from megadapo.lab.simulate.task import LogNormalLengths, Task, TaskSettings

RECIPE = Path(__file__).parents[4] / "configs" / "quickstart.toml"
ONE_ENGINE = "rollout.num_engines=1"
"""Number of engines of the recorded run."""
SPEED = EngineSpeed(step_s=4e-3, response_s=2e-4, context_s=0.0, prefill_s=1e-5)
"""Engines whose step time depends far more on running responses than by default."""


def record_run(folder: Path, num_steps: int) -> None:
    """Write the metrics of a run whose responses grow, on engines of SPEED."""
    config = load_config(str(RECIPE), [f"run.folder={folder}", ONE_ENGINE])
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config.model_dump_json())
    engines = VirtualEngines(
        EngineSettings(
            num_engines=config.rollout.num_engines,
            num_slots=config.rollout.max_num_seqs,
            speed=SPEED,
        ),
        Task(task(config.sampling.responses_per_prompt, 0)),
    )
    sampler = OurSampler(config.sampling, engines, engines.task)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            engines.task = Task(task(config.sampling.responses_per_prompt, step))
            start = engines.now
            batch = sampler.sampler.next_batch()
            engines.publish()
            (engine,) = batch.engines
            lengths = batch.response_lengths
            record = {
                "step": step,
                "time/rollout_s": engines.now - start,
                "tokens/generated": batch.num_tokens,
                "groups/sampled": batch.num_sampled,
                "groups/all_correct": batch.num_all_correct,
                "groups/all_wrong": batch.num_all_wrong,
                "response_length/mean": float(np.mean(lengths)),
                "response_length/p95": float(np.quantile(lengths, 0.95)),
                "rollout/engine_busy_share": engine.busy_seconds / engine.seconds,
                "rollout/slot_use": engine.mean_running,
                "rollout/engine_tokens_min": engine.num_tokens,
                "rollout/engine_tokens_max": engine.num_tokens,
            }
            file.write(json.dumps(record) + "\n")


def task(num_responses: int, step: int) -> TaskSettings:
    mean = 10.0 + 2.0 * step
    return TaskSettings(
        lengths=LogNormalLengths.of(mean, 2.0 * mean),
        keep_rate=0.3 + 0.02 * step,
        num_responses=num_responses,
        max_tokens=48,
        prompt_tokens=12,
    )


def test_run_is_predicted_from_its_first_half(tmp_path: Path) -> None:
    record_run(tmp_path / "run", 8)
    fit = fit_run(tmp_path / "run")
    assert fit.num_fitted == 4 and fit.steps == tuple(range(1, 9))
    measured, predicted = np.array(fit.measured), np.array(fit.predicted)
    # metrics do not say which prompts were drawn, so single steps differ
    assert predicted[4:].sum() == pytest.approx(measured[4:].sum(), rel=0.15)
    assert 0.3 < fit.task.keep_rate < 0.6


def test_real_run_is_predicted_from_its_first_half(tmp_path: Path) -> None:
    """The metrics come from the quickstart on two cores: lengths double, fewer groups are mixed."""
    config = load_config(str(RECIPE), [f"run.folder={tmp_path}", ONE_ENGINE])
    (tmp_path / "config.json").write_text(config.model_dump_json())
    shutil.copy(Path(__file__).with_name("quickstart-metrics.jsonl"), tmp_path / "metrics.jsonl")
    fit = fit_run(tmp_path)
    assert fit.num_fitted == 15
    measured, predicted = np.array(fit.measured[15:]), np.array(fit.predicted[15:])
    assert predicted.sum() == pytest.approx(measured.sum(), rel=0.15)
    assert np.abs(predicted / measured - 1.0).mean() < 0.2


def test_short_run_is_refused(tmp_path: Path) -> None:
    record_run(tmp_path / "run", 3)
    with pytest.raises(DataError, match="3 steps"):
        fit_run(tmp_path / "run")


def test_slower_engines_scale_all_times(tmp_path: Path) -> None:
    record_run(tmp_path / "run", 4)
    fit = fit_run(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    slower = [{**one, "time/rollout_s": 3.0 * one["time/rollout_s"]} for one in records]
    path.write_text("".join(json.dumps(one) + "\n" for one in slower))
    again = fit_run(tmp_path / "run")
    assert again.engines.speed.step_s == pytest.approx(3.0 * fit.engines.speed.step_s)
    assert replace(again.task, lengths=fit.task.lengths) == fit.task
