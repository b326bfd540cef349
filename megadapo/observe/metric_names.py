"""The names of a step's metrics, in the field's terms: what dashboards are built on."""

from __future__ import annotations

METRIC_NAMES = (
    "step",
    "policy_version",
    "time/step_s",
    "time/rollout_s",
    "time/train_s",
    "time/sync_s",
    "time/reward_s",
    "time/evaluate_s",
    "time/checkpoint_s",
    "time/engine_min_s",
    "time/engine_max_s",
    "time/rank_logprobs_min_s",
    "time/rank_logprobs_max_s",
    "tokens_per_s",
    "reward/mean",
    "reward/overlong_penalty_mean",
    "reward/shaped_mean",
    "accuracy/mean",
    "response_length/mean",
    "response_length/p95",
    "response_length/truncated_fraction",
    "groups/sampled",
    "groups/kept",
    "groups/all_correct",
    "groups/all_wrong",
    "groups/from_reserve",
    "groups/to_reserve",
    "tokens/generated",
    "tokens/trained",
    "rollout/engine_tokens_min",
    "rollout/engine_tokens_max",
    "train/rank_tokens_min",
    "train/rank_tokens_max",
    "policy/loss",
    "policy/entropy",
    "policy/ratio_mean",
    "policy/ratio_first_max_error",
    "policy/clip_low_fraction",
    "policy/clip_high_fraction",
    "policy/token_probability_mean",
    "policy/grad_norm",
    "policy/lr",
    "policy/skipped_updates",
    "parity/logprob_abs_mean",
    "parity/logprob_abs_max",
    "eval/accuracy",
)
"""Every name of a step's record, in the order it is written; a value is null where not measured.

time/step_s is time/rollout_s + time/train_s + time/sync_s. time/evaluate_s and time/checkpoint_s
are not part of it: they are the seconds spent on those since the record before, or since the
process started. So an evaluation is in its own step's record, and a checkpoint, which is written
after the record of its step, in the next one's.

time/engine_* is how long an engine was busy with the step's groups and rollout/engine_tokens_*
what it generated, over the engines that were given any. train/rank_tokens_* is what a trainer rank
had to compute, prompts included, and time/rank_logprobs_* how long it took for the old log-probs of
that, a pass in which no data-parallel rank waits for another. reward/* is over all responses
generated, as accuracy/mean is; reward/shaped_mean is reward/mean + reward/overlong_penalty_mean.

Where saved rollouts are trained on again, what needs engines is null (tokens/generated,
tokens_per_s, time/sync_s, time/reward_s, *engine*, eval/accuracy), what is said of the groups is of
those saved, and parity/* is against the saved log-probs.
"""
