"""Engines that cannot start, hang or are killed: one message, and no process is left."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from megadapo.cluster.watch.guard import marked_processes
from megadapo.errors import InfraError
from tests.support.rollout.engine_checks import (
    actor_pid,
    ask,
    bits,
    make_requests,
    running_engines,
    vllm_process,
)

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
def test_failed_start_is_one_message_with_a_remedy(tiny_model, tmp_path, model, config, message):
    folder = tiny_model if model == "tiny" else tmp_path / "nowhere"
    with pytest.raises(InfraError, match=message), running_engines(folder, tmp_path, **config):
        pass


def test_without_restarts_the_last_death_is_an_error(tiny_model, tmp_path):
    """A process under SIGSTOP is found by its silence, like one that hangs."""
    limits = {"engine_progress_timeout_s": 8.0, "max_engine_restarts": 0}
    with running_engines(tiny_model, tmp_path, num_engines=2, **limits) as engines:
        groups = make_requests(4, 2)
        expected = bits(ask(engines, groups))
        actors = [psutil.Process(actor_pid(engines, index)) for index in (0, 1)]
        processes = [child for actor in actors for child in actor.children(recursive=True)]
        assert len(processes) >= 2
        vllm_process(engines, 1, "EngineCore").kill()
        start = time.monotonic()
        assert bits(ask(engines, groups)) == expected
        (note,) = engines.drain_warnings()
        assert note.startswith("rollout engine 1 ") and "not restarted: the limit" in note
        vllm_process(engines, 0, "EngineCore").send_signal(signal.SIGSTOP)
        with pytest.raises(InfraError, match=r"engine 0 .*no token .*no engine is left"):
            ask(engines, [groups[0], groups[2]])
        assert time.monotonic() - start < 60
    assert wait_until(lambda: not any(p.is_running() for p in processes), 30)


DRIVER = """
import sys
import time
from pathlib import Path
from tests.support.rollout.engine_checks import running_engines
import ray
if __name__ == "__main__":
    with running_engines(Path(sys.argv[1]), Path(sys.argv[2])) as engines:
        mark = ray.get(engines.actors[0].__ray_call__.remote(lambda actor: actor._mark))
        print(mark, flush=True)
        time.sleep(600)
"""


def test_killed_driver_leaves_no_engine_behind(tiny_model, tmp_path):
    """vLLM's engine core survives its parent and would keep the GPU's memory."""
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
