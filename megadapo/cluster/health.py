"""Health of nodes: whether a run can use the GPUs of each one.

`megadapo doctor --node` checks this node. A start on a joined cluster checks all of them.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Literal

from megadapo.cluster import machine
from megadapo.cluster.config import ClusterConfig
from megadapo.cluster.nodes import alive_nodes, answers_of, ask, on_node
from megadapo.cluster.this_node import LOOPBACK, use_interface_towards
from megadapo.errors import MegadapoError

LOOPBACK_S = 180.0
"""Seconds in which all ranks of the loopback must have loaded torch and met."""
ANSWER_S = LOOPBACK_S + 120.0
"""Seconds in which a node must report its health."""
_QUERY_S = 60.0
_SIDE = 512
"""Size of the matrices whose product is checked."""
_NUM_VALUES = 4 << 20
"""Length of the reduced tensor."""
_NONE = ("", "0", "no", "n/a", "[n/a]", "[not supported]")
"""Answers of nvidia-smi for a counter that has counted nothing, or that a GPU does not have."""
_LOGGER = logging.getLogger("megadapo.cluster")

Device = Literal["cpu", "cuda"]


def node_problems(num_gpus: int | None = None) -> list[str]:
    """Return a sentence for each reason why a run cannot use this node.

    `num_gpus`: GPUs that the node must have; None: as many as it has device files.
    """
    wanted = num_gpus
    if wanted is None:
        wanted = sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))
    if wanted == 0:
        problem = loopback_problem(2, "cpu")
        return [] if problem is None else [problem]
    try:
        gpus = _nvidia_smi("--query-gpu=index,uuid,name,ecc.errors.uncorrected.volatile.total")
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stdout", None) or str(error)
        return [f"nvidia-smi fails: {said.strip().splitlines()[0]} (dmesg has errors of GPUs)"]
    rows: list[list[str]] = []
    # GPUs before Ampere remap no rows
    with suppress(OSError, subprocess.SubprocessError):
        fields = "gpu_uuid,remapped_rows.pending,remapped_rows.failure"
        rows = _nvidia_smi(f"--query-remapped-rows={fields}")
    problems = list(gpu_problems(gpus, rows, wanted))
    if not problems:
        problems += machine.cuda_problems(machine.inspect_machine())
    # a GPU that is lost or damaged already condemns the node, and could make the loopback hang
    if not problems:
        problem = loopback_problem(len(gpus), "cuda")
        problems += [] if problem is None else [problem]
    return problems


def gpu_problems(
    gpus: Sequence[Sequence[str]], rows: Sequence[Sequence[str]], wanted: int
) -> Iterator[str]:
    """Yield a sentence for each problem that the driver reports.

    Args:
        gpus: index, UUID, product and volatile uncorrected ECC errors of each GPU.
        rows: UUID, pending and failed remappings of memory rows of each GPU that has them.
        wanted: number of GPUs that the node must have.
    """
    if len(gpus) < wanted:
        yield (f"the driver sees {len(gpus)} of {wanted} GPUs (dmesg has the error of a lost one)")
    products = sorted({product for _, _, product, _ in gpus})
    if len(products) > 1:
        yield f"the GPUs are of different products ({', '.join(products)})"
    remapped = {uuid: (pending, failed) for uuid, pending, failed in rows}
    for index, uuid, _, errors in gpus:
        pending, failed = remapped.get(uuid, ("0", "0"))
        if errors.lower() not in _NONE:
            yield (
                f"GPU {index} has {errors} uncorrected memory errors since its driver was loaded: "
                "reset it"
            )
        if pending.lower() not in _NONE:
            yield f"GPU {index} waits for a reset to replace damaged rows of its memory"
        if failed.lower() not in _NONE:
            yield f"GPU {index} has no spare rows of memory left: replace it"


def loopback_problem(num_ranks: int, device: Device, *, limit_s: float = LOOPBACK_S) -> str | None:
    """Multiply matrices on each GPU of this node and all-reduce over them; return what failed.

    Every rank is a process of its own, because a hung driver call cannot be interrupted.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    if not environment.get("CUDA_VISIBLE_DEVICES", "-"):
        # Ray hides all GPUs from tasks that reserve none
        del environment["CUDA_VISIBLE_DEVICES"]
    with tempfile.TemporaryDirectory(prefix="megadapo-loopback-") as name:
        folder = Path(name)
        ranks = []
        for rank in range(num_ranks):
            words = [str(rank), str(num_ranks), name, device, str(limit_s)]
            with (folder / f"log-{rank}").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", "megadapo.cluster.health", *words],
                        env=environment,
                        stdout=log,
                        stderr=log,
                    )
                )
        try:
            return _first_failure(ranks, folder, device, limit_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()


@cache
def nodes_to_leave_out(config: ClusterConfig) -> list[str]:
    """Return the ids of nodes that fail their check, where `cluster.check_nodes` asks for one.

    The nodes are checked once in the life of a driver.
    """
    checks = config.check_nodes and config.uses_cuda and config.address is not None
    return unhealthy_nodes() if checks else []


def unhealthy_nodes(
    check: Callable[[int], list[str]] = node_problems, *, answer_s: float = ANSWER_S
) -> list[str]:
    """Check all nodes of the joined cluster that offer GPUs; return the ids of nodes that fail.

    Each one is a warning. If all fail, the check or the environment is at fault, and the list is
    empty. `check`: receives the number of GPUs that Ray offers on a node, and returns its problems.
    """
    nodes = {node["NodeID"]: node for node in alive_nodes() if node["Resources"].get("GPU", 0) > 0}
    calls = {
        node_id: ask(partial(check, int(node["Resources"]["GPU"])), on_node(node_id))
        for node_id, node in nodes.items()
    }
    answers = answers_of(calls, doing="the check of its health", timeout_s=answer_s)
    failed = {
        node_id: [str(answer)] if isinstance(answer, MegadapoError) else answer
        for node_id, answer in answers.items()
        if answer
    }
    all_fail = len(failed) == len(nodes)
    for node_id, problems in failed.items():
        what = "fails the health check" if all_fail else "is left out"
        name = nodes[node_id]["NodeManagerAddress"]
        _LOGGER.warning("node %s %s: %s", name, what, "; ".join(problems))
    if failed and all_fail:
        _LOGGER.warning("every node fails the health check, so none is left out")
        return []
    return list(failed)


def _first_failure(
    ranks: Sequence[subprocess.Popen[bytes]], folder: Path, device: Device, limit_s: float
) -> str | None:
    """Wait until all ranks have ended well; return the first failure, or who is late."""
    what = "GPU" if device == "cuda" else "process"
    until = time.monotonic() + limit_s
    while any(process.poll() is None for process in ranks):
        if any(process.poll() for process in ranks) or time.monotonic() > until:
            break
        time.sleep(0.05)
    for rank, process in enumerate(ranks):
        if process.poll():
            lines = (folder / f"log-{rank}").read_text(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "no message")
            return f"{what} {rank} fails in an all-reduce on this node: {last.strip()}"
    if all(process.poll() == 0 for process in ranks):
        return None
    late = [str(n) for n in range(len(ranks)) if not (folder / f"multiplied-{n}").exists()]
    if late:
        return f"{what} {', '.join(late)} did not multiply two matrices within {limit_s:g} s"
    return f"an all-reduce over the {len(ranks)} {what}s of this node took over {limit_s:g} s"


def _run_rank(rank: int, num_ranks: int, folder: Path, device: Device, limit_s: float) -> None:
    """Be one rank of the loopback; exit with a message if a result is wrong."""
    import torch

    here = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(here)
    generator = torch.Generator().manual_seed(rank)
    # products of small integers are exact in every format
    left, right = (
        torch.randint(0, 4, (_SIDE, _SIDE), generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    product = left.to(here, torch.float32) @ right.to(here, torch.float32)
    if not torch.equal(product.double().cpu(), left @ right):
        sys.exit("it multiplies matrices wrongly")
    (folder / f"multiplied-{rank}").touch()
    use_interface_towards(LOOPBACK)
    torch.distributed.init_process_group(
        backend="nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=limit_s),
    )
    values = torch.full((_NUM_VALUES,), float(rank + 1), device=here)
    torch.distributed.all_reduce(values)
    if not bool((values == num_ranks * (num_ranks + 1) / 2).all()):
        sys.exit("the all-reduce returns wrong sums")
    torch.distributed.destroy_process_group()


def _nvidia_smi(query: str) -> list[list[str]]:
    """Return the cells of a query, with one row per GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    command += ["-i", visible] if visible else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S, check=True)
    return [re.split(r",\s*", line.strip()) for line in done.stdout.splitlines() if line.strip()]


if __name__ == "__main__":
    _rank, _num_ranks, _folder, _device, _limit_s = sys.argv[1:]
    _run_rank(
        int(_rank),
        int(_num_ranks),
        Path(_folder),
        "cuda" if _device == "cuda" else "cpu",
        float(_limit_s),
    )
