"""Exports a checkpoint and prints how much more memory that took.

Run as a program: what else a test process holds must not be in the number.
"""

import sys
from pathlib import Path

from megadapo.weights.disk.checkpoint_source import TrainerCheckpoint
from megadapo.weights.disk.export import export_weights
from megadapo.weights.disk.sources import open_layout


def peak_bytes() -> int:
    """The most memory this process has held since it was last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def main(checkpoint: Path, model: Path, destination: Path, max_file_bytes: int) -> None:
    layout = open_layout(model)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak_bytes()
    weights = TrainerCheckpoint(checkpoint, layout)
    export_weights(
        weights.tensors(),
        destination,
        layout=layout,
        dtype=weights.dtype,
        base_folder=model,
        max_file_bytes=max_file_bytes,
    )
    print(peak_bytes() - before)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), int(sys.argv[4]))
