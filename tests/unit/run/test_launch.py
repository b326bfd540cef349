"""Progress of a run counts every process that works for it."""

from types import SimpleNamespace

import pytest

from megadapo.run.launch import _progress


@pytest.mark.parametrize(
    ("pools", "tokens"),
    [((), 0), ((50, None), 50), ((50, 7), 57)],
    ids=["replay", "all", "reserved"],
)
def test_tokens_of_the_reserved_engine_are_progress(pools, tokens):
    """A run that waits for its evaluation alone would look stalled."""
    reports = []
    trainer = SimpleNamespace(num_micro_batches=3)
    engines = [pool and SimpleNamespace(num_tokens=pool) for pool in pools]
    _progress(lambda *counts: reports.append(counts), trainer, *engines)()
    assert reports == [(3, tokens)]
