"""Fixtures that several folders of tests share."""

import asyncio
import gc
import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.support")

from megadapo.cluster.processes import COLLECTOR_THRESHOLD  # noqa: E402
from tests.support import REPOSITORY  # noqa: E402 - its assertions are rewritten
from tests.support.models.tiny_models import make_text_model  # noqa: E402

gc.set_threshold(*COLLECTOR_THRESHOLD)
# what tests start imports tests.support as well: fork servers, Ray's workers, whole programs
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [os.environ.get("PYTHONPATH"), str(REPOSITORY)])
)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that are coroutines, each in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a random two-layer Qwen2 with a character tokenizer."""
    return make_text_model(tmp_path_factory.mktemp("models") / "tiny")


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
