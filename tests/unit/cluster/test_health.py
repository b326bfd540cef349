"""The health of a node: what the driver reports of its GPUs, and an all-reduce between them."""

import os
import time

import pytest

from megadapo.cluster.health import gpu_problems, loopback_problem, node_problems

GPUS = [[str(n), f"GPU-{n}", "NVIDIA H200", "0"] for n in range(4)]
ROWS = [[f"GPU-{n}", "No", "0"] for n in range(4)]


def changed(table, row, column, value):
    return [
        [value if (r, c) == (row, column) else cell for c, cell in enumerate(cells)]
        for r, cells in enumerate(table)
    ]


@pytest.mark.parametrize("rows", [ROWS, [], changed(ROWS, 0, 1, "[N/A]")])
def test_healthy_gpus_have_no_problems(rows):
    assert list(gpu_problems(GPUS, rows, 4)) == []
    assert list(gpu_problems(changed(GPUS, 3, 3, "[N/A]"), rows, 4)) == []


@pytest.mark.parametrize(
    ("gpus", "rows", "says"),
    [
        (GPUS[:3], ROWS, "sees 3 of 4 GPUs"),
        (changed(GPUS, 1, 2, "NVIDIA H100"), ROWS, "different products (NVIDIA H100, NVIDIA H200)"),
        (changed(GPUS, 2, 3, "7"), ROWS, "GPU 2 has 7 uncorrected memory errors"),
        (GPUS, changed(ROWS, 3, 1, "1"), "GPU 3 waits for a reset"),
        (GPUS, changed(ROWS, 3, 1, "Yes"), "GPU 3 waits for a reset"),
        (GPUS, changed(ROWS, 0, 2, "1"), "GPU 0 has no spare rows"),
    ],
)
def test_each_damage_is_one_sentence(gpus, rows, says):
    (problem,) = gpu_problems(gpus, rows, 4)
    assert says in problem


@pytest.mark.slow
def test_ranks_of_one_node_meet_over_loopback():
    assert loopback_problem(2, "cpu") is None


@pytest.mark.slow
def test_failing_rank_is_named_with_its_message():
    """Torch of these tests has no CUDA, as a node with another image than the others."""
    started = time.monotonic()
    problem = loopback_problem(1, "cuda")
    assert problem.startswith("GPU 0 fails in an all-reduce on this node: ") and "cuda" in problem
    assert time.monotonic() - started < 60, "a failure must not wait for the time limit"


def test_loopback_that_hangs_ends_in_time():
    """A GPU that hangs in its driver would hold up the start of a run."""
    problem = loopback_problem(2, "cpu", limit_s=0.1)
    assert problem == "process 0, 1 did not multiply two matrices within 0.1 s"


def test_node_with_bad_driver_is_not_tried_further(tmp_path, monkeypatch):
    driver = tmp_path / "nvidia-smi"
    driver.write_text(
        "#!/bin/sh\necho Unable to determine the device handle: Unknown Error\nexit 15\n"
    )
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (problem,) = node_problems(8)
    assert problem.startswith("nvidia-smi fails: Unable to determine the device handle")


def test_queries_name_only_visible_gpus(tmp_path, monkeypatch):
    """A shared node's other GPUs may be of another product, or damaged."""
    driver = tmp_path / "nvidia-smi"
    driver.write_text(
        f"""#!/bin/sh
echo "$*" >>{tmp_path}/asked
case $1 in
    --query-gpu=*) echo "2, GPU-2, NVIDIA H200, 5" ;;
    *) exit 2 ;;
esac
"""
    )
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    (problem,) = node_problems(1)
    assert problem.startswith("GPU 2 has 5 uncorrected memory errors")
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2 and all(line.endswith(" -i 2") for line in asked)
