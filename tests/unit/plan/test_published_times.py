"""Forecasts of published steps and rollouts: the table of docs/clusters.md and its errors."""

import importlib.util
import sys

import numpy as np
import pytest

from tests.support import REPOSITORY

SCRIPT = REPOSITORY / "benchmarks" / "published_times.py"


@pytest.fixture(scope="module")
def published():
    spec = importlib.util.spec_from_file_location("published_times", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(published):
    return published.read_rows()


def test_at_most_half_of_the_rows_are_in_the_fit(rows):
    in_fit = [row["is_fitted"] for row in rows]
    assert in_fit == [place % 2 == 0 for place in range(len(rows))] and len(rows) >= 8
    assert all(row["address"].startswith("https://") and row["given"] for row in rows)


def test_errors_of_published_times(published, rows):
    """Rows outside the fit: a median error of at most 25 %, and none above 50 %."""
    others = np.abs(published.errors([row for row in rows if not row["is_fitted"]]))
    assert np.median(others) <= 0.25 and others.max() <= 0.50
    # in the fit one row is worse: a run on half of its GPUs
    fitted = np.abs(published.errors([row for row in rows if row["is_fitted"]]))
    assert np.median(fitted) <= 0.25 and np.sum(fitted > 0.5) <= 1


def test_page_has_the_table(published, rows):
    page = (REPOSITORY / "docs" / "notes" / "published-times.md").read_text(encoding="utf-8")
    assert published.table(rows) in page and published.summary(rows) in page
