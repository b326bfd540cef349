"""Run make targets with tests, two at a time: python tools/run_tests.py TARGET ...

It prints a line a minute, the output of each target when it ends, and the minutes of all.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

NUM_AT_ONCE = 2
"""Targets that run together: one computes while another waits for processes that start."""
PERCENT = re.compile(r"\[ *(\d+)%\]")


@dataclass
class Part:
    """A target that runs, with its output in a file."""

    target: str
    log: Path
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        command = ["make", "--no-print-directory", self.target]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self.started) / 60

    def progress(self) -> str:
        """Return the target and the share of its tests that have ended."""
        found = PERCENT.findall(self.log.read_text(errors="replace"))
        return f"{self.target} {found[-1] if found else 0} %"


def main(targets: Sequence[str]) -> int:
    """Return 0 if all targets succeed, else 1."""
    started = said = time.monotonic()
    waiting, running, ended = list(targets), list[Part](), list[str]()
    is_ok = True
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < NUM_AT_ONCE:
                running.append(Part(waiting[0], Path(folder, waiting.pop(0))))
            time.sleep(1.0)
            for part in [part for part in running if part.process.poll() is not None]:
                running.remove(part)
                is_ok = is_ok and part.process.returncode == 0
                ended.append(f"{part.target} {part.minutes:.1f} min")
                print(part.log.read_text(errors="replace"), flush=True)
            if time.monotonic() - said >= 60:
                said = time.monotonic()
                done = ", ".join(part.progress() for part in running)
                print(f"{(said - started) / 60:.0f} min: {done}", flush=True)
    print(f"{', '.join(ended)}; together {(time.monotonic() - started) / 60:.1f} min")
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
