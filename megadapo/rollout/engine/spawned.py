"""The program of vLLM's processes, as Python sees it: the first module that a spawned one imports.

In an actor of Ray this would be Ray's worker, which vLLM's processes do not need.
"""

import gc

from megadapo.cluster.processes import COLLECTOR_THRESHOLD

BEFORE = gc.get_threshold()


def collect_as_before(phase: str, info: dict[str, int]) -> None:
    """Restore the collector after the first full collection: vLLM requests it after its imports."""
    if phase == "stop" and info["generation"] == 2:
        gc.callbacks.remove(collect_as_before)
        gc.set_threshold(*BEFORE)


if BEFORE != COLLECTOR_THRESHOLD:  # a process forked from the server has both already
    gc.set_threshold(*COLLECTOR_THRESHOLD)
    gc.callbacks.append(collect_as_before)
