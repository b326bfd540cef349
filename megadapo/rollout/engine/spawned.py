"""The program of vLLM's processes, as Python sees it: the first module that a spawned one imports.

In an actor of Ray this would be Ray's worker, which vLLM's processes do not need.
"""

import gc

from megadapo.cluster.processes import COLLECTOR_THRESHOLD

# until the model is loaded; then vLLM freezes what it has
gc.set_threshold(*COLLECTOR_THRESHOLD)
