"""The comparison as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megadapo.lab.record import write_record
from megadapo.lab.whatif.alternatives import Alternative
from megadapo.lab.whatif.compare import WhatIfComparison
from megadapo.lab.whatif.types import Measured
from megadapo.observe.metrics.records import plain_numbers
from megadapo.observe.tables import TextTable

HEAD = (
    *("objective", "loss", "|gradient|", "cosine", "clipped low", "clipped high"),
    *("eff. samples", "tokens", "moved"),
)


def comparison_table(comparison: WhatIfComparison, alternatives: Sequence[Alternative]) -> str:
    """Return one row per objective, and the notes."""
    pairs = zip(alternatives, comparison.measured, strict=True)
    rows = [[one.name, *_cells(measured)] for one, measured in pairs]
    table = TextTable(title=comparison.title, head=HEAD, rows=rows)
    entropy = comparison.measured[0].entropy
    notes = [] if entropy is None else [f"Entropy: {entropy:.4f} nats per token."]
    return "\n".join([table.text(), "", *comparison.notes, *notes])


def write_json(
    path: Path,
    run_folder: Path,
    step: int,
    alternatives: Sequence[Alternative],
    comparisons: Sequence[WhatIfComparison],
) -> None:
    """Write all numbers."""
    write_record(
        path,
        {
            "run": str(run_folder),
            "step": step,
            "comparisons": [
                {
                    "title": comparison.title,
                    "notes": list(comparison.notes),
                    "objectives": [
                        plain_numbers({"name": one.name, **asdict(measured)})
                        for one, measured in zip(alternatives, comparison.measured, strict=True)
                    ],
                }
                for comparison in comparisons
            ],
        },
    )


def _cells(measured: Measured) -> list[str]:
    return [
        f"{measured.loss:.6g}",
        f"{measured.grad_norm:.6g}",
        _text(measured.cosine, ".6f"),
        _text(measured.clip_low, ".3%"),
        _text(measured.clip_high, ".3%"),
        _text(measured.effective_samples, ".2%"),
        str(measured.num_tokens),
        str(measured.num_moved),
    ]


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
