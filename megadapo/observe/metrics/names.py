"""The declaration of every metric, under the panel that draws it, in the order of a record.

A metric is declared here and measured in one other file; everything between passes it on by its
name. `megadapo config --metrics` makes docs/metrics.md of this table.
"""

from __future__ import annotations

import re

from megadapo.observe.metrics.panel import Metric, Panel

DECLARED: dict[Panel, dict[Metric, str]] = {
    Panel("", "numbers"): {
        Metric("step"): "Number of the rollout step, counted from 1.",
        Metric("policy_version"): "Weight publication that the step ends with.",
        Metric("eval/accuracy"): "Held-out accuracy that became known in this step; the newest if "
        "several did.",
        Metric("eval/policy_version"): "Weights that the evaluation scored.",
    },
    Panel("", "whole"): {
        Metric("time/step_s"): "Seconds of the step: its rollout, training and weight sync.",
    },
    Panel("", "in_step"): {
        Metric("time/rollout_s", "rollout"): "Seconds in which the step waited for its batch.",
        Metric("time/train_s", "train"): "Seconds of old log-probs, reference, critic and updates.",
        Metric("time/sync_s", "publish weights"): "Seconds of the weight update, sleeping and "
        "waking of engines included.",
    },
    Panel("", "between"): {
        Metric("time/evaluate_s", "evaluate"): "Seconds the run waited for evaluations since the "
        "previous record.",
        Metric("time/checkpoint_s", "checkpoint of the step before"): "Seconds spent on "
        "checkpoints since the previous record, so on the checkpoint of the previous step.",
    },
    Panel("", "beside"): {
        Metric("time/reward_s", "scoring, beside the rollout", counted=True): "Seconds that "
        "responses waited to be scored.",
    },
    Panel("Learning", "Accuracy", "share of responses", held_out=True, in_plot=True): {
        Metric("accuracy/mean", "training"): "Share of correct responses among all generated; null "
        "if no reward function says what is correct.",
    },
    Panel("Learning", "Several held-out samples", "share of problems"): {
        Metric("eval/pass_at_k", "pass@k"): "Share of the problems of eval/accuracy with a "
        "correct response among all samples.",
        Metric("eval/cons_at_k", "cons@k"): "Share of its problems whose most frequent answer is "
        "correct; answers that the reward accepts count as one.",
    },
    Panel("Learning", "Held-out sets", "", rest_of=r"held_out/(.+)"): {},
    Panel("Learning", "Ordered pairs", "share of pairs", in_plot=True): {
        Metric("pairs/accuracy", "training"): "Share of the update's pairs whose chosen response "
        "had the higher score; of `megadapo reward-model` only.",
        Metric("eval/pair_accuracy", "held out"): "Share of held-out pairs whose chosen response "
        "has the higher score.",
    },
    Panel("Learning", "Margin of pairs", "mean of scores"): {
        Metric("pairs/margin", "margin"): "Mean score of the chosen responses minus the mean of "
        "the rejected ones.",
    },
    Panel("Learning", "Reward", "mean of a response", in_plot=True): {
        Metric("reward/mean", "unshaped"): "Mean reward of all responses generated, before "
        "overlong shaping.",
        Metric("reward/shaped_mean", "shaped"): "Sum of reward/mean and "
        "reward/overlong_penalty_mean.",
        Metric("reward/overlong_penalty_mean", "overlong penalty"): "Mean soft overlong punishment "
        "of the responses of reward/mean.",
        Metric("eval/score", "held out"): "Mean reward of the evaluation of eval/accuracy, whose "
        "measure it is without an accuracy.",
    },
    Panel("Learning", "Parts of the reward", "mean", rest_of=r"reward/(.+)"): {},
    Panel("Learning", "Left without reward", "a step"): {
        Metric("reward/excluded", "responses"): "Responses left out of their groups because a "
        "reward function or an environment failed on them; no other metric but reward/NAME/failed "
        "and environment/NAME/failed counts them.",
        Metric("groups/unscored", "groups"): "Groups dropped because reward functions or "
        "environments failed on all of their responses, or on all but one; other prompts took "
        "their places.",
    },
    Panel(
        "Learning",
        "Response length",
        "tokens",
        band=("response_length/p95", "response_length/p50"),
        in_plot=True,
    ): {
        Metric("response_length/mean", "mean"): "Mean response length in tokens.",
        Metric("response_length/p50", "median"): "Median response length.",
        Metric("response_length/p95", "95th percentile"): "95th percentile of the response length.",
        Metric("response_length/max", "longest"): "Longest response.",
    },
    Panel("Learning", "Truncated", "share of responses"): {
        Metric("response_length/truncated_fraction", "truncated"): "Share of responses cut at the "
        "longest length.",
    },
    Panel("Policy", "Entropy", "nats a token", in_plot=True): {
        Metric("policy/entropy", "entropy", per="tokens"): "Mean token entropy in nats.",
        Metric("entropy/target", "target"): "The entropy that entropy_control keeps; null "
        "without one.",
        Metric("entropy/coef", "coefficient of the bonus"): "Coefficient of the entropy "
        "bonus in this step, which entropy_control moves; null without a target.",
    },
    Panel("Policy", "Token probability", "of a token", in_plot=True): {
        Metric("policy/token_probability_mean", "all, mean", per="tokens"): "Mean probability of "
        "the trained tokens.",
        Metric(
            "policy/clip_high_probability", "clipped above, mean", per="policy/clip_high_fraction"
        ): "Mean probability of the tokens clipped at the upper bound (DAPO, figure 3a).",
        Metric(
            "policy/clip_high_probability_max",
            "clipped above, largest",
            per="policy/clip_high_fraction",
            is_max=True,
        ): "Largest probability of these tokens; about 0.2 in DAPO's section 3.1.",
    },
    Panel("Policy", "Positive and rare tokens", "share of the gradient", in_plot=True): {
        Metric(
            "policy/positive_share_in_logits", "positive", per="logit_gradient"
        ): "Share of tokens with a positive advantage in the sum of the gradients' sizes in the "
        "logits: |w d| ||onehot - p||, with the loss weight w and the derivative d of the policy "
        "term in the log-prob, after the clip; 0.5 is balanced.",
        Metric(
            "policy/rare_share_in_logits", "probability below 0.2", per="logit_gradient"
        ): "Share of tokens with a probability below 0.2 in the same sum.",
        Metric(
            "policy/positive_share_in_logprobs", "positive, in log-probs", per="logprob_gradient"
        ): "Share of tokens with a positive advantage in the sum of |w d|, without the distance of "
        "onehot and p: a likely token counts as much as a rare one, though its logits hardly move.",
    },
    Panel("Policy", "Clipped", "share of tokens", in_plot=True): {
        Metric("policy/clip_high_fraction", "high", per="tokens"): "Share of tokens clipped at the "
        "upper bound.",
        Metric("policy/clip_low_fraction", "low", per="tokens"): "Share of tokens clipped at the "
        "lower bound.",
    },
    Panel("Policy", "Clipped sequences", "share of sequences", in_plot=True): {
        Metric("policy/clipped_sequences", "clipped", per="sequences"): "Share of the updates' "
        "responses that the clip of a sequence ratio (GSPO) cut, so that no token of them has a "
        "gradient; their tokens are in policy/clip_*_fraction. Null with a token's own ratio.",
    },
    Panel("Policy", "Chosen by covariance", "share of tokens"): {
        Metric("policy/chosen_fraction", "chosen"): 'Share of tokens that gate "clip_cov" leaves '
        'out or "kl_cov" penalises, mean over updates; null with other gates.',
    },
    Panel("Policy", "Bounded by the dual clip", "share of tokens"): {
        Metric("policy/dual_clip_fraction", "bounded", per="tokens"): "Share of tokens bounded by "
        "algorithm.objective.dual_clip.",
    },
    Panel("Policy", "Ratio", "mean"): {
        Metric("policy/ratio_mean", "ratio", per="tokens"): "Mean ratio of new to old token "
        "probability.",
    },
    Panel("Policy", "KL of old to new policy", "nats a token", in_plot=True): {
        Metric("policy/approx_kl", "divergence", per="tokens"): "Mean of r - 1 - log r, the "
        "divergence of the policy in the step's updates from the old one, in nats per token.",
        Metric("kl/from_old", "last update"): "The same of the step's last update alone, before it "
        "is applied, which kl_control.old_target steers; null without old_kl_coef.",
    },
    Panel("Policy", "Left out by max_kl", "updates a step", in_plot=True): {
        Metric("policy/left_out_updates", "updates"): "Updates left out because policy/approx_kl "
        "of one was above algorithm.max_kl.",
    },
    Panel("KL to the reference policy", "KL to the reference", "nats a token", in_plot=True): {
        Metric("kl/mean", "mean", per="reference_tokens"): "Mean KL estimate to the reference "
        "before the first update; null without kl_coef.",
    },
    Panel("KL to the reference policy", "Largest KL", "nats, one token"): {
        Metric("kl/max", "largest", per="reference_tokens", is_max=True): "Largest absolute KL "
        "estimate of a token to the reference.",
    },
    Panel("KL to the reference policy", "Coefficient of the KL", "", in_plot=True): {
        Metric("kl/coef", "coefficient"): "Coefficient of the KL divergence in this step, which "
        "kl_control moves.",
        Metric("kl/old_coef", "of the old policy"): "Coefficient of the old policy's KL divergence "
        "in the loss in this step; null without old_kl_coef.",
    },
    Panel("BAPO", "BAPO's bounds", "ratio", in_plot=True): {
        Metric("bapo/clip_high", "upper"): "Upper ratio bound, mean over updates.",
        Metric("bapo/clip_low", "lower"): "Lower ratio bound, mean over updates; null unless the "
        'gate is "bapo".',
    },
    Panel("BAPO", "BAPO's positive tokens", "share", in_plot=True): {
        Metric("bapo/share", "after the search"): "Share of positive tokens after the search, mean "
        "over updates.",
        Metric("bapo/share_before", "before the search"): "Share of positive tokens before the "
        "search, mean over updates.",
        Metric("bapo/share_min", "smallest"): "Smallest share of positive tokens after the search.",
    },
    Panel("Critic", "Explained variance", "of the returns", in_plot=True): {
        Metric("critic/explained_variance", "explained"): "1 - Var(return - value) / Var(return), "
        "before the first update.",
    },
    Panel("Critic", "Critic's loss", "", in_plot=True): {
        Metric("critic/loss", "loss", per="updates"): "Mean value loss of the updates; null "
        "unless the advantage is gae.",
    },
    Panel("Critic", "Values and returns", "mean", in_plot=True): {
        Metric("critic/value_mean", "value", per="tokens"): "Mean value before the first update.",
        Metric("critic/return_mean", "return", per="tokens"): "Mean return before the first "
        "update.",
    },
    Panel("Critic", "Clipped values", "share of tokens"): {
        Metric("critic/clip_fraction", "clipped", per="tokens"): "Share of tokens whose "
        "value was clipped.",
    },
    Panel("Critic", "Critic's gradient norm", "before clipping"): {
        Metric("critic/grad_norm", "norm"): "Mean global gradient norm of the critic's updates.",
    },
    Panel("Critic", "Critic's learning rate", ""): {
        Metric("critic/lr", "rate"): "Learning rate of the critic.",
    },
    Panel("Critic", "Critic's skipped updates", "a step"): {
        Metric("critic/skipped_updates", "skipped"): "Critic updates skipped for a non-finite loss "
        "or gradient.",
    },
    Panel(
        "What to watch",
        "Length",
        "tokens, against training accuracy",
        against="accuracy/mean",
        in_plot=True,
    ): {
        Metric("response_length/mean", "length"): "",
    },
    Panel(
        "What to watch",
        "Length, held out",
        "tokens, against held-out accuracy",
        against="eval/accuracy",
        in_plot=True,
    ): {
        Metric("eval/response_length", "length"): "Mean response length of the evaluation of "
        "eval/accuracy, in tokens.",
    },
    Panel(
        "What to watch",
        "Entropy",
        "nats, against training accuracy",
        against="accuracy/mean",
        in_plot=True,
    ): {
        Metric("policy/entropy", "entropy"): "",
    },
    Panel("What to watch", "Degenerate responses", "share of responses", in_plot=True): {
        Metric("degenerate/gibberish", "gibberish"): "Share of responses whose mean log-prob under "
        "the policy that sampled them is below algorithm.gibberish_below.",
        Metric("degenerate/repetitive", "repetitive"): "Share of responses that have had more than "
        "algorithm.repetitive_above of their n-grams of 8 tokens before.",
    },
    Panel(
        "What to watch",
        "Looking back",
        "share of responses",
        rest_of=r"reflection/(.+)",
        in_plot=True,
    ): {
        Metric("reflection/response_share", "any phrase"): "Share of trained responses with any of "
        "observe.reflection_phrases; reflection/NAME is the share of one phrase.",
    },
    Panel("Tools and branches", "Tool calls", "a response", in_plot=True): {
        Metric("tools/calls_per_response", "calls"): "Mean calls of a response: calls of tools, or "
        "turns that its environment answered, except for the last one; null without "
        "rollout.environments.",
    },
    Panel("Tools and branches", "From environments", "share of response tokens", in_plot=True): {
        Metric("tools/token_share", "share"): "Share of response tokens that an environment wrote; "
        "the policy sampled the others.",
    },
    Panel("Tools and branches", "Branches", "responses of a group", in_plot=True): {
        Metric("tools/branches_per_group", "branches"): "Responses of a group that branch off "
        "another one; null without sampling.branching.",
    },
    Panel("Tools and branches", "Rise of entropy after a call", "normalised", in_plot=True): {
        Metric("tools/entropy_rise", "rise"): "Mean normalised entropy after a tool call, minus "
        "its value at the response's start.",
    },
    Panel("Environments", "Return", "mean of an episode", rest_of=r"environment/(.+)/return"): {},
    Panel("Environments", "Turns", "of an episode", rest_of=r"environment/(.+)/turns"): {},
    Panel("Environments", "Time", "seconds of an episode", rest_of=r"environment/(.+)/seconds"): {},
    Panel("Environments", "Failures", "share of responses", rest_of=r"environment/(.+)/failed"): {},
    Panel(
        "Environments", "Causes of failures", "a step", rest_of=r"environment/(.+/failures/[^/]+)"
    ): {},
    Panel(
        "Environments",
        "Counts",
        "mean of an episode",
        rest_of=r"environment/(.+/(?<!/failures/)(?!(?:return|turns|seconds|failed)$)[^/]+)",
    ): {},
    Panel("Optimizer", "Loss", "", in_plot=True): {
        Metric("policy/loss", "training", per="updates"): "Mean loss of the step's updates, "
        "without the pretraining loss. In `megadapo sft` it is minus the mean log-prob of the "
        "response tokens, in `megadapo reward-model` the mean loss of the pairs.",
        Metric("eval/loss", "held out"): "Mean loss of held-out response tokens in nats, or of "
        "held-out pairs; of `megadapo sft` and `megadapo reward-model` only.",
    },
    Panel("Optimizer", "Gradient norm", "before clipping"): {
        Metric("policy/grad_norm", "norm"): "Mean global gradient norm of the applied updates, "
        "before clipping.",
    },
    Panel("Optimizer", "Learning rate", ""): {
        Metric("policy/lr", "rate"): "Learning rate of the step; 0 during critic.warmup.",
    },
    Panel("Optimizer", "Skipped updates", "a step"): {
        Metric("policy/skipped_updates", "skipped"): "Updates skipped on all ranks for a "
        "non-finite loss or gradient.",
    },
    Panel("Pretraining and experts", "Pretraining loss", "nats a token", in_plot=True): {
        Metric("pretraining/loss", "loss", per="pretraining/tokens"): "Mean loss of pretraining "
        "tokens in nats, without its coefficient.",
    },
    Panel("Pretraining and experts", "Pretraining tokens", "a step"): {
        Metric("pretraining/tokens", "predicted"): "Pretraining tokens that were predicted.",
    },
    Panel("Pretraining and experts", "Balance loss of experts", "1 is even", in_plot=True): {
        Metric("experts/balance_loss", "loss"): "Load-balancing loss without its coefficient, mean "
        "over layers; 1 is even, null without experts.",
    },
    Panel("Pretraining and experts", "Largest expert load", "1 is even", in_plot=True): {
        Metric("experts/max_load", "load"): "Most tokens of one expert, relative to the mean of "
        "its layer.",
    },
    Panel("Sampling", "Groups without signal", "share of groups", in_plot=True): {
        Metric("groups/all_correct_share", "all correct"): "Share of groups/all_correct in "
        "groups/sampled.",
        Metric("groups/all_wrong_share", "all incorrect"): "Share of groups/all_wrong in "
        "groups/sampled.",
        Metric("groups/equal_share", "equal rewards"): "Share of groups/equal in groups/sampled.",
    },
    Panel("Sampling", "Groups", "a step"): {
        Metric("groups/sampled", "sampled"): "Groups completed in this step. All response metrics "
        "are over them.",
        Metric("groups/kept", "kept"): "Groups that the step trained on.",
        Metric("groups/all_correct", "all correct"): "Completed groups with only correct "
        "responses.",
        Metric("groups/all_wrong", "all incorrect"): "Completed groups with only incorrect "
        "responses.",
        Metric("groups/equal", "equal rewards"): "Completed groups whose rewards are equal, where "
        "no reward function says what is correct.",
        Metric("groups/one_text_wrong", "one incorrect text"): "Groups among groups/all_wrong "
        "whose responses are all the same text.",
        Metric("groups/rejected_unequal", "not mixed, unequal rewards"): "Groups left out as all "
        "correct or all incorrect, although their rewards differ by a quarter of the range of the "
        "step's rewards, or more.",
    },
    Panel("Sampling", "Reserve", "groups a step"): {
        Metric("groups/from_reserve", "taken from"): "Groups of the batch that an earlier step "
        "completed.",
        Metric("groups/to_reserve", "put in"): "Finished mixed groups that wait for a later step.",
    },
    Panel(
        "Sampling",
        "Tokens",
        "a step",
        band=("tokens/generated", "tokens/trained", "not trained on"),
        in_plot=True,
    ): {
        Metric("tokens/generated", "generated"): "Tokens that engines sampled for the groups of "
        "groups/sampled; those of stopped groups are in tokens/stopped. Tool output is not "
        "counted; a prefix that branches share is counted once.",
        Metric("tokens/trained", "trained on"): "Response tokens with a loss weight; a shared "
        "prefix counts once per branch.",
        Metric("tokens/stopped", "of stopped responses", counted=True): "Tokens of groups that "
        "were stopped, or completed too late to count in the step. Depends on the engines' speed "
        "if sampling.max_staleness is 0.",
        Metric("tokens/recomputed", "read again", counted=True): "Tokens that engines read again "
        "after a publication had stopped them.",
    },
    Panel("Sampling", "Groups not used", "a step"): {
        Metric("groups/stopped", "stopped", counted=True): "Groups ended before completion. "
        "Depends on the engines' speed if sampling.max_staleness is 0.",
        Metric("groups/dropped", "dropped"): "Mixed groups that were not used. Depends on the "
        "engines' speed if sampling.max_staleness is 0.",
    },
    Panel("Sampling", "Groups left for later", "a step"): {
        Metric("groups/carried", "carried on", counted=True): "Unfinished groups that continue in "
        "the next step.",
        Metric("groups/overdue", "waited for, too old for a later step", counted=True): "Most "
        "groups that a batch with enough mixed groups waited for, because they would have become "
        "older than sampling.max_staleness. Depends on the engines' speed.",
    },
    Panel("Sampling", "Groups from the journal", "a step"): {
        Metric("groups/from_journal", "read", counted=True): "Groups read from the journal of a "
        "killed process instead of being generated again.",
    },
    Panel(
        "Long tail",
        "Time of a group",
        "seconds",
        band=("time/group_p95_s", "time/group_p50_s"),
        in_plot=True,
    ): {
        Metric("time/group_p50_s", "median"): "Median seconds from a group's submission to its "
        "last token.",
        Metric("time/group_p95_s", "95th percentile"): "95th percentile of the seconds from a "
        "group's submission to its last token.",
        Metric("time/group_max_s", "slowest"): "Most seconds from a group's submission to its last "
        "token.",
    },
    Panel("Long tail", "Use of the engines", "share", in_plot=True): {
        Metric("rollout/engine_busy_share", "of their time"): "Share of the sampling time in which "
        "engines had work. The time of an update counts if engines sample beside it.",
        Metric("rollout/slot_use", "of their places"): "Mean share of rollout.max_num_seqs in use, "
        "over the same time as rollout/engine_busy_share.",
    },
    Panel("Long tail", "Speed of an engine", "tokens/s"): {
        Metric("rollout/tokens_per_s_max", "fastest"): "Tokens per second of the fastest engine.",
        Metric("rollout/tokens_per_s_min", "slowest"): "Tokens per second of the slowest engine.",
    },
    Panel("Long tail", "Key-value cache", "largest share in use"): {
        Metric("rollout/kv_use_max", "in use"): "Largest share of the key-value cache in use.",
    },
    Panel("Long tail", "Preemptions", "responses put back"): {
        Metric("rollout/preemptions", "put back"): "Responses that vLLM preempted for lack of "
        "key-value cache.",
    },
    Panel("Long tail", "Engines lost", "at the end of the rollout"): {
        Metric("rollout/engines_lost", "lost"): "Engines that were dead or starting at the end of "
        "the rollout.",
    },
    Panel("Staleness", "Stale tokens", "share of those trained on"): {
        Metric("staleness/token_share", "stale"): "Share of tokens with a loss weight that earlier "
        "weights sampled.",
    },
    Panel("Staleness", "Age", "policy versions"): {
        Metric("staleness/mean", "mean"): "Mean number of publications between sampling and "
        "training of a token.",
        Metric("staleness/max", "largest"): "Largest number of publications between sampling and "
        "training of a token.",
    },
    Panel("Staleness", "Wait for the oldest groups", "seconds of a step"): {
        Metric("time/overdue_s", "with enough other groups", counted=True): "Seconds that a batch "
        "with enough mixed groups waited for groups/overdue.",
    },
    Panel("Staleness", "Drift of stale tokens", "|log-prob change|, nats", log=True): {
        Metric(
            "staleness/logprob_drift_max", "largest", per="stale_tokens", is_max=True
        ): "Largest "
        "|log-prob(trainer) - log-prob(engine)| over stale tokens, before the first update.",
        Metric("staleness/logprob_drift_mean", "mean", per="stale_tokens"): "Mean "
        "|log-prob(trainer) - log-prob(engine)| over stale tokens, before the first update.",
    },
    Panel("Staleness", "Importance weights", "share of weighted tokens"): {
        Metric("staleness/weight_truncated_share", "truncated", per="weighted_tokens"): "Share of "
        "importance weights that were truncated.",
        Metric("staleness/weight_masked_share", "masked", per="weighted_tokens"): "Share of "
        "importance weights that were masked.",
    },
    Panel(
        "Exactness and speed",
        "Parity",
        "|trainer - engine|, nats",
        log=True,
        bound="logprob_abs_max",
        in_plot=True,
    ): {
        Metric("parity/logprob_abs_max", "largest", per="fresh_tokens", is_max=True): "Largest "
        "|log-prob(trainer) - log-prob(engine)| over fresh tokens, before the first update.",
        Metric("parity/logprob_abs_mean", "mean", per="fresh_tokens"): "Mean |log-prob(trainer) - "
        "log-prob(engine)| over fresh tokens, before the first update.",
    },
    Panel(
        "Exactness and speed",
        "Parity on stale tokens",
        "|trainer - engine|, nats",
        log=True,
        bound="logprob_abs_max",
    ): {
        Metric("parity/probe_abs_max", "largest"): "Largest |log-prob(trainer) - log-prob(engine)| "
        "over the tokens of parity/probe_abs_mean.",
        Metric("parity/probe_abs_mean", "mean"): "Mean |log-prob(trainer) - log-prob(engine)| over "
        "some stale tokens, both with the weights before the update, of the engine that differs "
        "most; null without stale tokens.",
    },
    Panel(
        "Exactness and speed", "First ratio", "largest |ratio - 1|", bound="ratio_first_max_error"
    ): {
        Metric("policy/ratio_first_max_error", "error", per="updates", is_max=True): "Largest "
        "|ratio - 1| in the step's first mini-batch; exactly 0.0 unless old and new log-probs "
        "differ for the same weights. With one mini-batch a step, both are of one pass through the "
        "layers on a CPU, and on GPUs it is null but in step 1 and in steps that save a "
        "checkpoint.",
    },
    Panel("Exactness and speed", "Speed", "tokens/s"): {
        Metric("tokens_per_s", "generated"): "tokens/generated per second of the step, so without "
        "the tokens of stopped groups.",
    },
    Panel("Weight updates", "Sent to engines", "bytes"): {
        Metric("weights/bytes", "bytes"): "Bytes that trainer ranks gave to engines in the update.",
    },
    Panel("Weight updates", "Changed weights", "share of elements"): {
        Metric("weights/density", "changed"): "Share of elements that changed since the previous "
        "update; null after a full update.",
    },
    Panel("Weight updates", "Time of the update", "seconds"): {
        Metric("weights/update_s", "whole update"): "Seconds of the whole update, within "
        "time/sync_s.",
        Metric("weights/pause_s", "no engine generates"): "Seconds of the update after generation "
        "was stopped for it.",
    },
    Panel("Balance", "Engines", "tokens generated"): {
        Metric("rollout/engine_tokens_max", "most"): "Tokens of the engine that generated the "
        "most.",
        Metric("rollout/engine_tokens_min", "least"): "Tokens of the engine that generated the "
        "fewest.",
    },
    Panel("Balance", "Engines", "seconds busy"): {
        Metric("time/engine_max_s", "longest"): "Busy seconds of the engine that was busy for the "
        "longest time.",
        Metric("time/engine_min_s", "shortest"): "Busy seconds of the engine that was busy for the "
        "shortest time.",
    },
    Panel("Balance", "Trainer ranks", "tokens computed"): {
        Metric("train/rank_tokens_max", "most"): "Tokens, prompts included, of the trainer rank "
        "with the most.",
        Metric("train/rank_tokens_min", "least"): "Tokens, prompts included, of the trainer rank "
        "with the fewest.",
    },
    Panel("Balance", "Trainer ranks", "seconds, old log-probs"): {
        Metric("time/rank_logprobs_max_s", "longest"): "Seconds of the slowest rank for the old "
        "log-probs; null if the update computes them.",
        Metric("time/rank_logprobs_min_s", "shortest"): "Seconds of the fastest rank for the old "
        "log-probs; no data-parallel rank waits for another in that pass.",
    },
    Panel("Balance", "Slowest trainer rank", "its number"): {
        Metric("train/slowest_rank", "rank"): "Trainer rank, counted from 0, that was slowest for "
        "the old log-probs.",
    },
    Panel("Balance", "Main memory", "MiB"): {
        Metric("memory/engine_max_mib", "engine, most"): "Largest private memory of an engine with "
        "its processes.",
        Metric("memory/engine_min_mib", "engine, least"): "Smallest private memory of an engine "
        "with its processes.",
        Metric("memory/rank_max_mib", "trainer rank, most"): "Largest private memory of a trainer "
        "rank after the updates. On a CPU it includes freed memory, which the C library returns "
        "every 16 steps only.",
        Metric("memory/rank_min_mib", "trainer rank, least"): "Smallest private memory of a "
        "trainer rank after the updates.",
        Metric("memory/driver_mib", "driver"): "Private memory of the driver in MiB; memory/* "
        "shows leaks.",
    },
}
"""Panels in reading order; each metric with its meaning, which is empty where a panel draws the
metric of another one again. A value is null if there was nothing to measure."""

METRICS = {
    metric.name: meaning
    for metrics in DECLARED.values()
    for metric, meaning in metrics.items()
    if meaning
}
"""Meaning of each metric by its name."""

SUMMED = {metric.name: metric for metrics in DECLARED.values() for metric in metrics if metric.per}
"""Metrics that the trainer sums over micro-batches, ranks and updates, by name."""

COUNTED = [metric.name for metrics in DECLARED.values() for metric in metrics if metric.counted]
"""Metrics that the sampler counts."""

METRIC_NAMES = tuple(METRICS)

OWN_AREAS = ("reward/", "environment/", "reflection/", "held_out/")
"""Prefixes of names that the configuration, reward functions and environments give."""

UNREPEATED = (
    *("time/", "tokens_per_s", "rollout/", "weights/", "memory/", "train/slowest_rank"),
    *("groups/stopped", "groups/dropped", "groups/from_journal", "groups/overdue"),
    "tokens/stopped",
)
"""Prefixes of names whose values a repeated run does not repeat: they depend on the engines' speed,
on lost processes, or on memory."""


def is_repeated(name: str) -> bool:
    """Return whether a run with the same configuration has the same values of a metric."""
    is_of_host = name.startswith("environment/") and re.search("/seconds$|/failures/", name)
    return not is_of_host and not name.startswith(UNREPEATED)
