"""Panels of what a run learns, and of the objective, its critic and its optimizer."""

from __future__ import annotations

from megadapo.observe.metrics.reflection import ANY_PHRASE, AREA
from megadapo.observe.panels.panel import Panel, Section

TRAINING: tuple[Section, ...] = (
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
                "Written by tools and environments",
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
)
"""Headings and their panels, in reading order."""
