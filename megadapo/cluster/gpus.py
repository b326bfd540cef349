"""Whether this machine has GPUs, found out without torch and without touching one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def has_gpu() -> bool:
    """Whether this process can see an NVIDIA GPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return False
    # /dev/dxg is the GPU inside Windows' Linux
    if any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists():
        return True
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.stdout.startswith(b"GPU")
