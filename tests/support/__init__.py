"""Helpers of tests: tiny models, batches, trainer processes, engines and whole runs."""

import getpass
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
COMPILED = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
"""Folder of torch's compiled code, which makes engines start faster."""
