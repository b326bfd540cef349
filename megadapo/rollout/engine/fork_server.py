"""vLLM's processes on a CPU are forked from a server, which imports vLLM while the actor does.

One import after the other was more than half of the start of an engine with a small model.
"""

import sys
from importlib.util import find_spec
from multiprocessing import context, current_process, forkserver
from typing import Any

_IMPORTED = (
    "megadapo.rollout.engine.spawned",
    "megadapo.rollout.engine.start_vllm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)


def prepare_what_vllm_spawns(folder: str, *, forks: bool) -> None:
    """Make the processes that this one spawns lighter; call before vLLM is imported.

    Their program is `spawned` instead of Ray's worker, with which Python collects garbage for a
    third of their start. The server has this moment's environment, and so the guard's mark. It ends
    with this process.

    Args:
        folder: where its socket is, which the guard removes; Python's own would survive a kill.
        forks: whether processes are forked from the server.
    """
    sys.modules["__main__"].__spec__ = find_spec("megadapo.rollout.engine.spawned")
    if not forks:
        return
    this: Any = current_process()
    this._config["tempdir"] = folder
    forkserver.set_forkserver_preload(list(_IMPORTED))
    forkserver.ensure_running()
    # vLLM knows no fork server, and insists on "spawn" in an actor of Ray
    spawned: Any = context.SpawnProcess
    spawned._Popen = staticmethod(context.ForkServerProcess._Popen)
