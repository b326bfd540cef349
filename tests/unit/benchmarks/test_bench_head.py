"""The head's benchmark measures time, memory and errors, and notices a wrong baseline."""

import gc
import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import head
import pytest
import torch
from baselines import head_inputs
from baselines.head_inputs import OURS, PRODUCTS, HeadShape, make_inputs, parse_shape
from baselines.heads import OTHER_LOSSES, AbsentError, eager_loss
from head import bench_head, format_table
from shared import peak_extra_mib, time_together

from megadapo.errors import ConfigError
from megadapo.kernels.policy_head.tiling import plan_tiling

CPU = torch.device("cpu")
SHAPE = HeadShape(num_tokens=64, hidden_size=32, vocab_size=304, dtype=torch.float32)


def test_ours_and_eager_agree_with_fp64_and_products_are_the_floor():
    results = bench_head(SHAPE, CPU, only=["eager"], warmup=1, repeats=2)
    by_name = {result.name: result for result in results}
    assert set(by_name) == {PRODUCTS, OURS, "eager torch"}
    assert by_name[PRODUCTS].ratio_to_products == 1.0
    for name in (OURS, "eager torch"):
        result = by_name[name]
        assert result.loss_error <= 1e-6
        assert result.d_hidden_error <= 2e-6 and result.d_weight_error <= 2e-6
        assert result.best_ms <= result.median_ms
    table = format_table(results)
    assert str(SHAPE) in table and OURS in table


@pytest.fixture(autouse=True, scope="module")
def short_collections() -> Iterator[None]:
    """Each measurement of memory collects garbage, also of all that other tests have imported."""
    gc.freeze()
    yield
    gc.unfreeze()


ODD = {
    "wrong": lambda inputs: 1.01 * eager_loss(inputs),
    "lunar": Mock(side_effect=AbsentError("needs a moon")),
    "broken": Mock(side_effect=RuntimeError("no kernel image\nis available")),
    OTHER_LOSSES[0]: lambda inputs: inputs.hidden.sum() + inputs.weight.sum(),
}


@pytest.fixture(scope="module")
def odd_results() -> list[head.HeadResult]:
    """A benchmark of baselines that are wrong, absent, broken or of another loss."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "BASELINES", head.BASELINES | ODD)
        return bench_head(SHAPE, CPU, only=list(ODD), warmup=0, repeats=1)


def test_wrong_baseline_shows_in_its_errors_and_another_loss_has_none(odd_results):
    by_name = {result.name: result for result in odd_results}
    assert by_name["wrong"].d_hidden_error == pytest.approx(0.01, rel=1e-3)
    other = by_name[OTHER_LOSSES[0]]
    assert other.loss_error is None and other.best_ms is not None


def test_absent_and_broken_baselines_are_listed_with_their_reason(odd_results, monkeypatch):
    """A rival that does not compile on a new GPU would end the benchmark before ours is timed."""
    names = [PRODUCTS, OURS, "wrong", OTHER_LOSSES[0], "lunar", "broken"]
    assert sorted(result.name for result in odd_results) == sorted(names)
    absent = {result.name: result.absent for result in odd_results if result.absent}
    broken = "failed: RuntimeError: no kernel image is available"
    assert absent == {"lunar": "needs a moon", "broken": broken}
    assert "needs a moon" in format_table(odd_results)
    monkeypatch.setattr(head, "BASELINES", {OURS: ODD["broken"]})
    with pytest.raises(RuntimeError):
        bench_head(SHAPE, CPU, warmup=0, repeats=1)


def test_targets_come_from_the_model():
    """Uniform targets would have a mean log-prob near -log V minus half the logits' variance."""
    inputs = make_inputs(SHAPE, CPU)
    logits = inputs.hidden.detach() @ inputs.weight.detach().t()
    logprobs = logits.log_softmax(-1)
    drawn = logprobs.gather(1, inputs.targets[:, None]).mean()
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
    assert abs(drawn.item() + entropy.item()) < 0.5


def test_peak_memory_of_a_call_is_measured():
    def call() -> torch.Tensor:
        torch.ones(48 * 2**18)
        return torch.ones(16 * 2**18)

    call()
    assert 47 <= peak_extra_mib(call, CPU) <= 70


def test_calls_are_timed_in_turn():
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: (order.append("b"), time.sleep(0.002))}
    timings = time_together(calls, CPU, warmup=1, repeats=2)
    assert order == ["a", "b"] * 3
    assert min(timings["b"]) >= 2.0 > min(timings["a"])


@pytest.mark.parametrize(
    "text",
    [
        "1,2,3",
        "8,2,3,int8",
        "8,x,3,float32",
        "9,2,3,float32",
        "8,2,3,float32,0",
        "8,2,3,float32,1,1",
    ],
)
def test_bad_shape_is_named(text):
    with pytest.raises(ConfigError, match="--shape="):
        parse_shape(text, 1.0)


def test_slice_runs_in_the_tiling_of_the_whole_vocabulary(monkeypatch):
    """The tiling of the slice alone has one block where a rank of TP 8 has five."""
    seen = {}

    def head(*arguments: object, **options: object) -> SimpleNamespace:
        seen.update(options)
        return SimpleNamespace(loss=None)

    monkeypatch.setattr(head_inputs, "policy_head_loss", head)
    head_inputs.ours(make_inputs(parse_shape("8,32,2000,float32,8", 1.0), CPU))
    tiling = plan_tiling(16_000, 32, torch.float32, CPU)
    assert (seen["chunk_tokens"], seen["tile_tokens"]) == (tiling.block_rows, tiling.tile_rows)
    assert tiling != plan_tiling(2000, 32, torch.float32, CPU)


def test_command_writes_json(tmp_path, capsys):
    path = tmp_path / "head.json"
    options = ["--shape=16,8,104,float32", "--device=cpu", "--only=eager", "--repeats=1"]
    threads = torch.get_num_threads()
    try:
        assert head.main([*options, f"--json={path}"]) == 0
    finally:
        torch.set_num_threads(threads)
    written = json.loads(path.read_text())
    assert [result["name"] for result in written["results"]] == [PRODUCTS, OURS, "eager torch"]
    assert written["machine"]["versions"]["torch"] == torch.__version__
    assert "T=16 H=8 V=104" in capsys.readouterr().out


def test_shape_that_ends_the_process_leaves_the_earlier_ones(tmp_path, monkeypatch):
    """One JSON at the end lost all shapes to a fault of the last one."""

    def measured(shape: HeadShape, *_: object, **__: object) -> list[head.HeadResult]:
        if shape.num_tokens == 8:
            raise KeyboardInterrupt
        return [head.HeadResult(name=OURS, shape=str(shape))]

    monkeypatch.setattr(head, "bench_head", measured)
    path, threads = tmp_path / "head.json", torch.get_num_threads()
    shapes = ["--shape=16,8,104,float32", "--shape=8,8,104,float32"]
    with pytest.raises(KeyboardInterrupt):
        head.main([*shapes, "--device=cpu", f"--threads={threads}", f"--json={path}"])
    assert [one["name"] for one in json.loads(path.read_text())["results"]] == [OURS]
