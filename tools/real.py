"""Train a real model on a real task, export it, and measure it again in plain transformers.

    python tools/real.py [--config RECIPE] [--section.key=value ...]

It calls megadapo train, export and report, each of which can be called alone. Without --model.path
it takes the folder that tools/fetch_smollm2.py makes. A stopped run continues. The last lines are a
table, which RUN/real.md keeps: held-out accuracy before and after, time, and memory.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from plain_accuracy import plain_accuracy

from megadapo.cluster.machine import GIB
from megadapo.cluster.processes import descendants
from megadapo.config import RunConfig, load_config
from megadapo.errors import ConfigError, InfraError, MegadapoError
from megadapo.observe.metrics.records import EvaluationRecord, read_evaluations
from megadapo.observe.run_records import RunRecords
from megadapo.observe.summary import costs
from megadapo.observe.tables import TextTable
from megadapo.rollout.sampling.evaluation import Evaluation

RECIPE = "configs/smollm2-135m.toml"
MEGADAPO = (sys.executable, "-m", "megadapo.cli")
SAMPLE_S = 1.0
"""Time between two samples of the memory."""
MOST_ERRORS = 3.0
"""Largest difference between the two engines' accuracies, in standard errors."""


def main() -> int:
    """Train, export, measure and print; return 1 if the export is not the trained model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=RECIPE, help=f"recipe (default: {RECIPE})")
    arguments, overrides = parser.parse_known_args()
    try:
        if not any(one.startswith("--model.path=") for one in overrides):
            overrides.append(f"--model.path={fetched()}")
        config = load_config(arguments.config, [one.removeprefix("--") for one in overrides])
        return real(config, ["train", arguments.config, *overrides])
    except MegadapoError as error:
        print(f"real.py: {error}", file=sys.stderr)
        return error.exit_code


def fetched() -> str:
    """Return the folder of SmolLM2, which the first call makes."""
    command = [sys.executable, str(Path(__file__).with_name("fetch_smollm2.py"))]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        sys.exit(result.returncode)
    return result.stdout.split("\n")[-2]


def real(config: RunConfig, train: list[str]) -> int:
    """Run the commands and print the table; return the exit code."""
    if config.evaluation.every == 0 or config.data.held_out is None:
        raise ConfigError("nothing to compare: set evaluation.every and data.held_out")
    run = config.run.folder
    started = time.monotonic()
    peak = megadapo(*train)
    minutes = (time.monotonic() - started) / 60.0
    evaluations = read_evaluations(run)
    before, after = evaluations[0], evaluations[-1]
    export = run / f"export-step-{after.step}"
    if not export.exists():
        megadapo("export", str(run), str(export), "--step", str(after.step))
    megadapo("report", str(run))
    print("measuring the export in plain transformers", flush=True)
    plain = plain_accuracy(config, export)
    found = table(config, before, after, plain, minutes=minutes, peak=peak)
    (run / "real.md").write_text(found.markdown() + "\n", encoding="utf-8")
    print(found.text())
    error = math.hypot(after.standard_error, plain.standard_error)
    if abs((after.accuracy or 0.0) - (plain.accuracy or 0.0)) > MOST_ERRORS * error:
        print("the export has another accuracy than the trained model", file=sys.stderr)
        return 1
    return 0


def megadapo(*words: str) -> int:
    """Run a command of megadapo and return its peak memory in bytes.

    Raises:
        InfraError: the command failed; its last lines say why.
    """
    print(f"megadapo {' '.join(words)}", flush=True)
    process = subprocess.Popen([*MEGADAPO, *words])
    peak, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(SAMPLE_S):
            peak = max(peak, used_bytes(process.pid))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        code = process.wait()
    except KeyboardInterrupt:
        # the command has the signal too, and saves
        code = process.wait()
    finally:
        ended.set()
        thread.join()
    if code:
        raise InfraError(f"megadapo {words[0]} ended with exit code {code}")
    return peak


def used_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants; shared pages count once."""
    total = 0
    for one in [pid, *descendants(pid)]:
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text(encoding="ascii").splitlines()
        except OSError:
            # it has ended
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def table(
    config: RunConfig,
    before: EvaluationRecord,
    after: EvaluationRecord,
    plain: Evaluation,
    *,
    minutes: float,
    peak: int,
) -> TextTable:
    """Return the table of the accuracies before and after, and of the costs."""
    k, rows = after.samples_per_problem, []
    for name, of_export in (plain.sets or {"held-out": plain}).items():
        first, last = (_values(one, name if plain.sets else "") for one in (before, after))
        label = f"{name}, {of_export.num_problems} problems"
        errors = [(one["accuracy"], one["standard_error"]) for one in (first, last)]
        errors.append((of_export.accuracy, of_export.standard_error))
        rows.append((f"{label}: avg@{k}", *(f"{mean:.3f} ± {error:.3f}" for mean, error in errors)))
        if k > 1:
            best = (first["best_of_all"], last["best_of_all"], of_export.pass_at[k])
            rows.append((f"{label}: pass@{k}", *(f"{value:.3f}" for value in best)))
    time_row, *_, ratio, gap = costs(RunRecords(config.run.folder).need_steps())
    spent = ("with starts and evaluations", f"{minutes:.1f} minutes")
    used = ("peak memory of all processes", f"{peak / GIB:.1f} GiB")
    rows += [(name, "", value, "") for name, value in (time_row, spent, used, ratio, gap)]
    head = ("", "before", f"after step {after.step}", "export in transformers")
    return TextTable(title=str(config.run.folder), head=head, rows=rows)


def _values(record: EvaluationRecord, name: str) -> dict[str, Any]:
    """Return the values of a named set, or of an evaluation without sets."""
    return record.sets[name] if name else {**vars(record), "best_of_all": record.best_of_all}


if __name__ == "__main__":
    sys.exit(main())
