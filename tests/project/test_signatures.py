"""Calls that only a CUDA machine makes, against the signatures of its libraries."""

import ast
import importlib.util
import json
import runpy
from pathlib import Path

import torch.multiprocessing.reductions

from megadapo.rollout.config import OWN_ARGUMENTS, VLLM_DEFAULTS, vllm_argument_names
from megadapo.weights.sync.transports import in_place
from tests.support.rollout.engine_specs import engine_spec

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "signatures.py"))
KEPT: dict[str, dict[str, str | None]] = json.loads(TOOL["SIGNATURES"].read_text())
RENEW = "run tools/signatures.py"


def kept_of(package: str) -> dict[str, str | None]:
    """Return the recorded signatures of the version that CUDA machines have."""
    return KEPT[f"{package}=={TOOL['pinned_versions']()[package]}"]


def test_signatures_are_of_the_pinned_versions_and_complete():
    assert set(kept_of("megatron-core")) == TOOL["used_of"]("megatron"), RENEW
    assert kept_of("transformer-engine"), RENEW


def test_megatron_is_called_as_the_pinned_version_can_be():
    known = kept_of("megatron-core")
    calls = [call for path in TOOL["MODULES"] for call in TOOL["calls_of"](path)]
    calls = [call for call in calls if known.get(call.name) is not None]
    assert len(calls) > 30
    assert not [problem for call in calls if (problem := call.problem(known[call.name]))]


def test_a_call_that_does_not_fit_is_noticed():
    (wrong, few, fits, open_end) = (
        TOOL["call_from"](ast.parse(text, mode="eval").body, "f", "here")
        for text in ("f(1, size=2)", "f()", "f(1, width=2)", "f(**options)")
    )
    assert "unexpected keyword argument 'size'" in wrong.problem("rows, *, width=0")
    assert "missing" in few.problem("rows, *, width=0")
    assert fits.problem("rows, *, width=0") is None
    assert open_end.problem("rows, *, width=0") is None


def test_what_engines_call_by_name_is_vllms():
    """Methods of AsyncLLM are named as texts, which mypy cannot follow."""
    methods = methods_of("v1/engine/async_llm.py", "AsyncLLM")
    engine = ast.parse((ROOT / "megadapo" / "rollout" / "engine" / "engine.py").read_text())
    # the name stands where the method has `self`
    named = [
        TOOL["call_from"](node, node.args[0].value, f"engine.py:{node.lineno}")
        for node in ast.walk(engine)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._call"
    ]
    assert {"sleep", "wake_up", "reset_prefix_cache"} < {call.name for call in named}
    assert not [problem for call in named if (problem := call.problem(methods[call.name]))]


def test_engines_start_with_arguments_that_vllm_has():
    names = set(vllm_argument_names())
    assert engine_spec(gpus=("0",)).engine_arguments().keys() | OWN_ARGUMENTS.keys() <= names


def test_arguments_that_are_set_already_cannot_be_given():
    start = ast.parse((ROOT / "megadapo" / "rollout" / "engine" / "start_vllm.py").read_text())
    (call,) = (
        node
        for node in ast.walk(start)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "AsyncEngineArgs"
    )
    given = {keyword.arg for keyword in call.keywords if keyword.arg}
    given |= engine_spec(gpus=("0",)).engine_arguments().keys() - VLLM_DEFAULTS.keys()
    assert given <= OWN_ARGUMENTS.keys()


def test_memory_is_offered_as_torch_shares_it():
    """Handles of GPU memory are sent by name, in torch's own order."""
    tree = ast.parse(Path(torch.multiprocessing.reductions.__file__).read_text())
    (shared,) = (
        [ast.unparse(name) for name in node.targets[0].elts]
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value) == "storage._share_cuda_()"
    )
    assert shared == list(in_place._HANDLE_FIELDS)


def test_vllms_attention_in_triton_names_no_precision():
    """Its float32 is exact by Triton's variable alone, which engines get."""
    kernel = source_of("v1/attention/ops/triton_unified_attention.py")
    assert "tl.dot(" in kernel and "input_precision" not in kernel


def source_of(file: str) -> str:
    """Return the text of one of vLLM's files, without importing it."""
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations
    return (Path(folder) / file).read_text()


def methods_of(file: str, name: str) -> dict[str, str]:
    """Return the parameters of the methods of one of vLLM's classes."""
    tree = ast.parse(source_of(file))
    (found,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name)
    methods = [one for one in found.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {one.name: TOOL["written"](one.args) for one in methods}
