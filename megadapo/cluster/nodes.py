"""Questions to the nodes of a Ray cluster, and the check that each has what a run needs."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.cluster.calls import result_of, timeout_error
from megadapo.cluster.this_node import node_address
from megadapo.errors import MegadapoError

if TYPE_CHECKING:
    from ray import ObjectRef

ANSWER_TIMEOUT_S = 300.0
"""Seconds for an answer of a node, which may first import megadapo from a slow disk."""
CONNECT_S = 5.0
VISIBLE_S = 5.0
"""Seconds that a shared folder may take to show a file to another node."""


def on_node(node_id: str) -> dict[str, Any]:
    """Return Ray's options of a task on a node, which takes no slot of the cluster."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }


def ask(question: Callable[[], Any], options: Mapping[str, Any]) -> ObjectRef[Any]:
    """Call a function in a task with these options of Ray."""
    import ray

    task: Any = ray.remote(max_retries=0)(_call)
    call: ObjectRef[Any] = task.options(**options).remote(question)
    return call


def _call(question: Callable[[], Any]) -> Any:
    return question()


def answers_of(
    calls: Mapping[str, ObjectRef[Any]], *, doing: str, timeout_s: float = ANSWER_TIMEOUT_S
) -> dict[str, Any]:
    """Return each node's answer to a question, or its error if it has none.

    `doing`: name of the question in errors, which call the node "it".
    """
    import ray

    if calls:
        ray.wait([*calls.values()], num_returns=len(calls), timeout=timeout_s, fetch_local=False)
    answers: dict[str, Any] = {}
    for node, call in calls.items():
        try:
            if not ray.wait([call], timeout=0, fetch_local=False)[0]:
                ray.cancel(call, force=True)
                raise timeout_error(["it"], doing, timeout_s, "")
            answers[node] = result_of(call, name="it", doing=doing)
        except MegadapoError as error:
            answers[node] = error
    return answers


@dataclass(frozen=True, kw_only=True)
class NodeFolders:
    """Folders that a run uses on every node, as absolute paths."""

    shared: Path
    """Folder in which every node must see the files of the others."""
    present: Mapping[str, Path]
    """Folders that must exist, by config key."""


def alive_nodes() -> list[dict[str, Any]]:
    """Return Ray's facts about each node that it counts as alive."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def lost_nodes(nodes: Collection[str]) -> list[str]:
    """Return the nodes that Ray has lost, or whose daemon accepts no connection."""
    daemons = {node["NodeManagerAddress"]: node["NodeManagerPort"] for node in alive_nodes()}
    return sorted(node for node in nodes if node not in daemons or not listens(node, daemons[node]))


@contextmanager
def visibility_files(folder: Path) -> Iterator[Path]:
    """Create a shared folder if it is missing; return how paths of the nodes' files in it begin.

    The end of the block removes these files.
    """
    files = folder / f".megadapo-{uuid.uuid4().hex}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield files
    finally:
        for path in folder.glob(f"{files.name}-*"):
            path.unlink(missing_ok=True)


def create_visibility_file(files: Path, node: str) -> None:
    """Create a node's file, unless the folder is not there or cannot be written."""
    with suppress(OSError):
        Path(f"{files}-{node}").touch()


def is_visible(files: Path, node: str, *, wait_s: float = VISIBLE_S) -> bool:
    """Return whether a node's file becomes visible here."""
    path, deadline = Path(f"{files}-{node}"), time.monotonic() + wait_s
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return path.exists()


def check_this_node(folders: NodeFolders, files: Path, node: str = "") -> tuple[int, list[str]]:
    """Return this node's number of cores, and a sentence for each folder that it lacks.

    `node`: its name, by default its address.
    """
    create_visibility_file(files, node or node_address())
    lacks = [
        f"{folder} ({key}) does not exist: copy it to that path on every node"
        for key, folder in folders.present.items()
        if not folder.exists()
    ]
    return len(os.sched_getaffinity(0)), lacks


def folder_problems(
    node: str, lacks: Iterable[str], folders: NodeFolders, files: Path, *, wait_s: float = VISIBLE_S
) -> list[str]:
    """Return a message for each thing that a node lacks."""
    if not is_visible(files, node, wait_s=wait_s):
        hidden = (
            f"the driver does not see its files in {folders.shared} (run.folder): choose a folder "
            "on storage that all nodes share, or mount it there"
        )
        lacks = [hidden, *lacks]
    return [f"node {node}: {text}" for text in lacks]


def listens(address: str, port: int) -> bool:
    """Return whether a connection is accepted within CONNECT_S."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True
