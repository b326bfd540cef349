"""The sums of a profile, and options that need a GPU."""

import inspect

import pytest
import torch

from megadapo.cli import run_command
from megadapo.errors import ConfigError
from megadapo.lab.profiling.profiles import (
    Roofline,
    bytes_moved,
    format_profile,
    memory_history,
    profile_table,
)
from megadapo.plan.cards import card_of


def test_profile_has_the_rate_of_products():
    a = torch.randn(256, 256)
    with torch.profiler.profile(with_flops=True) as profile:
        for _ in range(4):
            a @ a
    roofline = Roofline(tflops=1e6, gb_per_s=1.0)
    rows = {row.name: row for row in profile_table(profile, roofline, {})}
    product = rows["aten::mm"]
    assert product.calls == 4
    flops = product.tflops * 1e12 * product.total_ms * 1e-3
    assert flops == pytest.approx(4 * 2 * 256**3, rel=1e-6)
    assert product.roofline_share == pytest.approx(product.tflops / 1e6)
    assert sum(row.share for row in rows.values()) == pytest.approx(1.0)
    assert "aten::mm" in format_profile(list(rows.values()), roofline)


@pytest.mark.parametrize("option", ["--memory=there", "--nvtx"])
def test_options_of_gpus_are_refused_on_a_cpu(option):
    with pytest.raises(ConfigError, match="needs GPUs"):
        run_command(["profile", "configs/quickstart.toml", "--cluster.device=cpu", option])


def test_memory_is_recorded_for_one_update_only(tmp_path, monkeypatch):
    """Calls must fit torch's signatures, as no GPU runs them here."""
    calls = []

    def write_down(name: str) -> None:
        taken = inspect.signature(getattr(torch.cuda.memory, name))

        def note(*args, **kwargs) -> None:
            calls.append((name, taken.bind(*args, **kwargs).arguments))

        monkeypatch.setattr(torch.cuda.memory, name, note)

    write_down("_record_memory_history")
    write_down("_dump_snapshot")
    with memory_history(tmp_path / "new" / "rank-0.pickle"):
        calls.append(("update", {}))
    with pytest.raises(RuntimeError), memory_history(tmp_path / "rank-0.pickle"):
        raise RuntimeError("out of memory")
    names = [name for name, _ in calls]
    record = "_record_memory_history"
    assert names == [record, "update", "_dump_snapshot", record, record, record]
    assert calls[2][1] == {"filename": str(tmp_path / "new" / "rank-0.pickle")}
    assert calls[3][1] == calls[-1][1] == {"enabled": None}
    assert (tmp_path / "new").is_dir()


def test_gpu_is_compared_with_its_own_data_sheet():
    """A PCIe H100 has three quarters of the SXM card's FLOP/s, so it must not match."""
    assert card_of("NVIDIA H100 80GB HBM3").flops == 989e12
    assert card_of("NVIDIA H100 PCIe") is None
    roofline = Roofline(tflops=700.0, gb_per_s=4000.0, sheet_tflops=989.0, sheet_gb_per_s=4800.0)
    assert "700.00 of the data sheet's 989 TFLOP/s" in format_profile([], roofline)


def test_bytes_are_counted_and_views_move_none():
    a, b = torch.randn(64, 32), torch.randn(64, 32, dtype=torch.float64)
    with bytes_moved() as moved:
        a.t()
        a.view(-1)
        torch.empty(1000)
        a.add(a)
        b.mul_(2.0)
        a.copy_(b)
        a.zero_()
        a.to(torch.bfloat16)
        b.index_select(0, torch.tensor([3, 5]))
    assert moved["aten::add"] == 3 * 64 * 32 * 4
    assert moved["aten::mul_"] == 2 * 64 * 32 * 8
    assert moved["aten::copy_"] == 64 * 32 * (4 + 8)
    assert moved["aten::zero_"] == 64 * 32 * 4
    assert moved["aten::_to_copy"] == 64 * 32 * (4 + 2)
    assert moved["aten::index_select"] == 2 * (2 * 32 * 8) + 2 * 8
    assert not {"aten::t", "aten::view", "aten::empty"} & set(moved)


def test_copy_is_compared_with_the_memory_roofline():
    a, b = torch.randn(1 << 20), torch.empty(1 << 20)
    with bytes_moved() as moved:
        b.copy_(a)
    with torch.profiler.profile(with_flops=True) as profile:
        b.copy_(a)
    rows = profile_table(profile, Roofline(tflops=1.0, gb_per_s=10.0), moved)
    copy = next(row for row in rows if row.name == "aten::copy_")
    assert copy.gb_per_s == pytest.approx((8 << 20) / copy.total_ms * 1e-6)
    assert copy.roofline_share == pytest.approx(copy.gb_per_s / 10.0)
