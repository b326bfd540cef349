"""Imports of the kernels, which import-linter cannot see."""

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
KERNELS = sorted((REPOSITORY / "kernels").rglob("*.py"))
ALLOWED = ("megadapo.kernels.", "megadapo.algorithm.")


def test_there_are_kernels():
    assert len(KERNELS) > 10


@pytest.mark.parametrize("path", KERNELS, ids=str)
def test_a_kernel_imports_kernels_and_the_algorithm_only(path):
    """The head must run, and be tested, without Ray, vLLM and megatron-core."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)]
    ours = [name for name in names if name.split(".")[0] == "megadapo"]
    assert all(name.startswith(ALLOWED) for name in ours), ours
    assert not {name.split(".")[0] for name in names} & {"ray", "vllm", "megatron", "transformers"}
