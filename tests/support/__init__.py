"""What test files share: tiny models, batches, trainer processes, engines and whole runs."""

import getpass
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
COMPILED = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
"""What torch has compiled, without which an engine takes long to start."""
