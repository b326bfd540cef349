"""The metrics of a step: every name with its meaning, in the order a record is written.

`megadapo config --metrics` makes docs/metrics.md of this table.
"""

from __future__ import annotations

import re

METRICS = {
    "step": "Number of the rollout step, counted from 1.",
    "policy_version": "Weight publication that the step ends with.",
    "time/step_s": "Seconds of the step: its rollout, training and weight sync.",
    "time/rollout_s": "Seconds in which the step waited for its batch.",
    "time/train_s": "Seconds of old log-probs, reference, critic and updates.",
    "time/sync_s": "Seconds of the weight update, sleeping and waking of engines included.",
    "time/reward_s": "Seconds that responses waited to be scored.",
    "time/overdue_s": "Seconds that a batch with enough mixed groups waited for groups/overdue.",
    "time/evaluate_s": "Seconds the run waited for evaluations since the previous record.",
    "time/checkpoint_s": "Seconds spent on checkpoints since the previous record, so on the "
    "checkpoint of the previous step.",
    "time/group_p50_s": "Median seconds from a group's submission to its last token.",
    "time/group_p95_s": "95th percentile of the seconds from a group's submission to its "
    "last token.",
    "time/group_max_s": "Most seconds from a group's submission to its last token.",
    "time/engine_min_s": "Busy seconds of the engine that was busy for the shortest time.",
    "time/engine_max_s": "Busy seconds of the engine that was busy for the longest time.",
    "time/rank_logprobs_min_s": "Seconds of the fastest rank for the old log-probs; no "
    "data-parallel rank waits for another in that pass.",
    "time/rank_logprobs_max_s": "Seconds of the slowest rank for the old log-probs; null if the "
    "update computes them.",
    "train/slowest_rank": "Trainer rank, counted from 0, that was slowest for the old log-probs.",
    "tokens_per_s": "tokens/generated per second of the step, so without the tokens of stopped "
    "groups.",
    "reward/mean": "Mean reward of all responses generated, before overlong shaping.",
    "reward/excluded": "Responses left out of their groups because a reward function or an "
    "environment failed on them; no other metric but reward/NAME/failed and "
    "environment/NAME/failed counts them.",
    "reward/overlong_penalty_mean": "Mean soft overlong punishment of the same responses.",
    "reward/shaped_mean": "Sum of reward/mean and reward/overlong_penalty_mean.",
    "accuracy/mean": "Share of correct responses among all generated; null if no reward function "
    "says what is correct.",
    "response_length/mean": "Mean response length in tokens.",
    "response_length/p50": "Median response length.",
    "response_length/p95": "95th percentile of the response length.",
    "response_length/max": "Longest response.",
    "response_length/truncated_fraction": "Share of responses cut at the longest length.",
    "groups/sampled": "Groups completed in this step. All response metrics are over them.",
    "groups/kept": "Groups that the step trained on.",
    "groups/all_correct": "Completed groups with only correct responses.",
    "groups/all_wrong": "Completed groups with only incorrect responses.",
    "groups/equal": "Completed groups whose rewards are equal, where no reward function says what "
    "is correct.",
    "groups/one_text_wrong": "Groups among groups/all_wrong whose responses are all the same text.",
    "groups/rejected_unequal": "Groups left out as all correct or all incorrect, although their "
    "rewards differ by a quarter of the range of the step's rewards, or more.",
    "groups/all_correct_share": "Share of groups/all_correct in groups/sampled.",
    "groups/all_wrong_share": "Share of groups/all_wrong in groups/sampled.",
    "groups/equal_share": "Share of groups/equal in groups/sampled.",
    "groups/from_reserve": "Groups of the batch that an earlier step completed.",
    "groups/to_reserve": "Finished mixed groups that wait for a later step.",
    "groups/dropped": "Mixed groups that were not used. Depends on the engines' speed if "
    "sampling.max_staleness is 0.",
    "groups/unscored": "Groups dropped because reward functions or environments failed on all of "
    "their responses, or on all but one; other prompts took their places.",
    "groups/stopped": "Groups ended before completion. Depends on the engines' speed if "
    "sampling.max_staleness is 0.",
    "groups/carried": "Unfinished groups that continue in the next step.",
    "groups/overdue": "Most groups that a batch with enough mixed groups waited for, because they "
    "would have become older than sampling.max_staleness. Depends on the engines' speed.",
    "groups/from_journal": "Groups read from the journal of a killed process instead of being "
    "generated again.",
    "tokens/generated": "Tokens that engines sampled for the groups of groups/sampled; those of "
    "stopped groups are in tokens/stopped. Tool output is not counted; a prefix that branches "
    "share is counted once.",
    "tokens/stopped": "Tokens of groups that were stopped, or completed too late to count in the "
    "step. Depends on the engines' speed if sampling.max_staleness is 0.",
    "tokens/recomputed": "Tokens that engines read again after a publication had stopped them.",
    "tokens/trained": "Response tokens with a loss weight; a shared prefix counts once per branch.",
    "tools/calls_per_response": "Mean calls of a response: calls of tools, or turns that its "
    "environment answered, except for the last one; null without rollout.environments.",
    "tools/token_share": "Share of response tokens that an environment wrote; the policy sampled "
    "the others.",
    "tools/branches_per_group": "Responses of a group that branch off another one; null without "
    "sampling.branching.",
    "tools/entropy_rise": "Mean normalised entropy after a tool call, minus its value at the "
    "response's start.",
    "rollout/engine_busy_share": "Share of the sampling time in which engines had work. The time "
    "of an update counts if engines sample beside it.",
    "rollout/slot_use": "Mean share of rollout.max_num_seqs in use, over the same time as "
    "rollout/engine_busy_share.",
    "rollout/engines_lost": "Engines that were dead or starting at the end of the rollout.",
    "rollout/preemptions": "Responses that vLLM preempted for lack of key-value cache.",
    "rollout/kv_use_max": "Largest share of the key-value cache in use.",
    "rollout/tokens_per_s_min": "Tokens per second of the slowest engine.",
    "rollout/tokens_per_s_max": "Tokens per second of the fastest engine.",
    "rollout/engine_tokens_min": "Tokens of the engine that generated the fewest.",
    "rollout/engine_tokens_max": "Tokens of the engine that generated the most.",
    "train/rank_tokens_min": "Tokens, prompts included, of the trainer rank with the fewest.",
    "train/rank_tokens_max": "Tokens, prompts included, of the trainer rank with the most.",
    "policy/loss": "Mean loss of the step's updates, without the pretraining loss. In "
    "`megadapo sft` it is minus the mean log-prob of the response tokens, in `megadapo "
    "reward-model` the mean loss of the pairs.",
    "policy/entropy": "Mean token entropy in nats.",
    "policy/ratio_mean": "Mean ratio of new to old token probability.",
    "policy/approx_kl": "Mean of r - 1 - log r, the divergence of the policy in the step's updates "
    "from the old one, in nats per token.",
    "policy/left_out_updates": "Updates left out because policy/approx_kl of one was above "
    "algorithm.max_kl.",
    "policy/ratio_first_max_error": "Largest |ratio - 1| in the step's first mini-batch; exactly "
    "0.0 unless old and new log-probs differ for the same weights. With one mini-batch a step, "
    "both are of one pass through the layers on a CPU, and on GPUs it is null but in step 1 and in "
    "steps that save a checkpoint.",
    "policy/clip_low_fraction": "Share of tokens clipped at the lower bound.",
    "policy/clip_high_fraction": "Share of tokens clipped at the upper bound.",
    "policy/clip_high_probability": "Mean probability of the tokens clipped at the upper bound"
    " (DAPO, figure 3a).",
    "policy/dual_clip_fraction": "Share of tokens bounded by algorithm.objective.dual_clip.",
    "policy/token_probability_mean": "Mean probability of the trained tokens.",
    "policy/positive_gradient_share": "Share of tokens with a positive advantage in the sum of "
    "|loss weight x derivative of the policy term|, after the clip; 0.5 is balanced.",
    "policy/grad_norm": "Mean global gradient norm of the applied updates, before clipping.",
    "policy/lr": "Learning rate of the step; 0 during critic.warmup.",
    "policy/skipped_updates": "Updates skipped on all ranks for a non-finite loss or gradient.",
    "parity/logprob_abs_mean": "Mean |log-prob(trainer) - log-prob(engine)| over fresh tokens, "
    "before the first update.",
    "parity/logprob_abs_max": "Largest |log-prob(trainer) - log-prob(engine)| over fresh tokens, "
    "before the first update.",
    "parity/probe_abs_mean": "Mean |log-prob(trainer) - log-prob(engine)| over some stale tokens, "
    "both with the weights before the update, of the engine that differs most; null without stale "
    "tokens.",
    "parity/probe_abs_max": "Largest |log-prob(trainer) - log-prob(engine)| over these tokens.",
    "staleness/token_share": "Share of tokens with a loss weight that earlier weights sampled.",
    "staleness/mean": "Mean number of publications between sampling and training of a token.",
    "staleness/max": "Largest number of publications between sampling and training of a token.",
    "staleness/logprob_drift_mean": "Mean |log-prob(trainer) - log-prob(engine)| over stale "
    "tokens, before the first update.",
    "staleness/logprob_drift_max": "Largest |log-prob(trainer) - log-prob(engine)| over stale "
    "tokens, before the first update.",
    "staleness/weight_truncated_share": "Share of importance weights that were truncated.",
    "staleness/weight_masked_share": "Share of importance weights that were masked.",
    "bapo/clip_low": 'Lower ratio bound, mean over updates; null unless the gate is "bapo".',
    "bapo/clip_high": "Upper ratio bound, mean over updates.",
    "bapo/share_before": "Share of positive tokens before the search, mean over updates.",
    "bapo/share": "Share of positive tokens after the search, mean over updates.",
    "bapo/share_min": "Smallest share of positive tokens after the search.",
    "kl/mean": "Mean KL estimate to the reference before the first update; null without kl_coef.",
    "kl/max": "Largest absolute KL estimate of a token to the reference.",
    "kl/coef": "Coefficient of the KL divergence in this step, which kl_control moves.",
    "pretraining/loss": "Mean loss of pretraining tokens in nats, without its coefficient.",
    "pretraining/tokens": "Pretraining tokens that were predicted.",
    "reflection/response_share": "Share of trained responses with any of "
    "observe.reflection_phrases; reflection/NAME is the share of one phrase.",
    "critic/loss": "Mean value loss of the updates; null unless the advantage is gae.",
    "critic/explained_variance": "1 - Var(return - value) / Var(return), before the first update.",
    "critic/value_mean": "Mean value before the first update.",
    "critic/return_mean": "Mean return before the first update.",
    "critic/clip_fraction": "Share of tokens whose value was clipped.",
    "critic/grad_norm": "Mean global gradient norm of the critic's updates.",
    "critic/lr": "Learning rate of the critic.",
    "critic/skipped_updates": "Critic updates skipped for a non-finite loss or gradient.",
    "pairs/accuracy": "Share of the update's pairs whose chosen response had the higher score; of "
    "`megadapo reward-model` only.",
    "pairs/margin": "Mean score of the chosen responses minus the mean of the rejected ones.",
    "experts/balance_loss": "Load-balancing loss without its coefficient, mean over layers; 1 is "
    "even, null without experts.",
    "experts/max_load": "Most tokens of one expert, relative to the mean of its layer.",
    "weights/bytes": "Bytes that trainer ranks gave to engines in the update.",
    "weights/density": "Share of elements that changed since the previous update; null after a "
    "full update.",
    "weights/update_s": "Seconds of the whole update, within time/sync_s.",
    "weights/pause_s": "Seconds of the update after generation was stopped for it.",
    "memory/driver_mib": "Private memory of the driver in MiB; memory/* shows leaks.",
    "memory/rank_min_mib": "Smallest private memory of a trainer rank after the updates.",
    "memory/rank_max_mib": "Largest private memory of a trainer rank after the updates. On a "
    "CPU it includes freed memory, which the C library returns every 16 steps only.",
    "memory/engine_min_mib": "Smallest private memory of an engine with its processes.",
    "memory/engine_max_mib": "Largest private memory of an engine with its processes.",
    "eval/loss": "Mean loss of held-out response tokens in nats, or of held-out pairs; of "
    "`megadapo sft` and `megadapo reward-model` only.",
    "eval/pair_accuracy": "Share of held-out pairs whose chosen response has the higher score.",
    "eval/accuracy": "Held-out accuracy that became known in this step; the newest if several did.",
    "eval/score": "Mean reward of that evaluation, whose measure it is without an accuracy.",
    "eval/pass_at_k": "Share of its problems with a correct response among all samples.",
    "eval/cons_at_k": "Share of its problems whose most frequent answer is correct.",
    "eval/policy_version": "Weights that the evaluation scored.",
}
"""Meaning of each metric by its name. A value is null if there was nothing to measure."""

METRIC_NAMES = tuple(METRICS)

OWN_AREAS = ("reward/", "environment/", "reflection/", "held_out/")
"""Prefixes of names that the configuration, reward functions and environments give."""

UNREPEATED = (
    *("time/", "tokens_per_s", "rollout/", "weights/", "memory/", "train/slowest_rank"),
    *(
        "groups/stopped",
        "groups/dropped",
        "groups/from_journal",
        "groups/overdue",
        "tokens/stopped",
    ),
)
"""Prefixes of names whose values a repeated run does not repeat: they depend on the engines' speed,
on lost processes, or on memory."""

_NOTES = """\
`reward.functions` beyond the rule add names: `reward/NAME` is the mean score of a function without
its weight, `reward/NAME/PART` the mean of a part, and `reward/NAME/failed` the share of responses
that it failed on. A function that scores steps also has `reward/NAME/steps`, the mean number of
steps, and `reward/NAME/step_mean`, the mean score of a step. A step without such values leaves
them out.

Each entry of `rollout.environments` adds the means of its episodes: `environment/NAME/return`,
`environment/NAME/turns`, `environment/NAME/seconds` for the time that it took, and every number
that it counts; `environment/NAME/out_of_turns` is the share of episodes that ended at `max_turns`,
which are not truncated; `environment/NAME/failed` is the share of responses that it failed on,
which have no score; `environment/NAME/cut_messages` is the number of an episode's messages and
texts that were cut at `max_observation_tokens`. `environment/NAME/failures/KIND` is the number of
its failures in the step, those after which a response was requested again included, by kind of
cause: failure (`EnvironmentFailure`), exception, timeout, lost_process, no_capacity (of memory or
threads) and not_continued (an episode that cannot be repeated or has lost its records). A step
leaves out kinds without failures.

If data.held_out is a table, `held_out/NAME/accuracy` is the accuracy of each set, in the steps with
`eval/accuracy`, which is their mean; without an accuracy there is `held_out/NAME/score`. `megadapo
sft` and `megadapo reward-model` have
`held_out/NAME/loss`, and for pairs `held_out/NAME/pair_accuracy`.

If saved rollouts are trained on again, everything that needs engines is null, group metrics
describe the saved groups, and `parity/*` compares with the saved log-probs.
"""


def is_repeated(name: str) -> bool:
    """Return whether a run with the same configuration has the same values of a metric."""
    is_of_host = name.startswith("environment/") and re.search("/seconds$|/failures/", name)
    return not is_of_host and not name.startswith(UNREPEATED)


def metrics_page() -> str:
    """Return docs/metrics.md: one row per metric, and notes on the names that users add."""
    meanings = {name: meaning.replace("|", "\\|") for name, meaning in METRICS.items()}
    rows = "\n".join(f"| `{name}` | {meaning} |" for name, meaning in meanings.items())
    return f"""# Metrics

`metrics.jsonl` has one object a step with all of these names, null where a step has no value.
TensorBoard and wandb receive the same numbers. `evaluations.jsonl` has each evaluation with
its standard error, under the step that trained its weights.

This page is written by `megadapo config --metrics`.

| metric | meaning |
| --- | --- |
{rows}

{_NOTES}"""
