"""What test files share: tiny models, batches, trainer processes, engines and whole runs."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
