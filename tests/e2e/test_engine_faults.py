"""Engines that cannot start, stop answering or are killed: one message, nothing left behind."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import ray

from megadapo.cluster.reaper import marked_processes
from megadapo.errors import InfraError
from tests.support.engine_checks import ask, make_requests, running_engines

pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.full]


def wait_until(condition, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        ("nowhere", {}, r"engine 0 could not start: .*model\.path"),
        ("tiny", {"kv_cache_gib": 4096}, r"engine 0 could not start: .*4096.*rollout\.kv_cache"),
        ("tiny", {"max_response_tokens": 4000}, r"could not start: .*rollout\.max_response_tokens"),
    ],
)
def test_a_failed_start_is_one_message_with_the_remedy(
    tiny_model, tmp_path, model, config, message
):
    folder = tiny_model if model == "tiny" else tmp_path / "nowhere"
    with pytest.raises(InfraError, match=message), running_engines(folder, tmp_path, **config):
        pass


def vllm_processes(engines, index: int, title: str) -> list[psutil.Process]:
    """vLLM's processes under an engine's actor whose title contains `title`."""
    pid = ray.get(engines.actors[index].__ray_call__.remote(lambda actor: os.getpid()))
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if title in " ".join(child.cmdline())]


def test_a_killed_and_a_stopped_engine_are_named_and_cleaned_up(tiny_model, tmp_path):
    """SIGSTOP is what a hang looks like: only the deadline finds it."""
    limit = {"engine_progress_timeout_s": 8.0}
    with running_engines(tiny_model, tmp_path, num_engines=2, **limit) as engines:
        groups = make_requests(4, 2)
        ask(engines, groups)
        processes = [p for i in (0, 1) for p in vllm_processes(engines, i, "")]
        assert len(processes) >= 2
        (core,) = vllm_processes(engines, 1, "EngineCore")
        core.kill()
        start = time.monotonic()
        with pytest.raises(InfraError, match="rollout engine 1"):
            ask(engines, groups)
        (other,) = vllm_processes(engines, 0, "EngineCore")
        other.send_signal(signal.SIGSTOP)
        with pytest.raises(InfraError, match=r"engine 0 .*no token .*progress_timeout_s"):
            ask(engines, [groups[0], groups[2]])
        assert time.monotonic() - start < 60
    assert wait_until(lambda: not any(p.is_running() for p in processes), 30)


DRIVER = """
import sys
import time
from pathlib import Path
from tests.support.engine_checks import running_engines
import ray
if __name__ == "__main__":
    with running_engines(Path(sys.argv[1]), Path(sys.argv[2])) as engines:
        mark = ray.get(engines.actors[0].__ray_call__.remote(lambda actor: actor._mark))
        print(mark, flush=True)
        time.sleep(600)
"""


def test_a_killed_driver_leaves_no_engine_behind(tiny_model, tmp_path):
    """vLLM's engine core survives its parent: it would hold the GPU's memory for ever."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tiny_model), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        mark = driver.stdout.readline().strip()
        assert len(marked_processes(mark)) >= 2
        driver.kill()
        assert wait_until(lambda: not marked_processes(mark), 60)
    finally:
        driver.kill()
        driver.wait()
