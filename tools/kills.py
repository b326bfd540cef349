"""Kills processes of supervised runs at random instants, and reports the outcome of each run.

    python tools/kills.py FOLDER --kills 50 --faults 20 --budget_s 500

runs for that time or that number of kills; called again it continues. FOLDER/kills.json has every
kill. Each run resumes by itself. In the end its metrics equal those of an undisturbed run, no
checkpoint was condemned, and no process, shared memory or temporary file of it remains.

With --mode async the batches of a run follow the speed of its engines. Each run has a random number
of engines, and --changes N slows engines down and lets some join and leave between the kills. Then
its schedule is repeated undisturbed with another number of engines, which must end with the same
metrics, records and weights. Every publication carries a digest of its weights, and a repetition
stops at the first that differs.

With --environment each run plays episodes. Those of an environment that is lost are continued by
replay, by its state, or not at all (once); then no action was done twice. Saved rollouts show that
no failure was trained on as a reward. With --server the episodes are sessions of an OpenEnv server.
It is killed as well with "once"; with the others its failures would change the metrics.

With --faults the run's folder is on a file server that fails, a judge that goes away is asked for
rewards, and connections, Ray's daemons and the clock are disturbed: tools/faults/infrastructure.py.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from megadapo.errors import RunInterruptedError
from megadapo.observe.metrics.records import read_evaluations
from megadapo.rollout.sampling.schedule import SCHEDULE_FILE

sys.path.insert(0, str(Path(__file__).parents[1]))
from faults.disturbed_run import (  # noqa: E402
    EPISODE_MOMENTS,
    EPISODES,
    MOMENTS,
    NUM_STEPS,
    PHASE_S,
    TARGETS,
    DisturbedRun,
)
from faults.engine_changes import CHANGES, MOST_ENGINES  # noqa: E402
from faults.episode_server import SERVER, EpisodeServer  # noqa: E402
from faults.infrastructure import FAULTS, Infrastructure  # noqa: E402

from tests.support.runs.episodes import (  # noqa: E402
    repeated_actions,
    write_recipe,
    wrong_rewards,
)
from tests.support.runs.whole_runs import metrics, run, untimed, weights  # noqa: E402

QUICKSTART = "configs/quickstart.toml"
KILLS_PER_RUN = 6
FEW_KILLS = (1, 2)
"""Kills of a run with episodes or a schedule: many short runs show more than a few long ones."""
EPISODE_STEPS, ASYNC_STEPS = 6, 10
"""Steps of a run with an environment, and of an asynchronous one."""
ONE_RANK = ("--trainer.data_parallel=1",)
OVERRIDES = ("--trainer.data_parallel=2",)
"""Two ranks: one that is killed leaves the other waiting for it."""
ASYNC = (
    "--sampling.mode=async",
    "--sampling.max_staleness=3",
    "--cluster.placement=separate",
    "--evaluation.every=0",
    "--rollout.max_num_seqs=8",
    *ONE_RANK,
)
"""Few slots: the engines are slower than the trainer, so publications stop responses. One rank
starts faster."""
DEADLINES = (
    "--rollout.engine_progress_timeout_s=20",
    "--trainer.timeout_s=60",
    "--weights.deadline_s=20",
)
"""For processes that are stopped; Ray's and the driver's are constants: 60 and 120 s."""


def undisturbed(
    folder: Path,
    overrides: Sequence[str],
    recipe: Path | str = QUICKSTART,
    num_steps: int = NUM_STEPS,
) -> Path:
    """Return the folder of a run without kills, which is made once."""
    if not (folder / "plot.png").exists():
        run(folder, *overrides, num_steps=num_steps, recipe=recipe)
    return folder


def campaign(
    folder: Path,
    *,
    targets: Sequence[str],
    budget_s: float,
    how: signal.Signals,
    infrastructure: Infrastructure | None,
    is_async: bool = False,
    environment: str | None = None,
    server: EpisodeServer | None = None,
) -> list[str]:
    """Continue the kills in FOLDER/kills.json; return the problems of a finished run.

    Args:
        targets: a kind of process, or a fault, for each kill.
        is_async: compare each run with a repetition of its schedule.
        environment: the recovery of episodes, if runs play any.
        server: the server of the episodes, if they are not played by the run itself.
    """
    overrides = (
        *OVERRIDES,
        *(ASYNC if is_async else ()),
        *(ONE_RANK if environment else ()),
        *(DEADLINES if how == signal.SIGSTOP else ()),
    )
    mount = served = folder
    if infrastructure is not None:
        overrides += infrastructure.overrides
        mount, served = infrastructure.mount, infrastructure.served
    until = time.monotonic() + budget_s
    recipe: Path | str = QUICKSTART
    num_steps = NUM_STEPS
    if is_async:
        num_steps = ASYNC_STEPS
    if environment is not None:
        port = None if server is None else server.port
        recipe = write_recipe(folder / "recipe", environment, port)
        overrides += (f"--data.held_out={recipe.with_name('held_out.jsonl')}",)
        num_steps = EPISODE_STEPS
    expected = undisturbed(folder / "undisturbed", overrides, recipe, num_steps)
    log = folder / "kills.json"
    runs: list[dict[str, Any]] = json.loads(log.read_text()) if log.exists() else []
    while time.monotonic() < until:
        so_far = sum(len(one["kills"]) for one in runs)
        if so_far >= len(targets) and (not runs or runs[-1]["ended"]):
            break
        if not runs or runs[-1]["ended"]:
            if environment is not None:
                # episodes of another run have the same names
                (folder / "recipe" / "actions").unlink(missing_ok=True)
            runs.append({"folder": f"run-{len(runs)}", "ended": False, "kills": [], "problems": []})
        entry = runs[-1]
        choose = random.Random(entry["folder"])
        num_engines = choose.randint(1, MOST_ENGINES) if is_async else 1
        per_run = choose.randint(*FEW_KILLS) if environment or is_async else KILLS_PER_RUN
        disturbed = DisturbedRun(
            mount / entry["folder"],
            served / entry["folder"],
            how,
            (*overrides, f"--rollout.num_engines={num_engines}"),
            infrastructure,
            _median(expected, "time/step_s"),
            so_far,
            until,
            recipe=recipe,
            num_steps=num_steps,
            phase_s=_median(expected, "time/rollout_s") if environment else PHASE_S,
            moments=EPISODE_MOMENTS if environment else MOMENTS,
            server=server,
        )
        try:
            disturbed.disturb(targets[so_far : so_far + per_run - len(entry["kills"])])
        finally:
            code = disturbed.end()
            entry["kills"] += [asdict(kill) for kill in disturbed.kills]
            entry["problems"] += [f"left: {name}" for name in disturbed.leftovers()]
            if code == 0 and not entry["kills"]:
                entry["problems"].append(f"met no {targets[so_far]}")
            # a run that is stopped while it starts again has the code of what ended it
            stopped = code and time.monotonic() >= until
            entry["ended"] = not stopped and code != RunInterruptedError.exit_code
            condemned = (disturbed.seen / "checkpoints").glob("damaged-*")
            entry["problems"] += [f"condemned: {path.name}" for path in condemned]
            if code == 0 and is_async:
                entry["problems"] += _repeat(disturbed.seen, overrides, num_engines)
            elif code == 0 and environment != "once":
                entry["problems"] += differences(disturbed.seen, expected)
            elif code and entry["ended"]:
                entry["problems"].append(f"exit code {code}")
            if environment is not None and entry["ended"]:
                entry |= _count_episodes(
                    disturbed.seen, folder / "recipe", environment, entry["problems"]
                )
            log.write_text(json.dumps(runs, indent=1) + "\n")
    return [problem for one in runs for problem in one["problems"]]


def _median(folder: Path, name: str) -> float:
    values = sorted(record[name] for record in metrics(folder))
    return float(values[len(values) // 2])


def _count_episodes(
    folder: Path, recipe: Path, environment: str, problems: list[str]
) -> dict[str, int]:
    """Return the counts of a run's actions and failed responses; append its problems."""
    num_left_out, wrong = wrong_rewards(folder)
    repeated = repeated_actions(recipe)
    problems += wrong
    if environment == "once":
        problems += [f"done twice: {action}" for action in repeated]
    num_actions = (recipe / "actions").read_text().count("\n")
    return {"actions": num_actions, "repeated": len(repeated), "left_out": num_left_out}


def _repeat(folder: Path, overrides: Sequence[str], num_engines: int) -> list[str]:
    """Repeat a run's schedule with fewer engines, or two instead of one; return the differences."""
    repeated = folder.with_name(f"{folder.name}-repeated")
    other = f"--rollout.num_engines={2 if num_engines == 1 else 1}"
    try:
        words = (*overrides, other, f"--schedule={folder}")
        undisturbed(repeated, words, num_steps=ASYNC_STEPS)
    except AssertionError as error:
        return [f"the schedule is not repeated: {error}"]
    problems = differences(folder, repeated)
    if weights(folder, ASYNC_STEPS) != weights(repeated, ASYNC_STEPS):
        problems.append("the weights differ")
    if (folder / SCHEDULE_FILE).read_bytes() != (repeated / SCHEDULE_FILE).read_bytes():
        problems.append("the schedules differ")
    return problems


def _is_disturbed(name: str, found: dict[str, Any]) -> bool:
    """Return whether a metric shows what disturbed a run, and no result of it.

    A judge was asked again, or the engines died that would have scored the probe's tokens. A lost
    evaluation is repeated, and is in a later step's record; all evaluations are compared too.
    """
    if name.startswith("eval/"):
        return True
    return name.endswith("/retries") or (name.startswith("parity/probe_") and found[name] is None)


def differences(folder: Path, expected: Path) -> list[str]:
    """Return how records and evaluations of a finished run differ from those of another one."""
    problems = differing_records(folder, expected)
    found_steps, steps = len(metrics(folder)), len(metrics(expected))
    if found_steps != steps:
        problems.append(f"{found_steps} of {steps} steps")
    if read_evaluations(folder) != read_evaluations(expected):
        problems.append("evaluations differ")
    return problems


def differing_records(folder: Path, expected: Path) -> list[str]:
    """Return the metrics that differ in the steps that both runs have."""
    problems = []
    pairs = zip(untimed(metrics(folder)), untimed(metrics(expected)), strict=False)
    for found, wanted in pairs:
        names = [n for n in wanted if found.get(n) != wanted[n] and not _is_disturbed(n, found)]
        problems += [f"step {wanted['step']}: {n} {found.get(n)} != {wanted[n]}" for n in names]
    return problems


def table(path: Path) -> str:
    """Return FOLDER/kills.json as a table."""
    lines = ["| signal | target | phase | after step | outcome | seconds lost |", "|-|-|-|-|-|-|"]
    for entry in json.loads(path.read_text()):
        for kill in entry["kills"]:
            values = (kill[k] for k in ("signal", "target", "phase", "step", "outcome", "lost_s"))
            lines.append("| " + " | ".join(str(value) for value in values) + " |")
        lines += [f"{entry['folder']}: {problem}" for problem in entry["problems"]]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--changes", type=int, default=0, help="of engines; for --mode async")
    parser.add_argument("--budget_s", type=float, default=1e9)
    parser.add_argument("--signal", default="SIGKILL")
    parser.add_argument("--mode", choices=["sync", "async"], default="sync")
    parser.add_argument("--environment", choices=["replay", "state", "once"])
    parser.add_argument("--server", action="store_true", help="of episodes; for --environment")
    parser.add_argument("--targets", nargs="+")
    parser.add_argument("--kinds", nargs="+", default=list(FAULTS), help="kinds of faults")
    parser.add_argument("--fuse", default=sys.executable, help="a Python that has mfusepy")
    arguments = parser.parse_args()
    own = EPISODES if arguments.environment else ()
    if arguments.server and arguments.environment == "once":
        # sessions end with the server, and failures that are left out change the metrics
        own = (*own, SERVER)
    targets = arguments.targets or [*own, *TARGETS]
    if own and not arguments.targets:
        targets.remove("verifier")  # the game needs none
    chosen = [
        *islice(cycle(targets), arguments.kills),
        *islice(cycle(arguments.kinds), arguments.faults),
        *islice(cycle(CHANGES), arguments.changes),
    ]
    random.Random(0).shuffle(chosen)
    with ExitStack() as stack:
        server = below = None
        if arguments.server:
            server = stack.enter_context(closing(EpisodeServer(arguments.folder / "recipe")))
        if arguments.faults:
            below = stack.enter_context(closing(Infrastructure(arguments.folder, arguments.fuse)))
        found = campaign(
            arguments.folder,
            targets=chosen,
            budget_s=arguments.budget_s,
            how=signal.Signals[arguments.signal],
            infrastructure=below,
            is_async=arguments.mode == "async",
            environment=arguments.environment,
            server=server,
        )
    print(table(arguments.folder / "kills.json"))
    sys.exit(1 if found else 0)
