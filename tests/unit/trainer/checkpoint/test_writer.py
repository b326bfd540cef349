"""The thread that writes a rank's part of a checkpoint."""

import os
import threading
from pathlib import Path

from megadapo.errors import WeightError
from megadapo.trainer.checkpoint.checkpoint import NICENESS, CheckpointWriter
from megadapo.weights.disk.files import Files


def test_only_the_writing_thread_has_low_priority(tmp_path):
    """A write would take the core from the update beside it, or training from everything else."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    found = []

    def write(folder: Path) -> Files:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return {}

    writer = CheckpointWriter(0)
    writer.begin(tmp_path, {}, [write])
    report = writer.report(wait=True)
    assert report is not None and not report.error
    assert found == [NICENESS]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_unreadable_model_is_reported(tmp_path):
    """The error of a file beside the weights ended the rank instead of the save."""

    def write(folder: Path) -> Files:
        raise WeightError("config.json cannot be read")

    writer = CheckpointWriter(3)
    writer.begin(tmp_path, {}, [write])
    report = writer.report(wait=True)
    assert report is not None and report.error == "rank 3: config.json cannot be read"
