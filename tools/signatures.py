"""Renew requirements/signatures.json: how what we call on CUDA machines is called there.

Without a GPU there may be another megatron-core, and there is no Transformer Engine. So the
signatures of what we use are kept, of the versions that requirements/gpu.in and the Dockerfile pin;
a test holds our calls against them. vLLM and torch have types, and the same sources for CPU and
CUDA: mypy holds our calls against those.

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
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIGNATURES = ROOT / "requirements" / "signatures.json"
MODULES = sorted((ROOT / "megadapo").rglob("*.py"))

Signatures = dict[str, str | None]
"""Full name -> its parameters as Python writes them, with 0 for every default; None of what is not
called, or does not tell how."""

OF_TRANSFORMER_ENGINE = {
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
"""File -> what megatron-core builds our layers from."""


def main() -> None:
    """Read the pinned versions and write their signatures down."""
    versions = pinned_versions()
    found: dict[str, Signatures] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for package, read in (
            ("megatron-core", of_megatron),
            ("transformer-engine", of_transformer_engine),
        ):
            pin = f"{package}=={versions[package]}"
            unpack(pin, folder / package)
            found[pin] = read(folder / package)
    SIGNATURES.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def pinned_versions() -> dict[str, str]:
    """Package -> version that CUDA machines have."""
    text = (ROOT / "requirements" / "gpu.in").read_text() + (ROOT / "Dockerfile").read_text()
    return dict(re.findall(r"([a-z-]+)(?:\[[\w,]+\])?==([\d.]+)", text))


def unpack(pin: str, folder: Path) -> None:
    """The sources of a package as Python 3.12 would get them."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", pin]
    command += ["--only-binary=:all:", "--python-version=3.12", f"--dest={folder}"]
    subprocess.run(command, check=True)
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)


def of_megatron(folder: Path) -> Signatures:
    """Of everything that our modules import from it, or call."""
    sys.path.insert(0, str(folder))
    return {name: parameters_of(resolve(name)) for name in sorted(used_of("megatron"))}


def resolve(name: str) -> object:
    """What lies at "package.module.name".

    Raises:
        ModuleNotFoundError: nothing does.
    """
    owner, _, attribute = name.rpartition(".")
    # a function may have the name of its own module
    if owner and hasattr(found := resolve(owner), attribute):
        return getattr(found, attribute)
    return importlib.import_module(name)


def parameters_of(found: object) -> str | None:
    """How something is called, for `Signatures`."""
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


def of_transformer_engine(folder: Path) -> Signatures:
    """Of its classes, their forward methods and its functions; it cannot be imported here."""
    found: Signatures = {}
    for file, names in OF_TRANSFORMER_ENGINE.items():
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
    """A definition's parameters, for `Signatures`."""
    for argument in ast.walk(args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    args.defaults = [ast.Constant(0) for _ in args.defaults]
    args.kw_defaults = [each and ast.Constant(0) for each in args.kw_defaults]
    return ast.unparse(args)


@dataclass(frozen=True)
class Call:
    """A call of ours of what a library has."""

    name: str
    """Full name, by our imports."""
    num_positional: int
    keywords: tuple[str, ...]
    is_complete: bool
    """Whether that is all, as it is not with `**options`."""
    place: str

    def problem(self, parameters: str) -> str | None:
        """Why it cannot be called like this, if so."""
        signature = inspect.signature(eval(f"lambda {parameters}: None"))
        bind = signature.bind if self.is_complete else signature.bind_partial
        try:
            bind(*[None] * self.num_positional, **dict.fromkeys(self.keywords))
        except TypeError as error:
            return f"{self.place}: {self.name}({parameters}): {error}"
        return None


def calls_of(path: Path) -> Iterator[Call]:
    """Every call of something imported in one of our modules."""
    tree = ast.parse(path.read_text())
    imports = imports_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _full_name(node.func, imports)) is not None:
            yield call_from(node, name, f"{path.relative_to(ROOT)}:{node.lineno}")


def call_from(node: ast.Call, name: str, place: str) -> Call:
    """A call as it is written."""
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
    """Name in a module -> full name of what is imported by it."""
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
    """Everything of a package that our modules import or call."""
    names: set[str] = set()
    for path in MODULES:
        names |= set(imports_of(ast.parse(path.read_text())).values())
        names |= {call.name for call in calls_of(path)}
    return {name for name in names if name.startswith(f"{package}.")}


if __name__ == "__main__":
    main()
