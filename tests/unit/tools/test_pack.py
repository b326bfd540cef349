"""The pieces of tools/first_gpu/pack.py, made of small wheels in place of the index's."""

import importlib
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import REPOSITORY

PROGRAM = "ray/core/src/ray/raylet/raylet"


@pytest.fixture
def pack(monkeypatch, tmp_path) -> ModuleType:
    """The tool, with an index that has a wheel of every pinned version."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools" / "first_gpu"))
    tool = importlib.import_module("pack")
    index = tmp_path / "index"
    index.mkdir()
    for name, version in tool.pins("3.12").items():
        stem = f"{name.replace('-', '_')}-{version}"
        with zipfile.ZipFile(index / f"{stem}-py3-none-any.whl", "w") as wheel:
            about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            wheel.writestr(f"{stem}.dist-info/METADATA", about)
            wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{name.replace('-', '_')}/__init__.py", "")
            if name == "ray":
                program = zipfile.ZipInfo(PROGRAM)
                program.external_attr = 0o100755 << 16
                wheel.writestr(program, b"\x7fELF" * 1000)
                wheel.writestr("ray/jars/ray_dist.jar", bytes(1000))
                wheel.writestr("ray/data/__init__.py", "")
                wheel.writestr("ray/dashboard/agent.py", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return tool


def run(pack: ModuleType, monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["pack.py", *words])
    return pack.main()


def members(path: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(path) as archive:
        return {one.name: one for one in archive}


def test_pieces_have_what_their_parts_import(pack, monkeypatch, tmp_path, capsys):
    """Catches a forgotten pin, a lost mode of Ray's programs, and Ray's Java."""
    folder = tmp_path / "pieces"
    assert run(pack, monkeypatch, str(folder)) == 0
    trainer, ray = (members(folder / f"{name}.tar.xz") for name in ("trainer", "ray"))
    assert {"megatron_core/__init__.py", "pydantic/__init__.py"} < trainer.keys() < ray.keys()
    assert not any(name.startswith("ray") for name in trainer)
    assert ray[PROGRAM].mode == 0o755
    assert {name for name in ray if name.startswith("ray/")} == {
        *("ray/__init__.py", "ray/dashboard/agent.py", PROGRAM)
    }
    first, second = capsys.readouterr().out.splitlines()
    tree = pack.tree_bytes(REPOSITORY, without=folder)
    for line, name in ((first, "trainer"), (second, "ray")):
        size = (folder / f"{name}.tar.xz").stat().st_size
        assert f"{size:,} bytes, {size + tree:,} with the tree, below 67,108,864" in line


def test_piece_above_the_limit_is_an_error(pack, monkeypatch, tmp_path, capsys):
    assert run(pack, monkeypatch, "--limit-mib=1", str(tmp_path / "pieces")) == 1
    assert capsys.readouterr().out.count("above 1,048,576") == 2


def test_tree_has_new_files_and_neither_ignored_ones_nor_the_pieces(pack, tmp_path):
    """Each would change the printed size, and not the number of bytes that travel."""
    subprocess.run(["git", "init", "--quiet", tmp_path / "tree"], check=True)
    tree = tmp_path / "tree"
    for name, size in ((".gitignore", 8), ("new", 100), ("ignored", 1000), ("pieces/one", 10000)):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_bytes(b"ignored\n".ljust(size, b"#"))
    assert pack.tree_bytes(tree, without=tree / "pieces") == 108
