"""The kernel reports: a profile's sums, and a command that needs no GPU."""

from __future__ import annotations

import argparse

import pytest
import torch

from megadapo.errors import ConfigError
from megadapo.observe import kernel_profile
from megadapo.observe.kernel_report import (
    Roofline,
    format_profile,
    measure_roofline,
    profile_table,
)


def test_profile_knows_the_products_rate() -> None:
    """A product of 2 x 256^3 flops must appear with its calls and a rate below the roofline."""
    a = torch.randn(256, 256)
    with torch.profiler.profile(with_flops=True) as profile:
        for _ in range(4):
            a @ a
    roofline = Roofline(tflops=1e6, gb_per_s=1.0)
    rows = {row.name: row for row in profile_table(profile, roofline)}
    product = rows["aten::mm"]
    assert product.calls == 4
    flops = product.tflops * 1e12 * product.total_ms * 1e-3
    assert flops == pytest.approx(4 * 2 * 256**3, rel=1e-6)
    assert product.roofline_share == pytest.approx(product.tflops / 1e6)
    assert sum(row.share for row in rows.values()) == pytest.approx(1.0)
    assert "aten::mm" in format_profile(list(rows.values()), roofline)


def test_roofline_is_measured() -> None:
    roofline = measure_roofline(torch.device("cpu"), torch.float32, size=128, repeats=1)
    assert roofline.tflops > 0 and roofline.gb_per_s > 0


def test_head_profile_prints_products_and_row_passes(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    kernel_profile.add_arguments(parser)
    options = ["--head=512,64,4096,float32", "--device=cpu", "--steps=1"]
    assert kernel_profile.main(parser.parse_args(options)) == 0
    printed = capsys.readouterr().out
    assert "aten::mm" in printed and "aten::_softmax" in printed and "roofline" in printed


def test_missing_cuda_is_a_message() -> None:
    if torch.cuda.is_available():
        return
    parser = argparse.ArgumentParser()
    kernel_profile.add_arguments(parser)
    with pytest.raises(ConfigError, match="no CUDA device"):
        kernel_profile.main(parser.parse_args(["--head=16,8,104,float32", "--device=cuda"]))
