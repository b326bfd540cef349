"""Engines that cannot start, hang, are killed or lack memory."""

import subprocess
import sys
import time

import psutil
import pytest

from megadapo.errors import InfraError
from megadapo.rollout.engine.spec import CPU_DEFAULTS
from megadapo.rollout.types import response_seeds
from tests.support.rollout.engine_checks import (
    Reference,
    actor_pid,
    ask,
    group_request,
    running_engines,
    worst_error,
)

pytestmark = [pytest.mark.fault, pytest.mark.full]


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


def test_call_in_flight_fails_when_the_processes_of_vllm_die(tiny_model, tmp_path):
    """vLLM never answers such a call: an update waited for it until weights.deadline_s."""
    with running_engines(tiny_model, tmp_path) as engines:
        children = psutil.Process(actor_pid(engines, 0)).children(recursive=True)
        (core,) = [one for one in children if "EngineCore" in " ".join(one.cmdline())]
        core.suspend()
        refs = engines.call("weight_versions", {0: ()})
        time.sleep(1.0)  # so that the call is sent
        core.kill()
        assert engines.gather(refs, doing="weight_versions", timeout_s=30) == {}
        (note,) = engines.drain_warnings()
        assert "failed in collective_rpc" in note


DRIVER = """
import sys
import time
from pathlib import Path
import psutil
from tests.support.rollout.engine_checks import actor_pid, running_engines
if __name__ == "__main__":
    with running_engines(Path(sys.argv[1]), Path(sys.argv[2])) as engines:
        actor = psutil.Process(actor_pid(engines, 0))
        print(actor.pid, *(one.pid for one in actor.children(recursive=True)), flush=True)
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
        processes = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        assert len(processes) >= 2
        driver.kill()
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert alive == []
    finally:
        driver.kill()
        driver.wait()


BLOCK_TOKENS, TOKEN_BYTES = CPU_DEFAULTS["block_size"], 1024
"""Size of a block of the CPU's key-value cache, and of the tiny model's token in it."""


def test_preemptions_are_counted_and_change_no_response(tiny_model, tmp_path):
    """Eight responses start with one block each and soon need another."""
    cache_gib = 9 * BLOCK_TOKENS * TOKEN_BYTES / 2**30
    prompt = (7,) * (BLOCK_TOKENS - 8)
    seeds = [response_seeds(8, "small", key) for key in range(2)]
    crowd = [group_request(key, prompt, seeds[key]) for key in range(2)]
    few = [group_request(key, prompt, seeds[key][:2]) for key in range(2)]
    with running_engines(tiny_model, tmp_path, kv_cache_gib=cache_gib) as engines:
        crowded = ask(engines, crowd)
        (activity,) = engines.activity()
        assert activity.num_preemptions > 0 and activity.max_kv_use > 0.9
        alone = ask(engines, few)
        (activity,) = engines.activity()
        assert activity.num_preemptions == 0
    assert worst_error(Reference(tiny_model), crowd, crowded) < 1e-5
    for key, responses in alone.items():
        for before, after in zip(responses, crowded[key], strict=False):
            assert before.token_ids.tolist() == after.token_ids.tolist()
