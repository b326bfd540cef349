"""Update requirements/signatures.json: signatures of the functions we call on CUDA machines.

A machine without a GPU may have another megatron-core, and has no Transformer Engine. So this file
has the signatures in the versions that the extra cuda and the Dockerfile pin, and a test
checks our calls against them. vLLM and torch have types and the same sources for CPU and CUDA, so
mypy checks those calls.

    python tools/signatures.py
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
DOCKERS_PYTHON = {"python_version": "3.12"}
SIGNATURES = ROOT / "requirements" / "signatures.json"
MODULES = sorted((ROOT / "megadapo").rglob("*.py"))

Signatures = dict[str, str | None]
"""Parameters by full name, as Python writes them, with 0 for every default; None if unknown or not
callable."""

TRANSFORMER_ENGINE = {
    "attention/dot_product_attention/dot_product_attention.py": ["DotProductAttention"],
    "attention/rope.py": ["apply_rotary_pos_emb"],
    "module/grouped_linear.py": ["GroupedLinear"],
    "module/layernorm_linear.py": ["LayerNormLinear"],
    "module/linear.py": ["Linear"],
    "module/rmsnorm.py": ["RMSNorm"],
    "permutation.py": [
        "moe_permute",
        "moe_permute_with_probs",
        "moe_sort_chunks_by_index",
        "moe_sort_chunks_by_index_with_probs",
        "moe_unpermute",
    ],
}
"""Names by file that megatron-core builds our layers from."""


def main() -> None:
    """Download the pinned versions and write their signatures."""
    versions = pinned_versions()
    found: dict[str, Signatures] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for package, read in (
            ("megatron-core", read_megatron),
            ("transformer-engine", read_transformer_engine),
        ):
            pin = f"{package}=={versions[package]}"
            unpack(pin, folder / package)
            found[pin] = read(folder / package)
    SIGNATURES.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def pinned_versions() -> dict[str, str]:
    """Return the versions on CUDA machines by package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = map(Requirement, project["optional-dependencies"]["cuda"])
    pins = [pin for pin in extra if not pin.marker or pin.marker.evaluate(DOCKERS_PYTHON)]
    text = (ROOT / "Dockerfile").read_text() + "\n".join(map(str, pins))
    return dict(re.findall(r"([a-z-]+)(?:\[[\w,]+\])?==([\d.]+)", text))


def unpack(pin: str, folder: Path) -> None:
    """Download and unpack a package as Python 3.12 would install it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", pin]
    command += ["--only-binary=:all:", "--python-version=3.12", f"--dest={folder}"]
    subprocess.run(command, check=True)
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)


def read_megatron(folder: Path) -> Signatures:
    """Return the signatures of all names that our modules import or call."""
    sys.path.insert(0, str(folder))
    return {name: parameters_of(resolve(name)) for name in sorted(used_of("megatron"))}


def resolve(name: str) -> object:
    """Return the object with the name "package.module.name".

    Raises:
        ModuleNotFoundError: there is no such object.
    """
    owner, _, attribute = name.rpartition(".")
    # a function may have the same name as its module
    if owner and hasattr(found := resolve(owner), attribute):
        return getattr(found, attribute)
    return importlib.import_module(name)


def parameters_of(found: object) -> str | None:
    """Return an object's parameters for `Signatures`."""
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        return None
    try:
        signature = inspect.signature(found)
    except ValueError:
        return None
    nothing = inspect.Parameter.empty
    plain = [
        one.replace(annotation=nothing, default=nothing if one.default is nothing else 0)
        for one in signature.parameters.values()
    ]
    return str(inspect.Signature(plain))[1:-1]


def read_transformer_engine(folder: Path) -> Signatures:
    """Return the signatures from the sources, as the package cannot be imported here."""
    found: Signatures = {}
    for file, names in TRANSFORMER_ENGINE.items():
        tree = ast.parse((folder / "transformer_engine" / "pytorch" / file).read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name in names:
                found[node.name] = written(node.args)
            elif isinstance(node, ast.ClassDef) and node.name in names:
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name in (
                        "__init__",
                        "forward",
                    ):
                        found[f"{node.name}.{method.name}"] = written(method.args)
    return found


def written(args: ast.arguments) -> str:
    """Return a definition's parameters for `Signatures`."""
    for argument in ast.walk(args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    args.defaults = [ast.Constant(0) for _ in args.defaults]
    args.kw_defaults = [each and ast.Constant(0) for each in args.kw_defaults]
    return ast.unparse(args)


@dataclass(frozen=True)
class Call:
    """A call of a library's function in our code."""

    name: str
    """Full name, resolved by the imports."""
    num_positional: int
    keywords: tuple[str, ...]
    is_complete: bool
    """Whether all arguments are known: no `*` or `**`."""
    place: str

    def problem(self, parameters: str) -> str | None:
        """Describe why the call does not fit the parameters; None if it fits."""
        signature = inspect.signature(eval(f"lambda {parameters}: None"))
        bind = signature.bind if self.is_complete else signature.bind_partial
        try:
            bind(*[None] * self.num_positional, **dict.fromkeys(self.keywords))
        except TypeError as error:
            return f"{self.place}: {self.name}({parameters}): {error}"
        return None


def calls_of(path: Path) -> Iterator[Call]:
    """Yield every call of an imported name in one of our modules."""
    tree = ast.parse(path.read_text())
    imports = imports_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _full_name(node.func, imports)) is not None:
            yield call_from(node, name, f"{path.relative_to(ROOT)}:{node.lineno}")


def call_from(node: ast.Call, name: str, place: str) -> Call:
    """Return the call of a syntax node."""
    plain = [one for one in node.args if not isinstance(one, ast.Starred)]
    keywords = [keyword.arg for keyword in node.keywords]
    return Call(
        name,
        len(plain),
        tuple(keyword for keyword in keywords if keyword is not None),
        is_complete=len(plain) == len(node.args) and None not in keywords,
        place=place,
    )


def imports_of(tree: ast.Module) -> dict[str, str]:
    """Return the full names of a module's imports by local name."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Import):
            found |= {one.asname or one.name: one.name for one in node.names}
    return found


def _full_name(node: ast.expr, imports: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return imports.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := _full_name(node.value, imports)) is not None:
        return f"{owner}.{node.attr}"
    return None


def used_of(package: str) -> set[str]:
    """Return the names of a package that our modules import or call."""
    names: set[str] = set()
    for path in MODULES:
        names |= set(imports_of(ast.parse(path.read_text())).values())
        names |= {call.name for call in calls_of(path)}
    return {name for name in names if name.startswith(f"{package}.")}


if __name__ == "__main__":
    main()
