"""Inputs and references of the CPU tests, for the tests that need a CUDA device."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "kernels"))
