"""Programs in processes of their own, and waits for what other processes or threads do."""

import os
import subprocess
import sys
import time
from collections.abc import Callable

from megadapo.cluster.watch.guard import start_time

HEAVY = ("apex", "matplotlib", "megatron", "ray", "torch", "transformers", "triton", "vllm")


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    return start_time(pid) is not None


def wait_until(
    condition: Callable[[], object], *, timeout_s: float = 60.0, message: str = ""
) -> None:
    """Wait until a condition holds, or fail with the message."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, message or f"not within {timeout_s:g} s"
        time.sleep(0.01)


def run_python(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a process of its own, which must succeed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def heavy_imports(program: str) -> list[str]:
    """Return the packages that take seconds to import and that a program imports."""
    done = run_python(f"{program}\nimport sys\nprint(*(m for m in {HEAVY} if m in sys.modules))")
    return done.stdout.splitlines()[-1].split()
