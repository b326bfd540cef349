"""Run all checks and benchmarks that need a GPU, on the first machine with one.

tools/first_gpu.sh starts this, and its first lines say how. A part is ended after its time; the
memory of its run is watched, and the processes it leaves are ended.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from importlib.util import find_spec
from pathlib import Path

try:
    import psutil
    from gpu_report import FAULTS, as_record, described, steps_of, write_report
    from parts import DELTAS, KILL_AND_RESUME, Outcome, Part, Setting, all_parts, phases_of

    from megadapo.cluster.machine import GIB, cuda_problems, inspect_machine
    from megadapo.errors import DataError
    from megadapo.lab.record import write_record
    from megadapo.observe.metrics.records import METRICS_FILE
    from megadapo.run.state.checkpoint import CHECKPOINTS
    from megadapo.run.state.status import Status, read_status
except ModuleNotFoundError as error:
    sys.exit(
        f"tools/first_gpu.sh: {sys.executable} has no module {error.name}. Install its package, or "
        "without a network bring a piece of tools/first_gpu/pack.py (--piece FILE)."
    )

BUDGET_S = 25 * 60.0
"""Time of all parts together, unless the user gives another."""
SLOWER = 4
"""Factor on the time limits of a rehearsal: its machine has few cores, and other work."""
MOST_CHANGED = 0.1
"""Share of changed elements below which an update is certainly a delta."""
MIB = 2**20
MARK = "MEGADAPO_FIRST_GPU"
"""Variable in the environment of every process of a part."""
GRACE_S = 20.0
"""Time between a request to end and a kill."""
SAMPLE_S = 0.25
POLL_S = 0.05
KILLED = "MEGADAPO_KILLED"
"""Variable in the environment of the processes of the killed run."""


def read_arguments() -> argparse.Namespace:
    """Return the user's choices, and the machine that they fit."""
    parser = argparse.ArgumentParser(prog="tools/first_gpu.sh", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="small versions of all parts")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="only such parts: 'head*'"
    )
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds of all parts")
    parser.add_argument("--trl-python", metavar="PATH", help="Python of an environment with TRL")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("first-gpu"))
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists; name another folder")
    arguments.machine = inspect_machine()
    if not (arguments.rehearse or arguments.machine.uses_cuda):
        parser.error("no GPU, or a torch without CUDA: megadapo doctor says more; try --rehearse")
    return arguments


def main() -> int:
    """Run the parts; return 1 if one of them failed."""
    arguments = read_arguments()
    for problem in () if arguments.rehearse else cuda_problems(arguments.machine):
        print(problem)
    setting = Setting(
        folder=arguments.folder.absolute(),
        machine=arguments.machine,
        rehearses=arguments.rehearse,
        trl_python=arguments.trl_python,
    )
    results = setting.folder / "results"
    for folder in (results, setting.folder / "logs"):
        folder.mkdir(parents=True)
    parts = all_parts(setting)
    names = [part.name for part in parts]
    if unknown := [name for name in arguments.only if not fnmatch.filter(names, name)]:
        shutil.rmtree(setting.folder)
        sys.exit(f"--only {unknown[0]!r}: no such part; there are {', '.join(names)}")
    outcomes: list[Outcome] = []
    until = time.monotonic() + arguments.budget_s
    for part in parts:
        if not any(fnmatch.fnmatch(part.name, one) for one in arguments.only or ["*"]):
            continue
        try:
            outcome = run_or_skip(part, setting, outcomes, left_s=until - time.monotonic())
        except FAULTS as error:
            outcome = Outcome(part=part, result="failed", reason=described(error))
        outcomes.append(outcome)
        # no part needs another's saves, and together they would fill the disk
        for saves in setting.folder.glob(f"*/{CHECKPOINTS}"):
            shutil.rmtree(saves, ignore_errors=True)
        note = f": {outcome.reason}" if outcome.reason else ""
        print(f"{part.name}: {outcome.result} in {outcome.seconds:.0f} s{note}", flush=True)
        # after each part: what is known stays known if the machine is taken away
        try:
            write_record(results / "first-gpu.json", as_record(outcomes, setting))
            write_report(results / "report.md", outcomes, setting, date.today())
        except FAULTS as error:
            print(f"no record or report after {part.name}: {described(error)}", flush=True)
    print(results / "report.md")
    return int(any(outcome.result == "failed" for outcome in outcomes))


def run_or_skip(part: Part, setting: Setting, done: list[Outcome], *, left_s: float) -> Outcome:
    """Run a part unless there is a reason not to."""
    passed = [one.part.name for one in done if one.result == "passed"]
    reason = part.skipped
    if enough := [name for name in passed if name in part.unless]:
        reason = f"{enough[0]} has passed"
    if lacking := [name for name in part.needs if find_spec(name) is None]:
        reason = f"needs {' and '.join(lacking)}"
    limit_s = part.limit_s * (SLOWER if setting.rehearses else 1)
    if left_s < limit_s / 2:
        reason = f"takes up to {limit_s} s, and {max(0.0, left_s):.0f} s are left"
    if reason is not None:
        return Outcome(part=part, result="skipped", reason=reason)
    log = setting.folder / "logs" / f"{part.slug}.log"
    outcome = run_part(part, log, limit_s=min(limit_s, left_s), on_gpu=not setting.rehearses)
    if part.is_tight and outcome.result == "passed":
        check_pressure(outcome, setting)
    if DELTAS in part.overrides and outcome.result == "passed":
        check_deltas(outcome)
    return outcome


def check_pressure(outcome: Outcome, setting: Setting) -> None:
    """Fail a part whose updates would have found room for the optimizer beside a waking engine."""
    used = outcome.most_in("rollout")
    free = setting.machine.gpus[0].memory_gib * GIB / MIB - (used or 0.0)
    phases = phases_of(outcome.part.overrides, setting.card).values()
    needed = max(phase.items.get("optimizer", 0) for phase in phases) / MIB
    note = f"{free:,.0f} MiB were free in rollouts, and the optimizer takes {needed:,.0f} MiB"
    outcome.reason = note
    if free >= needed:
        outcome.result, outcome.reason = "failed", f"no memory pressure: {note}"


def check_deltas(outcome: Outcome) -> None:
    """Fail a part whose updates were all sent in full, as they are if many elements change."""
    found = [step.get("weights/density") for step in steps_of(outcome.part)]
    densities = [density for density in found if density is not None]
    if not densities or min(densities) > MOST_CHANGED:
        outcome.result, outcome.reason = "failed", "all weight updates were sent in full"
    else:
        outcome.reason = f"deltas of {min(densities):.1%} to {max(densities):.1%} of the elements"


def run_part(part: Part, log: Path, *, limit_s: float, on_gpu: bool) -> Outcome:
    """Run the part's command, at most for `limit_s`, with its output in `log`."""
    outcome = Outcome(part=part)
    mark = f"{part.name} {os.getpid()}"
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            part.command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {MARK: mark},
            start_new_session=True,
        )
        watch = MemoryWatch(process.pid, part.run, on_gpu=on_gpu)
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            outcome.result, outcome.reason = "failed", f"not done after {limit_s:.0f} s"
            _end(process)
        else:
            if code:
                outcome.result, outcome.reason = "failed", f"exit code {code}"
        finally:
            outcome.memory = watch.stop()
            if left := end_marked(mark):
                note = f"{left} processes were left and ended"
                outcome.reason = f"{outcome.reason}; {note}".lstrip("; ")
    outcome.seconds = time.monotonic() - started
    return outcome


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask for an end, as a scheduler does, and kill after a while."""
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=GRACE_S)
    process.kill()
    process.wait()


def end_marked(mark: str, variable: str = MARK) -> int:
    """Kill all processes with this value of the variable that still live; return their number."""
    # Ray's processes end by themselves a moment after the driver
    until = time.monotonic() + GRACE_S
    while (left := list(_marked(mark, variable))) and time.monotonic() < until:
        time.sleep(SAMPLE_S)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=GRACE_S)
    return len(left)


def _marked(mark: str, variable: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(variable) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process


class MemoryWatch:
    """Samples the memory in use: of the first GPU, or on a CPU of a process and its children."""

    def __init__(self, pid: int, run: Path | None, *, on_gpu: bool) -> None:
        """`run`: the run's folder, which has its phase."""
        self._pid, self._run, self._on_gpu = pid, run, on_gpu
        self._samples: list[tuple[float, str, float]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if run is not None:
            self._thread.start()

    def stop(self) -> list[tuple[float, str, float]]:
        """Return all samples."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        return self._samples

    def _watch(self) -> None:
        started = time.monotonic()
        while not self._stopped.wait(SAMPLE_S):
            used = gpu_mib() if self._on_gpu else _resident_mib(self._pid)
            self._samples.append((time.monotonic() - started, self._phase(), used))

    def _phase(self) -> str:
        assert self._run is not None
        with suppress(DataError):
            return read_status(self._run).phase
        return "start"


def gpu_mib() -> float:
    """Return the memory in use on the first GPU, by the driver."""
    command = ["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _resident_mib(pid: int) -> float:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        total = 0
        for one in family:
            with suppress(psutil.NoSuchProcess):
                total += one.memory_info().rss
        return total / 2**20
    return 0.0


def kill_and_resume(command: list[str]) -> str | None:
    """Start a run, kill its driver after the first save, resume it; return what went wrong.

    `command` is `megadapo train` with `--run.folder`, and saves several steps before the last.
    """
    prefix = "--run.folder="
    (folder,) = (Path(word.removeprefix(prefix)) for word in command if word.startswith(prefix))
    mark = str(os.getpid())
    process = subprocess.Popen(command, env=os.environ | {KILLED: mark})
    while not _has_saved(status := _status(folder)):
        if process.poll() is not None:
            return f"the run ended with {process.returncode} before it was killed"
        time.sleep(POLL_S)
    process.kill()
    process.wait()
    assert status is not None
    print(f"killed after step {status.step}, saved at {status.checkpoint_step}", flush=True)
    print(f"{end_marked(mark, KILLED)} processes outlived it by 20 s and were ended", flush=True)
    code = subprocess.run(command).returncode
    if code:
        return f"the resumed run ended with {code}"
    ended = read_status(folder)
    lines = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    if steps != list(range(1, ended.num_steps + 1)):
        return f"metrics.jsonl has the steps {steps}"
    if ended.resumed_from < status.checkpoint_step:
        return f"the run resumed from step {ended.resumed_from}"
    print(f"resumed from step {ended.resumed_from} and finished {ended.num_steps} steps")
    return None


def _status(folder: Path) -> Status | None:
    with suppress(DataError):
        return read_status(folder)
    return None


def _has_saved(status: Status | None) -> bool:
    """Return whether the run is in a step after one that it saved."""
    return status is not None and 0 < status.checkpoint_step < status.step + 1


if __name__ == "__main__":
    if sys.argv[1:2] == [KILL_AND_RESUME]:
        sys.exit(kill_and_resume(sys.argv[2:]))
    sys.exit(main())
