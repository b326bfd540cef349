"""What a run needs on each node that it has slots on, asked on the node before it starts."""

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
from megadapo.cluster.network import node_address
from megadapo.errors import InfraError

if TYPE_CHECKING:
    from ray import ObjectRef

ANSWER_TIMEOUT_S = 60.0
CONNECT_S = 5.0
VISIBLE_S = 5.0
"""How long a shared folder may take to show a file to another node."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Folders that a run uses on every node, by absolute paths."""

    shared: Path
    """What one node writes here, all others must see."""
    present: Mapping[str, Path]
    """Folders that must be there, by the keys of the configuration that name them."""


@dataclass(frozen=True, kw_only=True)
class NodeAnswer:
    """What a node says of itself."""

    num_cores: int
    saw_question: bool
    lacks: tuple[str, ...]
    """Keys whose folders are not there."""


def ask_nodes(options: Mapping[str, dict[str, Any]], needs: Needs) -> dict[str, int]:
    """The cores of every node, once all of them have what a run needs.

    Args:
        options: Ray's, for a task on each node, by the node's address.

    Raises:
        InfraError: nodes that lack something, by name; or one that does not answer.
    """
    import ray

    task: Any = ray.remote(max_retries=0)(_answer_here)
    with asked_in(needs.shared) as question:
        calls: list[ObjectRef[Any]] = [
            task.options(**entry).remote(question, dict(needs.present))
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
            for problem in problems_of(node, answer, needs, question)
        ]
    if problems:
        raise InfraError("\n".join(problems))
    return {node: answer.num_cores for node, answer in zip(options, answers, strict=True)}


def lost_nodes(nodes: Collection[str]) -> list[str]:
    """Those of the nodes that Ray has lost, or that it will: their daemon takes no connection."""
    import ray

    daemons = {
        node["NodeManagerAddress"]: node["NodeManagerPort"] for node in ray.nodes() if node["Alive"]
    }
    return sorted(node for node in nodes if node not in daemons or not listens(node, daemons[node]))


@contextmanager
def asked_in(folder: Path) -> Iterator[Path]:
    """A file in a folder, which others answer by one beside it; neither stays.

    The folder is made where it is missing.
    """
    question = folder / f".megadapo-{uuid.uuid4().hex}"
    folder.mkdir(parents=True, exist_ok=True)
    question.touch()
    try:
        yield question
    finally:
        for path in (question, *folder.glob(f"{question.name}-*")):
            path.unlink(missing_ok=True)


def answer_to(question: Path, answer: str, *, wait_s: float = VISIBLE_S) -> bool:
    """Whether a question comes to be seen here; then an answer lies beside it."""
    if not _appears(question, wait_s):
        return False
    _answered(question, answer).touch()
    return True


def is_answered(question: Path, answer: str, *, wait_s: float = VISIBLE_S) -> bool:
    """Whether an answer comes to be seen here."""
    return _appears(_answered(question, answer), wait_s)


def answer_for(
    question: Path, present: Mapping[str, Path], node: str, *, wait_s: float = VISIBLE_S
) -> NodeAnswer:
    """What this node, which is called `node`, has of a run's needs."""
    return NodeAnswer(
        num_cores=len(os.sched_getaffinity(0)),
        saw_question=answer_to(question, node, wait_s=wait_s),
        lacks=tuple(key for key, folder in present.items() if not folder.exists()),
    )


def problems_of(
    node: str, answer: NodeAnswer, needs: Needs, question: Path, *, wait_s: float = VISIBLE_S
) -> Iterator[str]:
    """What a node lacks, in words."""
    if not (answer.saw_question and is_answered(question, node, wait_s=wait_s)):
        yield (
            f"node {node}: it and the driver do not see each other's files in {needs.shared} "
            "(run.folder): choose a folder on storage that all nodes share, or mount it there"
        )
    for key in answer.lacks:
        yield (
            f"node {node}: {needs.present[key]} ({key}) is not there: bring it to every node, to "
            "that path"
        )


def listens(address: str, port: int) -> bool:
    """Whether somebody takes connections there, within CONNECT_S."""
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


def _answered(question: Path, answer: str) -> Path:
    return question.with_name(f"{question.name}-{answer}")


def _answer_here(question: Path, present: dict[str, Path]) -> NodeAnswer:
    """The task on a node."""
    return answer_for(question, present, node_address())
