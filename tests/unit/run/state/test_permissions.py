"""Checkpoints that another user has prepared neither reach nor delete files elsewhere."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megadapo.errors import CheckpointError, WeightError
from megadapo.run.state.checkpoint import load
from megadapo.weights.disk.export import copy_config_and_tokenizer, new_folder
from megadapo.weights.disk.files import files_within
from tests.support.runs.checkpoints import saved_store

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
    (tmp_path / "export.partial").symlink_to("target")
    with new_folder(tmp_path / "export") as partial:
        assert not partial.is_symlink() and (tmp_path / "target" / "kept").exists()
    (tmp_path / "linked").symlink_to("nowhere")
    with pytest.raises(WeightError, match="exists already"), new_folder(tmp_path / "linked"):
        pass
