"""The program of vLLM's processes, as Python sees it: the first module that a spawned one imports.

Python would take that of the process that spawns them, which is Ray's worker in an actor.
"""

import gc

from megadapo.cluster.processes import COLLECTOR_THRESHOLD

# until the model is loaded; then vLLM freezes what it has
gc.set_threshold(*COLLECTOR_THRESHOLD)
