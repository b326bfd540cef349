"""Whole runs over machines that each have their own address, memory and processes."""

import pytest

from megadapo.observe.metrics.records import read_metrics
from megadapo.run.state.status import read_status
from tests.nodes.runs import SPREAD, train

LAYOUTS = {
    "whole models": SPREAD,
    # half of the weights come from the other node, to be read in the memory of one's own
    "half models": ("--trainer.pipeline_parallel=2", "--rollout.num_engines=2"),
    # the only engine is on a node without a trainer rank
    "messages": ("--cluster.placement=separate", "--rollout.num_engines=1"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_run_over_two_nodes_completes(lan, shared, layout):
    folder = shared / layout.replace(" ", "-")
    done = train(lan.machines[0], folder, *LAYOUTS[layout])
    assert done.returncode == 0, done.stdout
    assert [record["step"] for record in read_metrics(folder)] == [1, 2]
    assert read_status(folder).state == "finished"


def test_node_without_run_folder_is_named(lan, shared):
    third = lan.boot(3, [])
    try:
        third.start_ray(lan.machines[0], num_cpus=1)
        folder = shared / "three"
        sizes = ("--trainer.data_parallel=3", "--rollout.num_engines=3")
        done = train(lan.machines[0], folder, *sizes)
        assert done.returncode == 5, done.stdout
        reason = str(read_status(folder).reason)
        assert f"node {third.address}: the driver does not see its files in {folder}" in reason
        assert all(one.address not in reason for one in lan.machines[:2])
    finally:
        third.die()
