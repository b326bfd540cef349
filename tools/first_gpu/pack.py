"""Pack what a machine without a network lacks for tools/first_gpu.sh, in pieces of limited size.

    python tools/first_gpu/pack.py [--limit-mib 64] [--python 3.12] FOLDER

The machine has torch, triton, transformers, pyarrow and pytest. FOLDER/trainer.tar.xz adds what the
parts without Ray need, FOLDER/ray.tar.xz also Ray. Each starts alone, and fits with this repository
below the limit. There: tools/first_gpu.sh --piece FILE ...
"""

from __future__ import annotations

import argparse
import io
import lzma
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

MIB = 2**20
REPOSITORY = Path(__file__).parents[2]
TRAINER = (
    *("annotated-types", "cut-cross-entropy", "liger-kernel", "megatron-core", "prometheus-client"),
    *("psutil", "pydantic", "pydantic-core", "typing-extensions", "typing-inspection"),
)
RAY = (
    *("attrs", "certifi", "charset-normalizer", "idna", "jsonschema", "jsonschema-specifications"),
    *("msgpack", "protobuf", "ray", "referencing", "requests", "rpds-py", "urllib3"),
)
PIECES = {"trainer": TRAINER, "ray": (*TRAINER, *RAY)}
PINS = ("cpu.lock", "bench.txt")
"""Files of requirements/ with the version of each package."""
LEFT_OUT = tuple(
    f"ray/{name}/"
    for name in (
        "air",
        "dashboard/client",
        "data",
        "jars",
        "llm",
        "rllib",
        "serve",
        "train",
        "tune",
    )
)
"""Ray's archive of Java, its libraries and its web page: actors work without them."""
FILTERS = (
    {"id": lzma.FILTER_X86},
    # Ray's programs have most of their code in common, further apart than a preset looks
    {"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 64 * MIB},
)


def main() -> int:
    """Write all pieces; return 1 if one exceeds the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit-mib", type=float, default=64, help="MiB of a piece and the tree")
    parser.add_argument("--python", default="3.12", help="version of Python there (default 3.12)")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    wheels = download(pins(arguments.python), folder / "wheels", arguments.python)
    limit, tree = int(arguments.limit_mib * MIB), tree_bytes(REPOSITORY, without=folder)
    too_large = False
    for piece, names in PIECES.items():
        path = folder / f"{piece}.tar.xz"
        write_piece(path, [wheels[name] for name in names])
        size = path.stat().st_size
        too_large |= tree + size > limit
        note = "above" if tree + size > limit else "below"
        print(f"{path}: {size:,} bytes, {tree + size:,} with the tree, {note} {limit:,}")
    return int(too_large)


def pins(python: str) -> dict[str, str]:
    """Return the version of each package for a version of Python."""
    texts = [(REPOSITORY / "requirements" / name).read_text() for name in PINS]
    lines = "\n".join(texts).splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    environment = {"python_version": python}
    names = PIECES["ray"]
    return {
        one.name: str(one.specifier).removeprefix("==")
        for one in found
        if one.name in names and (one.marker is None or one.marker.evaluate(environment))
    }


def download(versions: dict[str, str], folder: Path, python: str) -> dict[str, Path]:
    """Return the wheel of each package for x86-64 Linux; pip downloads missing ones."""
    # pip matches a platform exactly, and wheels name several
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        + ["--implementation=cp", f"--python-version={python}", f"--dest={folder}"]
        + [f"--platform={one}" for one in platforms]
        + [f"{name}=={version}" for name, version in versions.items()],
        check=True,
    )
    found = {}
    for name, version in versions.items():
        (found[name],) = folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")
    return found


def write_piece(path: Path, wheels: Iterable[Path]) -> None:
    """Write the files of wheels as one archive, as they are under site-packages."""
    with (
        lzma.open(path, "wb", filters=FILTERS) as file,
        tarfile.open(fileobj=file, mode="w|") as archive,
    ):
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as packed:
                for entry in packed.infolist():
                    if entry.is_dir() or entry.filename.startswith(LEFT_OUT):
                        continue
                    info = tarfile.TarInfo(entry.filename)
                    # programs stay executable
                    info.size, info.mode = entry.file_size, entry.external_attr >> 16 & 0o777
                    archive.addfile(info, io.BytesIO(packed.read(entry)))


def tree_bytes(repository: Path, *, without: Path) -> int:
    """Return the bytes of all files that git does not ignore, except those of a folder."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=repository, capture_output=True, check=True, text=True)
    paths = {repository / name for name in names.stdout.split("\0") if name}
    return sum(
        path.lstat().st_size for path in paths if path.exists() and not path.is_relative_to(without)
    )


if __name__ == "__main__":
    sys.exit(main())
