"""Made-up results of an update."""

from megadapo.observe.metrics.names import METRIC_NAMES
from megadapo.trainer.types import Metrics, UpdateResult

AREAS = ("policy/", "parity/", "staleness/", "bapo/", "kl/", "pretraining/", "critic/", "experts/")
"""Prefixes of the metrics that the trainer measures, beside tokens/trained."""

UPDATE = UpdateResult(
    metrics={
        **{name: 0.25 for name in METRIC_NAMES if name.startswith(AREAS)},
        "tokens/trained": 400,
        "policy/skipped_updates": 0,
        "parity/logprob_abs_max": None,
    },
    num_dropped_tokens=0,
    rank_tokens=(210, 190),
    rank_seconds=(0.5, 0.75),
    rank_bytes=(7 << 20, 9 << 20),
)


def area(metrics: Metrics, name: str) -> Metrics:
    """Metrics with the prefix, without it."""
    return {key[len(name) + 1 :]: metrics[key] for key in metrics if key.startswith(f"{name}/")}
