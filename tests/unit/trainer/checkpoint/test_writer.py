"""The thread that writes a rank's part of a checkpoint."""

import os
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from megadapo.errors import CheckpointError, WeightError
from megadapo.run.gpu_sharing import GpuSharing
from megadapo.run.step.training import TrainerState
from megadapo.trainer.checkpoint.checkpoint import NICENESS, CheckpointWriter
from megadapo.trainer.trainer import Trainer
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


def test_late_save_postpones_the_next(tmp_path):
    """Ranks that were still writing to a slow disk were killed when the next save began."""
    writer, written = CheckpointWriter(0), threading.Event()
    writer.begin(tmp_path, {}, [lambda folder: {} if written.wait(20) else {}])
    assert writer.report() is None and writer.is_writing
    trainer = Mock(spec=Trainer)
    trainer.call_all.return_value = [False, writer.is_writing]
    with pytest.raises(CheckpointError, match="are still writing"):
        TrainerState(trainer, GpuSharing(trainer)).begin_save(tmp_path)
    trainer.call_all.assert_called_once_with("is_writing")
    trainer.begin_save.assert_not_called()
    written.set()
    assert writer.report(wait=True) is not None and not writer.is_writing


def test_unreadable_model_is_reported(tmp_path):
    """The error of a file beside the weights ended the rank instead of the save."""

    def write(folder: Path) -> Files:
        raise WeightError("config.json cannot be read")

    writer = CheckpointWriter(3)
    writer.begin(tmp_path, {}, [write])
    report = writer.report(wait=True)
    assert report is not None and report.error == "rank 3: config.json cannot be read"
