"""Ablations over tiny recipes, and folders of their finished runs."""

import json
from pathlib import Path

from megadapo.config import to_dict
from megadapo.lab.ablation.rows import Ablation, RowRun
from megadapo.observe.metrics.records import MetricsLog
from megadapo.run.state.checkpoint import CHECKPOINTS
from tests.support import REPOSITORY
from tests.support.runs.recorded_runs import evaluation_record

ROWS = """
cumulative = true
accuracy = 0.7
[overrides]
run.num_steps = 6
[[row]]
name = "plain"
overrides.sampling.selection = "all"
source = "Table 1: 30"
[[row]]
name = "+ clip | higher"
overrides.algorithm.objective.clip_high = 0.3
[[row.expects]]
measure = "entropy"
change = "higher"
source = "Figure 2"
"""


def ablation_of(folder: Path, *overrides: str, rows: str = ROWS, num_seeds: int = 2) -> Ablation:
    """Return an ablation of the quickstart with its rows file and runs below `folder`."""
    folder.mkdir(exist_ok=True)
    path = folder / "rows.toml"
    path.write_text(rows, encoding="utf-8")
    # absolute, so that the test runs from any folder
    model = f"--model.path={REPOSITORY / 'configs' / 'quickstart-base'}"
    return Ablation.of(
        str(REPOSITORY / "configs" / "quickstart.toml"),
        path,
        num_seeds=num_seeds,
        folder=folder / "runs",
        overrides=[model, *overrides],
    )


def finish(
    run: RowRun, *, accuracy: float = 0.9, entropy: float = 0.5, seconds: float = 2.0
) -> None:
    """Write the folder of a run that took all of its steps."""
    num_steps = run.config.run.num_steps
    with MetricsLog(run.folder) as log:
        for step in range(num_steps + 1):
            if step % 2 == 0:
                log.record_evaluation(evaluation_record(step, accuracy * step / num_steps))
            if step:
                log.record(
                    {
                        "step": step,
                        "policy_version": step,
                        "policy/entropy": entropy,
                        "response_length/mean": 10.0 + step,
                        "policy/clip_high_fraction": 0.001 * step,
                        "groups/sampled": 8,
                        "groups/kept": 8,
                        "groups/all_correct": step,
                        "groups/all_wrong": 1,
                        "groups/from_reserve": 0,
                        "tokens/generated": 100,
                        "tokens/stopped": 20,
                        "time/step_s": seconds,
                    }
                )
    (run.folder / "config.json").write_text(json.dumps(to_dict(run.config)))
    checkpoint = run.folder / CHECKPOINTS / f"step-{num_steps}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
