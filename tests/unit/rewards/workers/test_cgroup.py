"""Control groups of sandboxes: limits of all processes together, if the system delegates them."""

import logging
import subprocess
from pathlib import Path

import pytest

from megadapo.rewards.config import RewardFunction
from megadapo.rewards.function_runners import start_runner
from megadapo.rewards.workers import cgroup
from tests.unit.rewards.workers.test_sandbox import READS, run


def fake_proc(folder: Path, own: str, mount: Path) -> Path:
    """Return a stand-in for /proc/self of a process in group `own`."""
    folder.mkdir()
    (folder / "cgroup").write_text(f"9:name=systemd:/elsewhere\n0::{own}\n")
    (folder / "mounts").write_text(
        f"tmpfs /sys/fs/cgroup tmpfs ro 0 0\ncgroup2 {mount} cgroup2 rw,relatime 0 0\n"
    )
    return folder


@pytest.mark.parametrize(
    ("own", "above", "found"),
    [
        ("cpu memory pids", "", "a.slice/b.scope"),
        ("", "memory pids", "a.slice"),
        ("memory", "cpu", None),
        ("", "", None),
    ],
)
def test_nearest_delegated_group_is_found(tmp_path, own, above, found, caplog) -> None:
    mount = tmp_path / "mount"
    group = mount / "a.slice" / "b.scope"
    group.mkdir(parents=True)
    left = group / "megadapo-left"
    left.mkdir()
    (group / "cgroup.subtree_control").write_text(own + "\n")
    (group.parent / "cgroup.subtree_control").write_text(above + "\n")
    proc = fake_proc(tmp_path / "proc", "/a.slice/b.scope", mount)
    with caplog.at_level(logging.INFO):
        assert cgroup.find_parent(proc) == (mount / found if found else None)
    assert ("and not their sum" in caplog.text) == (found is None)
    assert left.exists() == (found != "a.slice/b.scope")


def test_no_control_groups(tmp_path) -> None:
    assert cgroup.find_parent(tmp_path) is None
    assert cgroup.find_parent(fake_proc(tmp_path / "root", "/", tmp_path)) is None


def test_process_is_limited_with_its_children(tmp_path) -> None:
    group = cgroup.enclose(4711, tmp_path, 1 << 30)
    assert {path.name: path.read_text() for path in group.iterdir()} == {
        "memory.max": "1073741824",
        "memory.swap.max": "0",
        "pids.max": "40",
        "cgroup.procs": "4711",
    }
    assert cgroup.enclose(4711, tmp_path / "missing", 1 << 30) is None


def test_sandbox_scores_whether_its_group_works_or_not(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cgroup, "REMOVE_S", 0.0)
    for folder in (tmp_path, tmp_path / "missing"):
        monkeypatch.setattr(cgroup, "find_parent", lambda found=folder: found)
        runner = start_runner(RewardFunction(function="python_tests", timeout_s=4.0))
        assert run(runner, [READS + "print(a + b)"])[0].correct
        runner.close()
    groups = list(tmp_path.glob("megadapo-*"))
    assert groups and all((group / "cgroup.kill").exists() for group in groups)
    assert (groups[0] / "memory.max").read_text() == str(4096 << 20)


def test_kernel_moves_a_process_and_removes_its_group(monkeypatch) -> None:
    """The kernel refuses to remove a group whose processes have not ended yet."""
    mounted = Path("/proc/self/mounts").read_text().splitlines()
    points = [line.split()[1] for line in mounted if " cgroup2 " in line]
    if not points:
        pytest.skip("no cgroup v2")
    monkeypatch.setattr(cgroup, "_CONTROLLERS", frozenset())
    monkeypatch.setattr(cgroup, "_LIMITS", {})
    if (parent := cgroup.find_parent()) is None:
        pytest.skip("no delegated group")
    sleeper = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"])
    group = cgroup.enclose(sleeper.pid, parent, 0)
    assert group is not None
    assert group.name in Path(f"/proc/{sleeper.pid}/cgroup").read_text()
    cgroup.remove(group)
    assert sleeper.wait(5) == -9 and not group.exists()
