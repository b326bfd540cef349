"""An asynchronous run over two nodes loses one of them, and one machine repeats its schedule."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from megadapo.run.state.status import read_status
from tests.nodes.machines import Machine, Network
from tests.nodes.runs import RECIPE, START_S, begin, status_of
from tests.support.processes.running import wait_until
from tests.support.runs.whole_runs import assert_same_metrics, megadapo, metrics, weights

pytestmark = pytest.mark.fault

NUM_STEPS = 24
ASYNC = (
    *("--sampling.mode=async", "--sampling.max_staleness=3", "--cluster.placement=separate"),
    *("--rollout.max_num_seqs=8", f"--run.num_steps={NUM_STEPS}", "--checkpoint.every=4"),
)


@pytest.fixture
def machines(shared: Path) -> Iterator[list[Machine]]:
    """A machine for the trainer and an engine, and one for another engine."""
    network = Network()
    try:
        for number, num_cpus in ((1, 2), (2, 1)):
            machine = network.boot(number, [shared])
            machine.start_ray(network.machines[0], num_cpus=num_cpus)
        yield network.machines
    finally:
        network.close()


def test_async_run_that_loses_a_node_is_repeated_on_one_machine(machines, shared):
    """The engine's groups start again elsewhere, which nothing in the schedule may show."""
    head, other = machines
    folder, repeated = shared / "async", shared / "repeated"
    run = begin(head, folder, *ASYNC, "--rollout.num_engines=2", "--restarts=3")
    try:
        wait_until(lambda: status_of(folder).step >= 2, timeout_s=START_S)
        engines = read_status(folder).engines
        assert engines["trainer_nodes"] == [head.address]
        assert {one["node"] for one in engines["engines"]} == {head.address, other.address}
        other.die()
        output, _ = run.communicate(timeout=2 * START_S)
    finally:
        run.kill()
    assert run.returncode == 0, output
    status = read_status(folder)
    assert status.restarts == 0
    assert "died" in (folder / "log.txt").read_text()
    left = [one["node"] for one in status.engines["engines"] if one["state"] == "serving"]
    assert left == [head.address]
    here = [word for word in RECIPE if not word.startswith("--cluster.address")]
    megadapo("train", *here, *ASYNC, f"--run.folder={repeated}", f"--schedule={folder}")
    assert len(metrics(folder)) == NUM_STEPS
    assert_same_metrics(repeated, folder)
    assert weights(repeated, NUM_STEPS) == weights(folder, NUM_STEPS)
