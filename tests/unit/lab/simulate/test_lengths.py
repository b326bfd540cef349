"""Would catch: a distribution that is not the one asked for, or a bad file read as lengths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megadapo.errors import ConfigError, DataError
from megadapo.lab.simulate.lengths import EmpiricalLengths, LogNormalLengths, read_lengths

SCORES = np.random.default_rng(3).standard_normal(200_000)


def test_a_log_normal_has_its_mean_and_its_quantile() -> None:
    lengths = LogNormalLengths.of(4800.0, 12000.0).at(SCORES)
    assert lengths.mean() == pytest.approx(4800, rel=0.01)
    assert (lengths < 12000).mean() == pytest.approx(0.95, abs=0.002)
    assert LogNormalLengths.of(1.5, 2.0).at(SCORES).min() >= 1


@pytest.mark.parametrize(("mean", "quantile"), [(100, 100), (100, 90), (100, 400), (0, 5)])
def test_an_impossible_pair_is_refused(mean: float, quantile: float) -> None:
    with pytest.raises(ConfigError, match="log-normal"):
        LogNormalLengths.of(mean, quantile)


def test_measured_lengths_come_back_in_their_shares(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("10\n20 20\n70\n")
    lengths = read_lengths(file).at(SCORES)
    assert {int(n) for n in lengths} == {10, 20, 70}
    assert (lengths == 20).mean() == pytest.approx(0.5, abs=0.01)
    assert EmpiricalLengths([5]).at(np.array([-9.0, 0.0, 9.0])).tolist() == [5, 5, 5]


@pytest.mark.parametrize("text", ["", "12\nx", "3.5", "0\n4", "-1"])
def test_a_bad_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    with pytest.raises(DataError, match=r"lengths\.txt"):
        read_lengths(file)
    with pytest.raises(DataError, match="missing"):
        read_lengths(tmp_path / "missing")
    with pytest.raises(DataError, match="not the folder of a run"):
        read_lengths(tmp_path)
