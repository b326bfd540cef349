"""Made-up results of an update."""

from megadapo.observe.metrics.names import METRIC_NAMES
from megadapo.trainer.types import Metrics, UpdateResult

AREAS = (
    *("policy/", "entropy/", "parity/", "staleness/", "bapo/", "kl/", "pretraining/", "critic/"),
    "experts/",
)
"""Prefixes of the metrics that the trainer measures, beside tokens/trained."""

UPDATE = UpdateResult(
    metrics={
        **{name: 0.25 for name in METRIC_NAMES if name.startswith(AREAS)},
        "tokens/trained": 400,
        "policy/skipped_updates": 0,
        "parity/logprob_abs_max": None,
    },
    num_dropped_tokens=0,
    of_ranks={
        "train/rank_tokens_{}": (210, 190),
        "time/rank_logprobs_{}_s": (0.5, 0.75),
        "memory/rank_{}_mib": (7, 9),
    },
)


def area(metrics: Metrics, name: str) -> Metrics:
    """Metrics with the prefix, without it."""
    return {key[len(name) + 1 :]: metrics[key] for key in metrics if key.startswith(f"{name}/")}


FIRST_KL: Metrics = {"mean": 0.0, "max": 0.0, "from_old": None, "old_coef": None}
"""Metrics kl/* but the coefficient, where the policy is the reference and has no penalty."""
