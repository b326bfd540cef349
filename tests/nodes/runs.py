"""The run that machines do, and how it is started on one of them."""

import subprocess
from pathlib import Path

from megadapo.errors import DataError
from megadapo.run.state.status import Status, read_status
from tests.nodes.machines import Machine

RECIPE = (
    *("configs/quickstart.toml", "--cluster.address=auto", "--cluster.device=cpu"),
    *("--run.num_steps=2", "--trainer.optimizer.warmup_steps=1", "--evaluation.every=0"),
    *("--sampling.prompts_per_step=8", "--algorithm.responses_per_mini_batch=32"),
    *("--rollout.kv_cache_gib=0.1", "--weights.verify=every"),
)
"""The quickstart, whose model.path is relative, on the cluster that the machine is a node of."""
SPREAD = ("--trainer.data_parallel=2", "--rollout.num_engines=2")
"""A trainer rank and an engine on each of two nodes with one core each."""
START_S = 300
"""Longest time that two cores take to start two ranks and two engines."""


def begin(machine: Machine, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return machine.start("megadapo", "train", *RECIPE, f"--run.folder={folder}", *arguments)


def train(machine: Machine, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    process = begin(machine, folder, *arguments)
    output, _ = process.communicate(timeout=500)
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def status_of(folder: Path) -> Status:
    """Return a run's status, also before it has written one."""
    try:
        return read_status(folder)
    except DataError:
        return Status(num_steps=0, host="", pid=0, started="", updated="")
