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
    "time/group_p50_s",
    "time/group_p95_s",
    "time/group_max_s",
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
    "response_length/p50",
    "response_length/p95",
    "response_length/max",
    "response_length/truncated_fraction",
    "groups/sampled",
    "groups/kept",
    "groups/all_correct",
    "groups/all_wrong",
    "groups/from_reserve",
    "groups/to_reserve",
    "groups/dropped",
    "groups/stopped",
    "groups/carried",
    "groups/resting",
    "groups/from_journal",
    "tokens/generated",
    "tokens/stopped",
    "tokens/trained",
    "tools/calls_per_response",
    "tools/token_share",
    "tools/branches_per_group",
    "tools/entropy_rise",
    "rollout/engine_busy_share",
    "rollout/slot_use",
    "rollout/preemptions",
    "rollout/kv_use_max",
    "rollout/tokens_per_s_min",
    "rollout/tokens_per_s_max",
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
    "policy/dual_clip_fraction",
    "policy/token_probability_mean",
    "policy/positive_gradient_share",
    "policy/grad_norm",
    "policy/lr",
    "policy/skipped_updates",
    "parity/logprob_abs_mean",
    "parity/logprob_abs_max",
    "parity/batch_shape_abs_mean",
    "parity/batch_shape_abs_max",
    "parity/engine_abs_mean",
    "parity/engine_abs_max",
    "staleness/token_share",
    "staleness/mean",
    "staleness/max",
    "staleness/logprob_drift_mean",
    "staleness/logprob_drift_max",
    "staleness/weight_truncated_share",
    "staleness/weight_masked_share",
    "bapo/clip_low",
    "bapo/clip_high",
    "bapo/share_before",
    "bapo/share",
    "bapo/share_min",
    "kl/mean",
    "kl/max",
    "kl/coef",
    "pretraining/loss",
    "pretraining/tokens",
    "reflection/response_share",
    "critic/loss",
    "critic/explained_variance",
    "critic/value_mean",
    "critic/return_mean",
    "critic/clip_fraction",
    "critic/grad_norm",
    "critic/lr",
    "critic/skipped_updates",
    "experts/balance_loss",
    "experts/max_load",
    "weights/bytes",
    "weights/density",
    "weights/update_s",
    "weights/pause_s",
    "memory/driver_mib",
    "memory/rank_min_mib",
    "memory/rank_max_mib",
    "memory/engine_min_mib",
    "memory/engine_max_mib",
    "eval/accuracy",
    "eval/policy_version",
)
"""Every name of a step's record, in the order it is written; a value is null where not measured.
Names that the configuration gives (`OWN_AREAS`) follow them.

time/step_s is time/rollout_s + time/train_s + time/sync_s. time/evaluate_s and time/checkpoint_s
are not part of it: they are the seconds spent on those since the record before, or since the
process started. So a checkpoint, which is written after the record of its step, is in the next
one's. Of an evaluation it is what the run waited for: nothing of what passes beside training.

eval/accuracy is in the record of the step in which it became known, and eval/policy_version says
which weights it is of: the step's own where evaluation.placement is "alone", and after the last
step; with "interleaved" those that the step sampled with, with "engine" those or earlier ones.
Where several became known it is the newest. evaluations.jsonl has each evaluation under the step
that trained its weights, with its standard error. What engines did (time/engine_*, rollout/*)
includes the share of an evaluation beside the rollouts.

time/group_* is from a group's submission to its last token. time/engine_* is how long an engine was
busy in the step and rollout/engine_tokens_* what it generated; rollout/engine_busy_share is the
share of the engines' time in which they had anything to do, rollout/slot_use that of
rollout.max_num_seqs that was running on average.

groups/sampled are those that came back and count in the step, and everything said of responses is
said of theirs. groups/stopped were ended unfinished, groups/dropped had a signal and were not used,
tokens/stopped were generated for nothing: with sampling.max_staleness = 0 these three depend on the
engines' speed, as times do, and nothing else does. groups/carried go on in the next step.
groups/resting were left out, see sampling.rest_after. groups/from_journal had come back to a
process that ended before the step did, and were not generated again; all else counts them as if
they had been. train/rank_tokens_* is what a trainer rank had to compute, prompts included, and
time/rank_logprobs_* how long it took for the old log-probs of that, a pass in which no
data-parallel rank waits for another but for those that share experts. reward/* is over all
responses generated, as accuracy/mean is; reward/shaped_mean is reward/mean +
reward/overlong_penalty_mean.
Where reward.functions has more than the rule, reward/NAME is the mean score of a function, without
its weight, reward/NAME/PART the mean of a part, and reward/NAME/failed the share of responses that
it failed on; where it scores steps, reward/NAME/steps is the mean number of them in a response and
reward/NAME/step_mean that of a response's mean score. Those a step has none of are not in its
record.

tokens/generated is what engines sampled: what a tool put out is in no tokens/*, and what responses
share that branch is counted once, but tokens/trained has it once for each. tools/calls_per_response
is how often a tool was called, tools/token_share what it put out of all response tokens,
tools/branches_per_group how many responses began in the middle of another one, and
tools/entropy_rise the mean normalised entropy behind a call less that of the response's start; null
without `[rollout.tools]`, or without `[sampling.branching]`.

parity/* is |trainer - engine| log-prob before the step's first update on fresh tokens, which the
present weights sampled, and staleness/logprob_drift_* the same on stale ones, which earlier weights
sampled. A few sequences are scored a second time, in a smaller micro-batch:
parity/batch_shape_* is how far the trainer's own two log-probs of a token are apart, and
parity/engine_* how far the engine's is outside of what lies between them, so that a token's gap is
at most the sum of both. staleness/token_share, mean and max are over all tokens with a loss weight,
in publications since sampling. staleness/weight_*_share is of the tokens with an importance weight
(`[algorithm.importance]`), null where none has one.

policy/dual_clip_fraction is the share of tokens whose term algorithm.objective.dual_clip bounded, 0
without it.

policy/positive_gradient_share is what tokens with a positive advantage have of the sum of |loss
weight x derivative of the policy term in the log-prob|, behind the clip: 0.5 is a balance, and
negative tokens that drown the others lead to a low one.

reflection/response_share is the share of the responses trained on that have any of
observe.reflection_phrases, and reflection/NAME the share that have that phrase, with _ between its
words.

bapo/* is null unless algorithm.objective.gate is "bapo". clip_low and clip_high are the bounds of
the ratio itself, share_before and share the positive tokens' share where the search of an update
began and where it ended, as means over the step's updates; share_min is the smallest share.

critic/* is null unless algorithm.advantage is "gae". Values and returns are those before the step's
first update; critic/explained_variance is 1 - Var(return - value) / Var(return). In the steps of
critic.warmup policy/lr is 0, and everything else of policy/* is of updates that were not applied.

experts/* is null for a model without experts; both are of the step's tokens, prompts included, in
the pass that gave the old log-probs. experts/balance_loss is the loss of
trainer.router_aux_loss_coef without that coefficient, mean over the layers: 1 where all experts get
as much. experts/max_load is the most tokens of one expert against the mean of its layer.

kl/* is null unless algorithm.objective.kl_coef is above 0: the estimates of the KL divergence to
the reference (algorithm.objective.kl_value) before the step's first update, over all tokens with a
loss weight, as mean and as the largest absolute value. While policy and reference are the same
weights, as in the first step of a run, both are exactly 0. kl/coef is the weight that the step gave
it, which algorithm.kl_control moves after each step.

pretraining/* is null unless algorithm.pretraining.data is set: the mean loss of the step's texts in
nats a token, without its coefficient, and how many tokens of text were predicted. policy/loss does
not have it, policy/grad_norm is of both.

weights/bytes is what trainer ranks gave to engines in the step's update, and weights/density the
share of the elements that changed since the update before; null where that was not looked at, as
all weights were sent (weights.mode, weights.full_every). weights/update_s is the whole update,
within time/sync_s, and weights/pause_s the part of it in which engines had neither old nor new
weights.

memory/* is main memory that no other process has, in MiB: of the driver, of a trainer rank after
the step's updates, and of an engine with all of its processes at the end of the rollout. Where it
grows step after step, something is kept.

Where saved rollouts are trained on again, what needs engines is null (tokens/generated,
tokens_per_s, time/sync_s, time/reward_s, *engine*, weights/*, eval/*), what is said of the groups
is of those saved, and parity/* is against the saved log-probs.
"""

OWN_AREAS = ("reward/", "reflection/")
"""Begin the names that the configuration and its reward functions give."""
