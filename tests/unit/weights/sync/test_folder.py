"""Updates as files: their content, and refused files."""

import json
import shutil

import pytest
import torch

from megadapo.errors import WeightError
from megadapo.weights.sync.plan import EngineShape
from megadapo.weights.sync.transports.folder import (
    MANIFEST,
    FolderInbox,
    FolderOutbox,
    Manifest,
    remove_other_updates,
)
from megadapo.weights.sync.transports.interface import Message
from tests.support.weights.connection import Connection, Live

CPU = torch.device("cpu")
TRAINER = {"tp_size": 2, "pp_size": 2}


class Files(Connection):
    """Trainer ranks that write into a folder, and engine ranks that read it."""

    def __init__(self, folder, files, dtype=torch.bfloat16):
        engine = EngineShape(tp_size=2)
        super().__init__(folder, TRAINER, engine, dtype, deltas=True, files=files)
        self.files = files
        self.inboxes = [FolderInbox([{"folder": str(files)}], CPU) for _ in self.receivers]
        self.targets = [Live(receiver.shapes, dtype) for receiver in self.receivers]

    def write(self, version, delta=None):
        count = self.begin(delta, version)
        for number in range(count):
            self.fill(number, False)
        files = {name: one for sender in self.senders for name, one in sender.written().items()}
        base = None if delta is None else delta.base
        Manifest(version=version, base=base, files=files).write(self.files)
        return count

    def read(self, version, count, delta=None):
        for inbox, receiver in zip(self.inboxes, self.receivers, strict=True):
            inbox.open(version, current=receiver.version, wait_s=0)
        for inbox, receiver, target in zip(self.inboxes, self.receivers, self.targets, strict=True):
            receiver.start(target, inbox, with_checksums=False, version=version, delta=delta)
            for number in range(count):
                receiver.take(number)
            receiver.finish()

    def update(self, version, delta=None):
        self.read(version, self.write(version, delta), delta)

    def train(self):
        for params in self.params:
            for param in params.values():
                param.view(-1)[::20] *= 1.01


@pytest.fixture
def files(model_folders, tmp_path):
    return Files(model_folders["Qwen2"], tmp_path / "files")


def test_engines_read_full_updates_and_deltas(files):
    files.update(5)
    files.assert_received(files.targets)
    size = folder_bytes(files.files / "v5")
    for version in (6, 7):
        files.train()
        files.update(version, files.encode(version - 1, version))
        remove_other_updates(files.files, version)
    assert [path.name for path in files.files.iterdir()] == ["v7"]
    assert folder_bytes(files.files / "v7") < 0.6 * size
    expected = [one.clone() for target in files.targets for one in target.done.values()]
    files.update(8)
    found = [one for target in files.targets for one in target.done.values()]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def folder_bytes(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def test_lost_repeated_and_later_files_are_refused(files):
    files.update(5)
    files.train()
    six = files.encode(5, 6)
    files.update(6, six)
    inbox = files.inboxes[0]
    with pytest.raises(WeightError, match="Update 6 changes version 5, but the engine has 6"):
        inbox.open(6, current=6, wait_s=0)
    assert not inbox.is_open(6)
    with pytest.raises(WeightError, match="Update 7 is not there"):
        inbox.open(7, current=6, wait_s=0)
    files.train()
    files.write(8, files.encode(6, 8))
    with pytest.raises(WeightError, match="Update 8 changes version 6, but the engine has 5"):
        inbox.open(8, current=5, wait_s=0)
    shutil.copytree(files.files / "v8", files.files / "v9")
    with pytest.raises(WeightError, match="holds update 8, not 9"):
        inbox.open(9, current=6, wait_s=0)


def test_torn_files_are_refused(files):
    files.write(5)
    inbox, folder = files.inboxes[0], files.files / "v5"
    path = sorted(folder.glob("rank-*"))[0]
    whole, text = path.read_bytes(), (folder / MANIFEST).read_text()
    path.write_bytes(whole[:-1])
    with pytest.raises(WeightError, match=rf"{path.name} has {len(whole) - 1} of {len(whole)}"):
        inbox.open(5, current=None, wait_s=0)
    path.unlink()
    with pytest.raises(WeightError, match="Update 5 is not there"):
        inbox.open(5, current=None, wait_s=0)
    path.write_bytes(whole)
    for damaged in (text[:-9], text.replace('"base":null', '"base":"x"'), "[]"):
        (folder / MANIFEST).write_text(damaged)
        with pytest.raises(WeightError, match="is damaged"):
            inbox.open(5, current=None, wait_s=0)
    record = json.loads(text)
    record["files"]["../../secret"] = record["files"][path.name]
    (folder / MANIFEST).write_text(json.dumps(record))
    with pytest.raises(WeightError, match="names a file '../../secret'"):
        inbox.open(5, current=None, wait_s=0)


def test_changed_files_are_refused(tmp_path):
    outbox = FolderOutbox(tmp_path, 64, CPU, rank=3)
    outbox.begin(1)
    message = Message(sender=3, target=4, offset=16, num_bytes=32)
    outbox.bucket(0)[16:48] = torch.arange(32, dtype=torch.uint8)
    outbox.post(0, [message])
    outbox.post(1, [])
    Manifest(version=1, base=None, files=outbox.written).write(tmp_path)
    (path,) = (tmp_path / "v1").glob("rank-*")
    inbox = FolderInbox([outbox.offer()], CPU)
    inbox.open(1, current=None, wait_s=0)
    (bytes_there,) = inbox.receive(0, [message])
    assert bytes_there.tolist() == list(range(32))
    whole = path.read_bytes()
    path.write_bytes(whole[:-4] + b"\0\0\0\0")
    with pytest.raises(WeightError, match="differs from its checksum"):
        list(inbox.receive(0, [message]))
    path.write_bytes(b"\xff" * len(whole))
    with pytest.raises(WeightError, match="cannot be read"):
        list(inbox.receive(0, [message]))
    with pytest.raises(WeightError, match="cannot be read"):
        list(inbox.receive(0, [Message(sender=2, target=4, offset=16, num_bytes=32)]))


def test_inbox_waits_for_late_file(tmp_path, monkeypatch):
    outbox = FolderOutbox(tmp_path, 64, CPU, rank=0)
    outbox.begin(1)
    outbox.post(0, [Message(sender=0, target=1, offset=0, num_bytes=16)])
    Manifest(version=1, base=None, files=outbox.written).write(tmp_path)
    (path,) = (tmp_path / "v1").glob("rank-*")
    hidden = path.rename(tmp_path / "hidden")
    monkeypatch.setattr(
        "megadapo.weights.sync.transports.folder.time.sleep", lambda seconds: hidden.rename(path)
    )
    inbox = FolderInbox([outbox.offer()], CPU)
    inbox.open(1, current=None, wait_s=60)
    assert inbox.is_open(1)


def test_only_updates_are_pruned(tmp_path):
    for name in ("v1", "v20", "v3", "value", "v3.old"):
        (tmp_path / name).mkdir()
    (tmp_path / "v1" / "file").write_text("x")
    remove_other_updates(tmp_path, 20)
    assert {path.name for path in tmp_path.iterdir()} == {"v20", "value", "v3.old"}
