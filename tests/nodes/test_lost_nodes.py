"""A node dies or loses its link in each phase of a step: it is named, and the run resumes."""

import signal
from functools import partial
from pathlib import Path

import pytest

from megadapo.observe.metrics.records import read_metrics
from tests.nodes.machines import Machine, Network
from tests.nodes.runs import SPREAD, START_S, begin, status_of
from tests.support.processes.running import wait_until

pytestmark = pytest.mark.fault

PARTS_BEFORE = {"rollout": ["sync"], "train": [], "sync": ["train"]}
"""Part of a step -> what is waited for before it. A status of "rollout" may also be the moment
between update and sync."""
NUM_STEPS = 12
"""So many that the part is seen in one of them, short as it is."""


@pytest.fixture
def other(lan: Network, shared: Path) -> Machine:
    """The machine that is not the head, as it is after a failure: up again, if it was down."""
    latest = lan.machines[-1]
    if latest.is_up:
        return latest
    machine = lan.boot(2, [shared])
    machine.start_ray(lan.machines[0], num_cpus=1)
    return machine


@pytest.mark.parametrize(
    "part,fault", [("rollout", "die"), ("train", "die"), ("sync", "die"), ("train", "unplug")]
)
def test_lost_node_is_named_and_run_continues_when_it_returns(lan, shared, other, part, fault):
    folder = shared / f"{part}-{fault}"
    supervisor = begin(
        lan.machines[0],
        folder,
        *SPREAD,
        *("--restarts=3", f"--run.num_steps={NUM_STEPS}", "--checkpoint.every=1"),
    )
    try:
        for before in PARTS_BEFORE[part]:
            wait_until(partial(_is_in, folder, before), timeout_s=START_S, message=before)
        if part == "sync":
            # so that it does not end before the node does
            other.signal("VLLM::EngineCore", signal.SIGSTOP)
        wait_until(partial(_is_in, folder, part), timeout_s=START_S, message=part)
        getattr(other, fault)()
        wait_until(lambda: "state=failed" in _log(folder), timeout_s=START_S)
        other.die()
        again = lan.boot(2, [shared])
        again.start_ray(lan.machines[0], num_cpus=1)
        output, _ = supervisor.communicate(timeout=2 * START_S)
    finally:
        supervisor.kill()
    assert supervisor.returncode == 0, output
    first, *_ = [line for line in _log(folder).splitlines() if "state=failed" in line]
    assert f"lost node {other.address} of the Ray cluster" in first
    assert [record["step"] for record in read_metrics(folder)] == [*range(1, NUM_STEPS + 1)]


def test_run_goes_on_without_node_that_stays_away(lan, shared, other):
    folder = shared / "fewer"
    supervisor = begin(
        lan.machines[0],
        folder,
        *SPREAD,
        *("--restarts=3", "--allow-fewer", "--cluster.start_timeout_s=60"),
        *(f"--run.num_steps={NUM_STEPS}", "--checkpoint.every=1"),
    )
    try:
        wait_until(partial(_is_in, folder, "train"), timeout_s=START_S, message="train")
        other.die()
        output, _ = supervisor.communicate(timeout=2 * START_S)
    finally:
        supervisor.kill()
    assert supervisor.returncode == 0, output
    assert "trains on 1 of trainer.data_parallel = 2" in _log(folder)
    assert [record["step"] for record in read_metrics(folder)] == [*range(1, NUM_STEPS + 1)]


def _is_in(folder: Path, part: str) -> bool:
    """Whether the run is in this part of a step after the first one's checkpoint."""
    status = status_of(folder)
    return status.checkpoint_step >= 1 and status.phase == part


def _log(folder: Path) -> str:
    path = folder / "log.txt"
    return path.read_text() if path.exists() else ""
