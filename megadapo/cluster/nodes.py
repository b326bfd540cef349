"""Checks, before a run starts, that each of its nodes has what the run needs."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadapo.cluster.calls import gather
from megadapo.cluster.this_node import node_address
from megadapo.errors import InfraError

if TYPE_CHECKING:
    from ray import ObjectRef

ANSWER_TIMEOUT_S = 300.0
"""Seconds for an answer of a node, which may first import megadapo from a slow disk."""
CONNECT_S = 5.0
VISIBLE_S = 5.0
"""Seconds that a shared folder may take to show a file to another node."""


@dataclass(frozen=True, kw_only=True)
class NodeFolders:
    """Folders that a run uses on every node, as absolute paths."""

    shared: Path
    """Folder in which every node must see the files of the others."""
    present: Mapping[str, Path]
    """Folders that must exist, by config key."""


@dataclass(frozen=True, kw_only=True)
class NodeAnswer:
    """A node's answer to the check."""

    num_cores: int
    saw_file: bool
    lacks: tuple[str, ...]
    """Config keys of the folders that are missing."""


def check_node_folders(
    options: Mapping[str, dict[str, Any]], folders: NodeFolders
) -> dict[str, int]:
    """Check that every node has what a run needs; return the number of cores by node.

    Args:
        options: Ray options of a task on each node, by the node's address.

    Raises:
        InfraError: nodes lack something or do not answer; the error names them.
    """
    import ray

    task: Any = ray.remote(max_retries=0)(check_this_node)
    with visibility_file(folders.shared) as shared_file:
        calls: list[ObjectRef[Any]] = [
            task.options(**entry).remote(shared_file, dict(folders.present))
            for entry in options.values()
        ]
        answers: list[NodeAnswer] = gather(
            calls,
            names=[f"node {node}" for node in options],
            doing="look for what the run needs",
            timeout_s=ANSWER_TIMEOUT_S,
        )
        problems = [
            problem
            for node, answer in zip(options, answers, strict=True)
            for problem in node_problems(node, answer, folders, shared_file)
        ]
    if problems:
        raise InfraError("\n".join(problems))
    return {node: answer.num_cores for node, answer in zip(options, answers, strict=True)}


def lost_nodes(nodes: Collection[str]) -> list[str]:
    """Return the nodes that Ray has lost, or whose daemon accepts no connection."""
    import ray

    daemons = {
        node["NodeManagerAddress"]: node["NodeManagerPort"] for node in ray.nodes() if node["Alive"]
    }
    return sorted(node for node in nodes if node not in daemons or not listens(node, daemons[node]))


@contextmanager
def visibility_file(folder: Path) -> Iterator[Path]:
    """Create a file in a shared folder, and remove it and its replies at the end of the block.

    A node that sees it replies with a file beside it. The folder is created if it is missing.
    """
    shared_file = folder / f".megadapo-{uuid.uuid4().hex}"
    folder.mkdir(parents=True, exist_ok=True)
    shared_file.touch()
    try:
        yield shared_file
    finally:
        for path in (shared_file, *folder.glob(f"{shared_file.name}-*")):
            path.unlink(missing_ok=True)


def reply_if_visible(shared_file: Path, reply: str, *, wait_s: float = VISIBLE_S) -> bool:
    """Write a reply beside a file once the file is visible here; return whether it is."""
    if is_visible := _appears(shared_file, wait_s):
        _reply_file(shared_file, reply).touch()
    return is_visible


def sees_reply(shared_file: Path, reply: str, *, wait_s: float = VISIBLE_S) -> bool:
    """Return whether a reply becomes visible here."""
    return _appears(_reply_file(shared_file, reply), wait_s)


def check_this_node(
    shared_file: Path, present: Mapping[str, Path], node: str = "", *, wait_s: float = VISIBLE_S
) -> NodeAnswer:
    """Check this node; its name is its address by default."""
    return NodeAnswer(
        num_cores=len(os.sched_getaffinity(0)),
        saw_file=reply_if_visible(shared_file, node or node_address(), wait_s=wait_s),
        lacks=tuple(key for key, folder in present.items() if not folder.exists()),
    )


def node_problems(
    node: str,
    answer: NodeAnswer,
    folders: NodeFolders,
    shared_file: Path,
    *,
    wait_s: float = VISIBLE_S,
) -> Iterator[str]:
    """Yield a message for each thing that a node lacks."""
    if not (answer.saw_file and sees_reply(shared_file, node, wait_s=wait_s)):
        yield (
            f"node {node}: it and the driver do not see each other's files in {folders.shared} "
            "(run.folder): choose a folder on storage that all nodes share, or mount it there"
        )
    for key in answer.lacks:
        yield (
            f"node {node}: {folders.present[key]} ({key}) does not exist: copy it to that path on "
            "every node"
        )


def listens(address: str, port: int) -> bool:
    """Return whether a connection is accepted within CONNECT_S."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


def _appears(path: Path, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return path.exists()


def _reply_file(shared_file: Path, reply: str) -> Path:
    return shared_file.with_name(f"{shared_file.name}-{reply}")
