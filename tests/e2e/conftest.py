"""Fixtures that several files of whole-process tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs.whole_runs import run


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed: what a resumed one must equal."""
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    assert "before and after" in run(folder).stdout
    return folder


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """Start Ray with CPUs for several placement groups."""
    import ray

    # as in a run: Ray's default lets its processes starve beside any other program
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local",
        num_cpus=32,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()
