"""Panels of sampling, speed, exactness and balance."""

from __future__ import annotations

from megadapo.observe.panels.panel import Panel, Section

RUNNING: tuple[Section, ...] = (
    (
        "Sampling",
        (
            Panel(
                "Groups without signal",
                "share of groups",
                {
                    "groups/all_correct_share": "all correct",
                    "groups/all_wrong_share": "all incorrect",
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
