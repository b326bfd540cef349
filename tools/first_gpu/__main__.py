"""Run all checks and benchmarks that need a GPU, on the first machine with one.

tools/first_gpu.sh starts this, and its first lines say how.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import date
from pathlib import Path

from gpu_report import as_record, optimizer_mib, write_report
from parts import Part, Setting, all_parts
from runner import Outcome, run_part

from megadapo.lab.record import write_record
from megadapo.observe.machine import GIB, inspect_machine

BUDGET_S = 25 * 60.0
"""Time of all parts together."""
SHORTEST_S = 20.0
"""Time without which a part does not start."""
MIB = 2**20


def main() -> int:
    """Run the parts; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="tools/first_gpu.sh", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="small versions of all parts")
    parser.add_argument("--only", action="append", metavar="NAME", help="only parts named so")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("first-gpu"))
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists; name another folder")
    machine = inspect_machine()
    if not (arguments.rehearse or machine.uses_cuda):
        parser.error("no GPU, or a torch without CUDA: megadapo doctor says more; try --rehearse")
    setting = Setting(
        folder=arguments.folder.absolute(), machine=machine, rehearses=arguments.rehearse
    )
    results = setting.folder / "results"
    for folder in (results, setting.folder / "logs"):
        folder.mkdir(parents=True)
    outcomes: list[Outcome] = []
    until = time.monotonic() + BUDGET_S
    for part in all_parts(setting):
        if arguments.only and part.name not in arguments.only:
            continue
        outcome = run_or_skip(part, setting, outcomes, left_s=until - time.monotonic())
        outcomes.append(outcome)
        note = f": {outcome.reason}" if outcome.reason else ""
        print(f"{part.name}: {outcome.result} in {outcome.seconds:.0f} s{note}", flush=True)
        # after each part: what is known stays known if the machine is taken away
        write_record(results / "first-gpu.json", as_record(outcomes, setting))
        write_report(results / "report.md", outcomes, setting, date.today())
    print(results / "report.md")
    return int(any(outcome.result == "failed" for outcome in outcomes))


def run_or_skip(part: Part, setting: Setting, done: list[Outcome], *, left_s: float) -> Outcome:
    """Run a part unless there is a reason not to."""
    passed = [one.part.name for one in done if one.result == "passed"]
    reason = part.skipped
    if part.unless and (enough := [name for name in passed if name.split()[0] == part.unless]):
        reason = f"{enough[0]} has passed"
    if left_s < SHORTEST_S:
        reason = f"the {BUDGET_S / 60:.0f} minutes are used up"
    if reason is not None:
        return Outcome(part=part, result="skipped", reason=reason)
    log = setting.folder / "logs" / f"{part.name.replace(' ', '-')}.log"
    limit_s = min(part.limit_s, left_s)
    outcome = run_part(part, log, limit_s=limit_s, on_gpu=not setting.rehearses)
    if part.is_tight and outcome.result == "passed":
        check_pressure(outcome, setting)
    return outcome


def check_pressure(outcome: Outcome, setting: Setting) -> None:
    """Fail a part whose save would have found room for the optimizer beside a waking engine."""
    used = outcome.most_in("rollout")
    free = setting.machine.gpus[0].memory_gib * GIB / MIB - (used or 0.0)
    needed = optimizer_mib(outcome.part, setting)
    note = f"{free:,.0f} MiB were free in rollouts, and the optimizer takes {needed:,.0f} MiB"
    outcome.reason = note
    if free >= needed:
        outcome.result, outcome.reason = "failed", f"no memory pressure: {note}"


if __name__ == "__main__":
    sys.exit(main())
