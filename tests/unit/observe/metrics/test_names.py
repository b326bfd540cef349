"""Every metric has a meaning, and the page of metrics is current."""

from __future__ import annotations

from megadapo.cli import main
from megadapo.observe.metrics.names import METRICS, metrics_page
from tests.support import REPOSITORY


def test_every_metric_has_a_sentence():
    assert all(meaning.endswith(".") for meaning in METRICS.values())


def test_page_is_current(capsys):
    """megadapo config --metrics > docs/metrics.md"""
    assert (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8") == metrics_page()
    assert main(["config", "--metrics"]) == 0
    assert capsys.readouterr().out == metrics_page()
