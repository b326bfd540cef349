"""Nodes of a joined cluster that fail the health check get no process of a run."""

import json

import pytest

from tests.support.processes.running import run_python

SICK_NODE = """
import json
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table
from megadapo.cluster.cluster import reserve
from megadapo.cluster.config import ClusterConfig
from megadapo.cluster.health import unhealthy_nodes

node = {"include_dashboard": False, "num_cpus": 2, "num_gpus": 2, "object_store_memory": 1 << 28}
cluster = Cluster(initialize_head=True, head_node_args=node)
sick = cluster.add_node(**node).node_id
hung = cluster.add_node(**node).node_id
ray.init(address=cluster.address, log_to_driver=False)

def check(num_gpus):
    import time
    me = ray.get_runtime_context().get_node_id()
    time.sleep(600 if me == hung else 0)
    return [f"one of its {num_gpus} GPUs is sick"] if me == sick else []

left_out = unhealthy_nodes(check, answer_s=10.0)
config = ClusterConfig(device="cuda", start_timeout_s=3)
group = reserve(config, 2, without=left_out)
used = set(placement_group_table(group)["bundles_to_node_id"].values())
try:
    reserve(config, 1, without=left_out)
except Exception as error:
    refusal = str(error)
all_fail = unhealthy_nodes(lambda num_gpus: ["an old driver"])
print(json.dumps([sorted(left_out) == sorted([sick, hung]), used == {cluster.head_node.node_id},
    refusal, all_fail]))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.fault
def test_start_leaves_out_nodes_whose_gpus_fail():
    """A rank on a node with a lost GPU would end every start of the run."""
    modes = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled"}
    result = run_python(SICK_NODE, **modes)
    found, healthy_used, refusal, all_fail = json.loads(result.stdout.splitlines()[-1])
    assert found and healthy_used and all_fail == []
    assert "6 GPUs (2 nodes that fail the health check included)" in refusal
    assert "is left out: one of its 2 GPUs is sick" in result.stderr
    assert "is left out: it did not report its health in time" in result.stderr
    assert "every node fails the health check, so none is left out" in result.stderr
