"""Panels of curves under their headings, declared once for plot.png and report.html."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from megadapo.observe.metrics.names import METRICS
from megadapo.observe.metrics.reflection import ANY_PHRASE, AREA

HELD_OUT = "eval/accuracy"
"""Name that stands for held-out evaluations among measured metrics."""


@dataclass(frozen=True)
class Panel:
    """Metrics that share two axes."""

    title: str
    unit: str
    lines: Mapping[str, str]
    """Label of each metric, in the order that they are drawn."""
    rest_of: str = field(default="", kw_only=True)
    """Pattern of metrics that users name, such as the parts of a reward; all are lines, whose
    labels are the pattern's group."""
    band: tuple[str, ...] = field(default=(), kw_only=True)
    """Two metrics with a filled area between them, the higher one first; a label may follow."""
    log: bool = field(default=False, kw_only=True)
    """Whether the vertical axis is logarithmic."""
    held_out: bool = field(default=False, kw_only=True)
    """Whether held-out evaluations are drawn too."""
    bound: str = field(default="", kw_only=True)
    """Key of the oracle whose bound the report draws."""
    against: str = field(default="", kw_only=True)
    """Metric of the horizontal axis; empty for the step."""
    in_plot: bool = field(default=False, kw_only=True)
    """Whether plot.png has the panel; the report has every panel."""

    def with_values(self, names: Collection[str]) -> Panel | None:
        """Return the panel with only the lines that have values; None without any.

        Args:
            names: the metrics that have values; `HELD_OUT` if there are evaluations.
        """
        lines = {name: label for name, label in self.lines.items() if name in names}
        if self.rest_of:
            found = (re.fullmatch(self.rest_of, name) for name in names if name not in METRICS)
            lines |= {match[0]: match[1].replace("_", " ") for match in found if match}
        is_empty = not lines or (self.against and self.against not in names)
        if is_empty and not (self.held_out and HELD_OUT in names):
            return None
        return replace(self, lines=lines)


Section: TypeAlias = tuple[str, tuple[Panel, ...]]
"""A heading and its panels."""


SECTIONS: tuple[Section, ...] = (
    (
        "Learning",
        (
            Panel(
                "Accuracy",
                "share of responses",
                {"accuracy/mean": "training"},
                held_out=True,
                in_plot=True,
            ),
            Panel(
                "Several held-out samples",
                "share of problems",
                {"eval/pass_at_k": "pass@k", "eval/cons_at_k": "cons@k"},
            ),
            Panel("Held-out sets", "", {}, rest_of=r"held_out/(.+)"),
            Panel(
                "Ordered pairs",
                "share of pairs",
                {"pairs/accuracy": "training", "eval/pair_accuracy": "held out"},
                in_plot=True,
            ),
            Panel("Margin of pairs", "mean of scores", {"pairs/margin": "margin"}),
            Panel(
                "Reward",
                "mean of a response",
                {
                    "reward/mean": "unshaped",
                    "reward/shaped_mean": "shaped",
                    "reward/overlong_penalty_mean": "overlong penalty",
                    "eval/score": "held out",
                },
                in_plot=True,
            ),
            Panel("Parts of the reward", "mean", {}, rest_of=r"reward/(.+)"),
            Panel(
                "Left without reward",
                "a step",
                {"reward/excluded": "responses", "groups/unscored": "groups"},
            ),
            Panel(
                "Response length",
                "tokens",
                {
                    "response_length/mean": "mean",
                    "response_length/p50": "median",
                    "response_length/p95": "95th percentile",
                    "response_length/max": "longest",
                },
                band=("response_length/p95", "response_length/p50"),
                in_plot=True,
            ),
            Panel(
                "Truncated",
                "share of responses",
                {"response_length/truncated_fraction": "truncated"},
            ),
        ),
    ),
    (
        "Policy",
        (
            Panel("Entropy", "nats a token", {"policy/entropy": "entropy"}, in_plot=True),
            Panel(
                "Token probability",
                "mean",
                {
                    "policy/token_probability_mean": "all tokens",
                    "policy/clip_high_probability": "clipped above",
                },
                in_plot=True,
            ),
            Panel(
                "Positive tokens",
                "share of the gradient",
                {"policy/positive_gradient_share": "share"},
                in_plot=True,
            ),
            Panel(
                "Clipped",
                "share of tokens",
                {
                    "policy/clip_high_fraction": "high",
                    "policy/clip_low_fraction": "low",
                },
                in_plot=True,
            ),
            Panel(
                "Bounded by the dual clip",
                "share of tokens",
                {"policy/dual_clip_fraction": "bounded"},
            ),
            Panel("Ratio", "mean", {"policy/ratio_mean": "ratio"}),
            Panel(
                "KL of old to new policy",
                "nats a token",
                {"policy/approx_kl": "divergence"},
                in_plot=True,
            ),
            Panel(
                "Left out by max_kl",
                "updates a step",
                {"policy/left_out_updates": "updates"},
                in_plot=True,
            ),
        ),
    ),
    (
        "KL to the reference policy",
        (
            Panel("KL to the reference", "nats a token", {"kl/mean": "mean"}, in_plot=True),
            Panel("Largest KL", "nats, one token", {"kl/max": "largest"}),
            Panel("Coefficient of the KL", "", {"kl/coef": "coefficient"}, in_plot=True),
        ),
    ),
    (
        "BAPO",
        (
            Panel(
                "BAPO's bounds",
                "ratio",
                {"bapo/clip_high": "upper", "bapo/clip_low": "lower"},
                in_plot=True,
            ),
            Panel(
                "BAPO's positive tokens",
                "share",
                {
                    "bapo/share": "after the search",
                    "bapo/share_before": "before the search",
                    "bapo/share_min": "smallest",
                },
                in_plot=True,
            ),
        ),
    ),
    (
        "Critic",
        (
            Panel(
                "Explained variance",
                "of the returns",
                {"critic/explained_variance": "explained"},
                in_plot=True,
            ),
            Panel("Critic's loss", "", {"critic/loss": "loss"}, in_plot=True),
            Panel(
                "Values and returns",
                "mean",
                {"critic/value_mean": "value", "critic/return_mean": "return"},
                in_plot=True,
            ),
            Panel("Clipped values", "share of tokens", {"critic/clip_fraction": "clipped"}),
            Panel("Critic's gradient norm", "before clipping", {"critic/grad_norm": "norm"}),
            Panel("Critic's learning rate", "", {"critic/lr": "rate"}),
            Panel("Critic's skipped updates", "a step", {"critic/skipped_updates": "skipped"}),
        ),
    ),
    (
        "What to watch",
        (
            Panel(
                "Length",
                "tokens, against training accuracy",
                {"response_length/mean": "length"},
                against="accuracy/mean",
                in_plot=True,
            ),
            Panel(
                "Entropy",
                "nats, against training accuracy",
                {"policy/entropy": "entropy"},
                against="accuracy/mean",
                in_plot=True,
            ),
            Panel(
                "Looking back",
                "share of responses",
                {ANY_PHRASE: "any phrase"},
                rest_of=rf"{AREA}(.+)",
                in_plot=True,
            ),
        ),
    ),
    (
        "Tools and branches",
        (
            Panel("Tool calls", "a response", {"tools/calls_per_response": "calls"}, in_plot=True),
            Panel(
                "From environments",
                "share of response tokens",
                {"tools/token_share": "share"},
                in_plot=True,
            ),
            Panel(
                "Branches",
                "responses of a group",
                {"tools/branches_per_group": "branches"},
                in_plot=True,
            ),
            Panel(
                "Rise of entropy after a call",
                "normalised",
                {"tools/entropy_rise": "rise"},
                in_plot=True,
            ),
        ),
    ),
    (
        "Environments",
        (
            Panel("Return", "mean of an episode", {}, rest_of=r"environment/(.+)/return"),
            Panel("Turns", "of an episode", {}, rest_of=r"environment/(.+)/turns"),
            Panel(
                "Time",
                "seconds of an episode",
                {},
                rest_of=r"environment/(.+)/seconds",
            ),
            Panel(
                "Failures",
                "share of responses",
                {},
                rest_of=r"environment/(.+)/failed",
            ),
            Panel("Causes of failures", "a step", {}, rest_of=r"environment/(.+/failures/[^/]+)"),
            Panel(
                "Counts",
                "mean of an episode",
                {},
                rest_of=r"environment/(.+/(?<!/failures/)(?!(?:return|turns|seconds|failed)$)[^/]+)",
            ),
        ),
    ),
    (
        "Optimizer",
        (
            Panel("Loss", "", {"policy/loss": "training", "eval/loss": "held out"}, in_plot=True),
            Panel("Gradient norm", "before clipping", {"policy/grad_norm": "norm"}),
            Panel("Learning rate", "", {"policy/lr": "rate"}),
            Panel("Skipped updates", "a step", {"policy/skipped_updates": "skipped"}),
        ),
    ),
    (
        "Pretraining and experts",
        (
            Panel("Pretraining loss", "nats a token", {"pretraining/loss": "loss"}, in_plot=True),
            Panel("Pretraining tokens", "a step", {"pretraining/tokens": "predicted"}),
            Panel(
                "Balance loss of experts",
                "1 is even",
                {"experts/balance_loss": "loss"},
                in_plot=True,
            ),
            Panel(
                "Largest expert load",
                "1 is even",
                {"experts/max_load": "load"},
                in_plot=True,
            ),
        ),
    ),
    (
        "Sampling",
        (
            Panel(
                "Groups without signal",
                "share of groups",
                {
                    "groups/all_correct_share": "all correct",
                    "groups/all_wrong_share": "all incorrect",
                    "groups/equal_share": "equal rewards",
                },
                in_plot=True,
            ),
            Panel(
                "Groups",
                "a step",
                {
                    "groups/sampled": "sampled",
                    "groups/kept": "kept",
                    "groups/all_correct": "all correct",
                    "groups/all_wrong": "all incorrect",
                    "groups/equal": "equal rewards",
                    "groups/one_text_wrong": "one incorrect text",
                    "groups/rejected_unequal": "not mixed, unequal rewards",
                },
            ),
            Panel(
                "Reserve",
                "groups a step",
                {"groups/from_reserve": "taken from", "groups/to_reserve": "put in"},
            ),
            Panel(
                "Tokens",
                "a step",
                {
                    "tokens/generated": "generated",
                    "tokens/trained": "trained on",
                    "tokens/stopped": "of stopped responses",
                    "tokens/recomputed": "read again",
                },
                band=("tokens/generated", "tokens/trained", "not trained on"),
                in_plot=True,
            ),
            Panel(
                "Groups not used",
                "a step",
                {"groups/stopped": "stopped", "groups/dropped": "dropped"},
            ),
            Panel(
                "Groups left for later",
                "a step",
                {
                    "groups/carried": "carried on",
                    "groups/overdue": "waited for, too old for a later step",
                },
            ),
            Panel("Groups from the journal", "a step", {"groups/from_journal": "read"}),
        ),
    ),
    (
        "Long tail",
        (
            Panel(
                "Time of a group",
                "seconds",
                {
                    "time/group_p50_s": "median",
                    "time/group_p95_s": "95th percentile",
                    "time/group_max_s": "slowest",
                },
                band=("time/group_p95_s", "time/group_p50_s"),
                in_plot=True,
            ),
            Panel(
                "Use of the engines",
                "share",
                {
                    "rollout/engine_busy_share": "of their time",
                    "rollout/slot_use": "of their places",
                },
                in_plot=True,
            ),
            Panel(
                "Speed of an engine",
                "tokens/s",
                {"rollout/tokens_per_s_max": "fastest", "rollout/tokens_per_s_min": "slowest"},
            ),
            Panel("Key-value cache", "largest share in use", {"rollout/kv_use_max": "in use"}),
            Panel("Preemptions", "responses put back", {"rollout/preemptions": "put back"}),
            Panel("Engines lost", "at the end of the rollout", {"rollout/engines_lost": "lost"}),
        ),
    ),
    (
        "Staleness",
        (
            Panel(
                "Stale tokens",
                "share of those trained on",
                {"staleness/token_share": "stale"},
            ),
            Panel("Age", "policy versions", {"staleness/mean": "mean", "staleness/max": "largest"}),
            Panel(
                "Wait for the oldest groups",
                "seconds of a step",
                {"time/overdue_s": "with enough other groups"},
            ),
            Panel(
                "Drift of stale tokens",
                "|log-prob change|, nats",
                {
                    "staleness/logprob_drift_max": "largest",
                    "staleness/logprob_drift_mean": "mean",
                },
                log=True,
            ),
            Panel(
                "Importance weights",
                "share of weighted tokens",
                {
                    "staleness/weight_truncated_share": "truncated",
                    "staleness/weight_masked_share": "masked",
                },
            ),
        ),
    ),
    (
        "Exactness and speed",
        (
            Panel(
                "Parity",
                "|trainer - engine|, nats",
                {"parity/logprob_abs_max": "largest", "parity/logprob_abs_mean": "mean"},
                log=True,
                bound="logprob_abs_max",
                in_plot=True,
            ),
            Panel(
                "Parity on stale tokens",
                "|trainer - engine|, nats",
                {"parity/probe_abs_max": "largest", "parity/probe_abs_mean": "mean"},
                log=True,
                bound="logprob_abs_max",
            ),
            Panel(
                "First ratio",
                "largest |ratio - 1|",
                {"policy/ratio_first_max_error": "error"},
                bound="ratio_first_max_error",
            ),
            Panel("Speed", "tokens/s", {"tokens_per_s": "generated"}),
        ),
    ),
    (
        "Weight updates",
        (
            Panel("Sent to engines", "bytes", {"weights/bytes": "bytes"}),
            Panel("Changed weights", "share of elements", {"weights/density": "changed"}),
            Panel(
                "Time of the update",
                "seconds",
                {"weights/update_s": "whole update", "weights/pause_s": "no engine generates"},
            ),
        ),
    ),
    (
        "Balance",
        (
            Panel(
                "Engines",
                "tokens generated",
                {"rollout/engine_tokens_max": "most", "rollout/engine_tokens_min": "least"},
            ),
            Panel(
                "Engines",
                "seconds busy",
                {"time/engine_max_s": "longest", "time/engine_min_s": "shortest"},
            ),
            Panel(
                "Trainer ranks",
                "tokens computed",
                {"train/rank_tokens_max": "most", "train/rank_tokens_min": "least"},
            ),
            Panel(
                "Trainer ranks",
                "seconds, old log-probs",
                {"time/rank_logprobs_max_s": "longest", "time/rank_logprobs_min_s": "shortest"},
            ),
            Panel("Slowest trainer rank", "its number", {"train/slowest_rank": "rank"}),
            Panel(
                "Main memory",
                "MiB",
                {
                    "memory/engine_max_mib": "engine, most",
                    "memory/engine_min_mib": "engine, least",
                    "memory/rank_max_mib": "trainer rank, most",
                    "memory/rank_min_mib": "trainer rank, least",
                    "memory/driver_mib": "driver",
                },
            ),
        ),
    ),
)
"""Headings and their panels, in reading order."""


PHASES = {
    "in_step": {
        "time/rollout_s": "rollout",
        "time/train_s": "train",
        "time/sync_s": "publish weights",
    },
    "between": {
        "time/evaluate_s": "evaluate",
        "time/checkpoint_s": "checkpoint of the step before",
    },
    "beside": {"time/reward_s": "scoring, beside the rollout"},
}
"""Phases that the report draws on top of each other: of a step, between steps, in parallel."""

NOT_CURVES = ("step", "policy_version", HELD_OUT, "eval/policy_version")
"""Names in a record that no panel shows."""


def sections_with_values(names: Collection[str]) -> list[Section]:
    """Return the headings and panels that have values.

    A metric that no panel names, such as one of another version, gets its own panel at the end.

    Args:
        names: the metrics that have values; `HELD_OUT` if there are evaluations.
    """
    found = []
    for heading, panels in SECTIONS:
        shown = tuple(one for panel in panels if (one := panel.with_values(names)) is not None)
        if shown:
            found.append((heading, shown))
    drawn = {name for _, panels in found for panel in panels for name in panel.lines}
    drawn |= {"time/step_s", *NOT_CURVES, *(name for part in PHASES.values() for name in part)}
    others = tuple(Panel(name, "", {name: name}) for name in names if name not in drawn)
    return [*found, ("Other metrics", others)] if others else found
