"""The checkpoint store: a checkpoint is complete and verified, or absent."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megadapo.errors import CheckpointError, CorruptCheckpointError, InfraError, WeightError
from megadapo.run.state import checkpoint as checkpoint_module
from megadapo.run.state.checkpoint import MANIFEST, CheckpointStore, load
from megadapo.run.state.checkpoint import STATE as STATE_FILE
from megadapo.weights.disk import files as files_module
from megadapo.weights.disk.export import copy_config_and_tokenizer, new_folder
from megadapo.weights.disk.files import Files, check_files, files_within
from tests.support.runs.checkpoints import save_checkpoint, saved_store, written_by

STATE = {"step": 3, "policy_version": 3, "reserve": []}


def write_shards(folder: Path) -> None:
    (folder / "shard-0.distcp").write_bytes(os.urandom(4096))
    (folder / "nested").mkdir()
    (folder / "nested" / "metadata").write_bytes(b"meta")


saved = partial(saved_store, write=written_by(write_shards), **STATE)


def why_skipped(store, *, hashes=True):
    """Return why step 2, the newest checkpoint, is passed over for step 1."""
    checkpoint, (note,) = store.newest(hashes=hashes)
    assert checkpoint.step == 1 and "step-2" in note
    return note


def steps_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "add"])
@pytest.mark.parametrize(
    "name", ["trainer/shard-0.distcp", "trainer/nested/metadata", "state.json"]
)
def test_damaged_checkpoint_is_skipped_by_name(tmp_path, damage, name):
    store = saved(tmp_path, 1, 2)
    victim = tmp_path / "step-2" / name
    content = victim.read_bytes()
    if damage == "flip":
        victim.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif damage == "truncate":
        victim.write_bytes(content[:-1])
    elif damage == "delete":
        victim.unlink()
    else:
        victim.with_name("stranger").write_bytes(b"?")
    assert ("stranger" if damage == "add" else name) in why_skipped(store)


def test_only_damaged_checkpoints_are_an_error(tmp_path):
    store = saved(tmp_path, 1)
    (tmp_path / "step-1" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="never completed"):
        store.newest()


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "other"}'])
def test_foreign_manifests_are_refused(tmp_path, text):
    saved(tmp_path, 1)
    (tmp_path / "step-1" / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="step-1"):
        load(tmp_path / "step-1")


@pytest.mark.parametrize("place", [60, 200, -200, "step"])
def test_flipped_manifest_byte_is_found(tmp_path, place):
    store = saved(tmp_path, 1, 2)
    manifest = tmp_path / "step-2" / "manifest.json"
    content = bytearray(manifest.read_bytes())
    content[content.index(b'"step": 2') + 8 if place == "step" else place] ^= 4
    manifest.write_bytes(content)
    reason = why_skipped(store, hashes=False)
    assert place != "step" or "damaged manifest.json: its SHA-256 differs" in reason


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "trainer/shard-0.distcp"])
def test_file_of_another_step_is_found(tmp_path, name):
    store = saved(tmp_path, 1)
    save_checkpoint(store, 2, write_trainer=written_by(write_shards), state={"step": 2})
    shutil.copy(tmp_path / "step-1" / name, tmp_path / "step-2" / name)
    why_skipped(store)


def test_damaged_checkpoint_stays_until_as_many_newer_ones_are_kept(tmp_path):
    """It may be the best one that is left, and only people can tell."""
    store = saved(tmp_path, 1, 2, keep=2)
    (aside,) = store.set_aside_after(1, damaged=True)
    for step in (2, 3, 4):
        assert aside.exists()
        save_checkpoint(store, step, write_trainer=written_by(write_shards), state=STATE)
    assert steps_in(tmp_path) == ["step-3", "step-4"]


def test_folders_with_names_of_the_users_own_stay(tmp_path):
    """The first deletion of an old checkpoint ended the run with a ValueError."""
    own = tmp_path / "damaged-step-4.bak"
    own.mkdir(parents=True)
    saved(tmp_path, 5, 6, 7, keep=1)
    assert own.exists()


@pytest.mark.parametrize("file", [MANIFEST, STATE_FILE, "trainer/shard-0.distcp"])
def test_unreadable_checkpoint_is_not_damaged(tmp_path, monkeypatch, file):
    """A file server that fails over gives ESTALE for sound files."""
    store, real = saved(tmp_path, 1, 2), Path.open

    def stale(self: Path, *arguments: Any, **keys: Any) -> Any:
        if self == tmp_path / "step-2" / file:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self))
        return real(self, *arguments, **keys)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", stale)
        with pytest.raises(InfraError, match=r"step-2.* cannot be read on node .*Stale file"):
            store.newest()
    checkpoint, skipped = store.newest()
    assert checkpoint.step == 2 and skipped == []


def test_file_that_is_read_wrongly_once_is_not_damaged(tmp_path, monkeypatch, caplog):
    """Memory or network may flip a bit of what is read."""
    store, real, wrong = saved(tmp_path, 1), files_module.entry_of, [True]

    def flips_once(path: Path) -> Any:
        entry = real(path)
        return replace(entry, sha256="0" * 64) if wrong.pop() else entry

    wrong[:] = [False] * 9 + [True]
    monkeypatch.setattr(files_module, "entry_of", flips_once)
    checkpoint, skipped = store.newest()
    assert checkpoint.step == 1 and skipped == [] and "may be faulty" in caplog.text


def test_checkpoint_that_could_not_be_loaded_is_not_committed(tmp_path):
    """A file system that gives everyone write access would otherwise be found at the next start."""

    def open_to_all(folder: Path) -> None:
        write_shards(folder)
        (folder / "shard-0.distcp").chmod(0o666)

    with pytest.raises(CheckpointError, match="writable by everyone"):
        save_checkpoint(saved(tmp_path, 1), 2, write_trainer=written_by(open_to_all), state=STATE)
    assert steps_in(tmp_path) == ["step-1"]


def test_pruning_follows_the_commit(tmp_path):
    store = saved(tmp_path, 1, 2, 3, keep=2)
    assert steps_in(tmp_path) == ["step-2", "step-3"]

    def fails(*_: object) -> Any:
        raise OSError(28, "No space left on device")

    for writes in (fails, lambda folder: fails):
        with pytest.raises(CheckpointError, match="No space left"):
            save_checkpoint(store, 4, write_trainer=writes, state=STATE)
        assert steps_in(tmp_path) == ["step-2", "step-3"]


def test_newest_stay_and_unfinished_is_removed(tmp_path):
    (tmp_path / "tmp-step-1-deadbeef" / "trainer").mkdir(parents=True)
    store = CheckpointStore(tmp_path, keep=2)
    store.remove_unfinished()
    # steps are ordered as numbers
    for step in range(6, 11):
        save_checkpoint(store, step, write_trainer=written_by(write_shards), state=STATE)
    assert steps_in(tmp_path) == ["step-10", "step-9"]
    checkpoint, _ = store.newest()
    assert checkpoint.step == 10


@pytest.mark.parametrize("change", ["missing", "short", "foreign"])
def test_unreported_files_prevent_the_commit(tmp_path, change):
    """A rank on another node may have written to a local disk."""

    def begin(folder: Path) -> Callable[[], Files]:
        write_shards(folder)
        report = written_by(lambda _: None)(folder)()
        if change == "missing":
            (folder / "shard-0.distcp").unlink()
        elif change == "short":
            (folder / "shard-0.distcp").write_bytes(b"x")
        else:
            (folder / "stranger").write_bytes(b"x")
        return lambda: report

    with pytest.raises(CheckpointError, match="stranger" if change == "foreign" else "shard-0"):
        save_checkpoint(CheckpointStore(tmp_path, keep=2), 1, begin, STATE)
    assert list(tmp_path.iterdir()) == []


def test_save_without_room_is_refused(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    with pytest.raises(CheckpointError, match=r"GiB are free: make room"):
        store.begin(1, lambda _: pytest.fail("there is no room"), num_bytes=2**60)
    assert list(tmp_path.iterdir()) == []


def test_driver_does_not_hash_trainer_files(tmp_path):
    """Reading 500 GB on the driver before anything starts would take hours."""
    store = saved(tmp_path, 1, 2)
    shard = tmp_path / "step-2" / "trainer" / "shard-0.distcp"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    checkpoint, _ = store.newest(hashes=False)
    assert checkpoint.step == 2
    with pytest.raises(CorruptCheckpointError, match="shard-0"):
        check_files(checkpoint.trainer_folder, checkpoint.files)
    store.damaged[checkpoint.path] = "shard-0"
    checkpoint, notes = store.newest(hashes=False)
    assert checkpoint.step == 1 and notes == ["shard-0"]


def test_committed_step_is_never_overwritten(tmp_path):
    store = saved(tmp_path, 1)
    before = (tmp_path / "step-1" / "trainer" / "shard-0.distcp").read_bytes()
    with pytest.raises(CheckpointError, match="not overwritten"):
        save_checkpoint(store, 1, write_trainer=written_by(write_shards), state=STATE)
    assert (tmp_path / "step-1" / "trainer" / "shard-0.distcp").read_bytes() == before


POINTS = {
    "copied": ("_check_room", None),
    "written": ("_write", STATE_FILE),
    "state": ("_check_present", None),
    "before the manifest": ("_digest", None),
    "manifest": ("_write", MANIFEST),
    "renamed": ("sync_path", None),
    "pruning": ("_delete", None),
}
"""Name of the function about to be called, and of its file if it writes one."""


@pytest.mark.fault
@pytest.mark.parametrize("point", POINTS)
def test_sigkill_at_each_point_of_a_save(tmp_path, point):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2):
        save_checkpoint(store, step, write_trainer=written_by(write_shards), state={"step": step})
    pid = os.fork()
    if pid == 0:
        name, file = POINTS[point]
        owners = (CheckpointStore, checkpoint_module)
        owner = next(owner for owner in owners if hasattr(owner, name))
        original = getattr(owner, name)

        def killed(*args: Any, **options: Any) -> Any:
            if file is None or args[0].name == file:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **options)

        setattr(owner, name, killed)
        save_checkpoint(store, 3, write_trainer=written_by(write_shards), state={"step": 3})
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    checkpoint, _ = store.newest()
    assert checkpoint.step == (3 if point in ("renamed", "pruning") else 2)
    assert checkpoint.state == {"step": checkpoint.step}
    store.remove_unfinished()
    save_checkpoint(store, 4, write_trainer=written_by(write_shards), state={"step": 4})
    assert steps_in(tmp_path) == [f"step-{checkpoint.step}", "step-4"]


NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to others")


@pytest.mark.parametrize("part", [".", "trainer", "trainer/shard", "state.json", "manifest.json"])
def test_world_writable_parts_are_refused(tmp_path, part):
    saved_store(tmp_path, 1)
    path = tmp_path / "step-1" / part
    path.chmod(path.stat().st_mode | 0o002)
    with pytest.raises(CheckpointError, match=r"is writable by everyone.*chmod o-w"):
        load(tmp_path / "step-1")


def test_refused_checkpoint_is_not_damaged(tmp_path):
    """chmod o+w by accident set the newest checkpoint aside as damaged, and the run deleted it."""
    store = saved_store(tmp_path, 1, 2, keep=2)
    (tmp_path / "step-2").chmod(0o777)
    with pytest.raises(CheckpointError, match=r"chmod o-w.*\n.*move .*step-2 out"):
        store.newest()


@as_root
def test_foreign_files_are_read_and_foreign_folders_refused(tmp_path):
    saved_store(tmp_path, 1)
    folder = tmp_path / "step-1"
    os.chown(folder / "trainer" / "shard", NOBODY, NOBODY)
    assert load(folder).step == 1
    os.chown(folder / "trainer", NOBODY, NOBODY)
    with pytest.raises(CheckpointError, match=f"step-1/trainer belongs to user {NOBODY}"):
        load(folder)


SQUASHED = f"""
import ctypes, sys
from pathlib import Path
from megadapo.run.state.checkpoint import load
# what this process makes belongs to nobody, and os.getuid() is 0, as behind a root-squashing server
ctypes.CDLL(None).setfsuid({NOBODY})
print(load(Path(sys.argv[1])).step)
"""


@as_root
def test_root_squashed_files_are_own(tmp_path):
    saved_store(tmp_path, 1)
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    # the way there must be open to nobody
    for parent in tmp_path.parents:
        if parent != Path("/") and parent != Path("/tmp"):
            parent.chmod(0o755)
    command = [sys.executable, "-c", SQUASHED, str(tmp_path / "step-1")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout == "1\n", result.stderr
    with pytest.raises(CheckpointError, match="belongs to user"):
        load(tmp_path / "step-1")


@pytest.mark.parametrize("part", ["trainer", "trainer/shard", "state.json", "manifest.json"])
def test_links_are_refused(tmp_path, part):
    saved_store(tmp_path / "run", 1)
    path = tmp_path / "run" / "step-1" / part
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=rf"{part} is a link: a checkpoint may not contain"):
        load(tmp_path / "run" / "step-1")


def test_pipe_is_refused(tmp_path):
    saved_store(tmp_path, 1)
    os.mkfifo(tmp_path / "step-1" / "trainer" / "pipe")
    with pytest.raises(CheckpointError, match="pipe is neither a file nor a folder"):
        load(tmp_path / "step-1")


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "trainer/../../outside"])
def test_manifest_names_stay_in_the_folder(tmp_path, name):
    saved_store(tmp_path / "run", 1)
    (tmp_path / "run" / "outside").write_bytes(b"")
    path = tmp_path / "run" / "step-1" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = manifest["files"].pop("trainer/shard")
    del manifest["sha256"]
    text = json.dumps(manifest, sort_keys=True)
    manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"damaged manifest\.json: .*it names"):
        load(tmp_path / "run" / "step-1")


def test_linked_checkpoint_is_refused_and_its_target_stays(tmp_path):
    outside = tmp_path / "other"
    saved_store(outside, 7)
    before = sorted(outside.rglob("*"))
    store = saved_store(tmp_path / "run", 1, 2, keep=2)
    for name in ("step-0", "step-9", "tmp-step-3-deadbeef", "damaged-step-8-deadbeef"):
        (store.folder / name).symlink_to(outside / "step-7")
    (store.folder / "step-1" / "inside").symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"step-9 is a link.*\n.*move .*step-9 out"):
        store.newest()
    store.remove_unfinished()
    store.set_aside_after(2, damaged=True)
    saved_store(store.folder, 10, 11, keep=2)
    assert sorted(path.name for path in store.folder.iterdir()) == ["step-10", "step-11"]
    assert sorted(outside.rglob("*")) == before and load(outside / "step-7").step == 7


@pytest.fixture
def model(tmp_path):
    (tmp_path / "secret").write_text("key")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").symlink_to("../secret")
    return folder


def test_conversion_does_not_follow_links(model, tmp_path):
    import torch

    with pytest.raises(WeightError, match=r"tokenizer\.json is a link to .*secret, outside"):
        copy_config_and_tokenizer(model, tmp_path, torch.float32)


def test_hub_cache_links_reach_own_blobs_only(tmp_path):
    snapshot, blobs = tmp_path / "m" / "snapshots" / "abc", tmp_path / "m" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    (blobs / "123").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/123")
    assert list(files_within(snapshot, ["config.json"])) == [snapshot / "config.json"]
    (snapshot / "merges.txt").symlink_to("../../../secret")
    with pytest.raises(WeightError, match="merges.txt is a link"):
        list(files_within(snapshot, ["*"]))


def test_linked_destination_is_refused(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "kept").touch()
    with new_folder(tmp_path / "export") as partial:
        assert not partial.is_symlink() and (tmp_path / "target" / "kept").exists()
    (tmp_path / "linked").symlink_to("nowhere")
    with pytest.raises(WeightError, match="exists already"), new_folder(tmp_path / "linked"):
        pass


def test_second_command_cannot_write_the_same_folder(tmp_path):
    """The first one exported half of the second one's weights, and exited with 0."""
    folder, here, parent = tmp_path / "export", str(os.getpid()), str(os.getppid())
    with new_folder(tmp_path / "first") as partial:
        start = partial.name.replace("first", "export").removesuffix(here)
    other, killed = tmp_path / f"{start}{parent}", tmp_path / f"{start}99999999"
    other.mkdir()
    with pytest.raises(WeightError, match=f"written by process {parent};"), new_folder(folder):
        pass
    other.rename(killed)
    with pytest.raises(WeightError, match="exists already"), new_folder(folder):
        assert not killed.exists()
        # as a command on another machine does
        folder.mkdir()
        (folder / "one").touch()
    assert {path.name for path in tmp_path.iterdir()} == {"first", "export"}
    assert [path.name for path in folder.iterdir()] == ["one"]
