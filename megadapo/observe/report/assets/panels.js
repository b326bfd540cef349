// Which metric is drawn where.

/** [metric, label] of every metric below `prefix` that is not among `others`. */
function metricsBelow(prefix, others = []) {
  const metrics = new Set(data.runs.flatMap((run) => Object.keys(run.series)));
  return [...metrics]
    .filter((metric) => metric.startsWith(prefix) && !others.includes(metric))
    .map((metric) => [metric, metric.slice(prefix.length).replaceAll("_", " ")]);
}

const REWARDS = ["reward/mean", "reward/shaped_mean", "reward/overlong_penalty_mean"];

// [heading, panels]; a panel: title, unit, lines [metric, label], and how it is drawn: `band` is
// filled between two of its metrics, the higher one first, and may have a label.
const CURVES = [
  [
    "Learning",
    [
      {
        title: "Accuracy",
        unit: "share of responses",
        lines: [["accuracy/mean", "training"]],
        heldOut: true,
      },
      {
        title: "Reward",
        unit: "mean of a response",
        lines: [
          ["reward/mean", "rule"],
          ["reward/shaped_mean", "shaped"],
          ["reward/overlong_penalty_mean", "overlong penalty"],
        ],
      },
      { title: "Parts of the reward", unit: "mean", lines: metricsBelow("reward/", REWARDS) },
      {
        title: "Response length",
        unit: "tokens",
        lines: [
          ["response_length/mean", "mean"],
          ["response_length/p50", "median"],
          ["response_length/p95", "95th percentile"],
          ["response_length/max", "longest"],
        ],
        band: ["response_length/p95", "response_length/p50"],
      },
      {
        title: "Truncated",
        unit: "share of responses",
        lines: [["response_length/truncated_fraction", "truncated"]],
      },
    ],
  ],
  [
    "Policy",
    [
      { title: "Entropy", unit: "nats a token", lines: [["policy/entropy", "entropy"]] },
      {
        title: "Token probability",
        unit: "mean",
        lines: [["policy/token_probability_mean", "probability"]],
      },
      {
        title: "Positive tokens",
        unit: "share of the gradient",
        lines: [["policy/positive_gradient_share", "share"]],
      },
      {
        title: "Clipped",
        unit: "share of tokens",
        lines: [
          ["policy/clip_high_fraction", "high"],
          ["policy/clip_low_fraction", "low"],
        ],
      },
      { title: "Ratio", unit: "mean", lines: [["policy/ratio_mean", "ratio"]] },
    ],
  ],
  [
    "What to watch",
    [
      {
        title: "Length",
        unit: "tokens, against training accuracy",
        against: "accuracy/mean",
        lines: [["response_length/mean", "length"]],
      },
      {
        title: "Entropy",
        unit: "nats, against training accuracy",
        against: "accuracy/mean",
        lines: [["policy/entropy", "entropy"]],
      },
      {
        title: "Looking back",
        unit: "share of responses with the phrase",
        lines: [
          ["reflection/response_share", "any phrase"],
          ...metricsBelow("reflection/", ["reflection/response_share"]),
        ],
      },
    ],
  ],
  [
    "Optimizer",
    [
      { title: "Loss", unit: "", lines: [["policy/loss", "loss"]] },
      { title: "Gradient norm", unit: "before clipping", lines: [["policy/grad_norm", "norm"]] },
      { title: "Learning rate", unit: "", lines: [["policy/lr", "rate"]] },
      { title: "Skipped updates", unit: "a step", lines: [["policy/skipped_updates", "skipped"]] },
    ],
  ],
  [
    "Sampling",
    [
      {
        title: "Groups",
        unit: "a step",
        lines: [
          ["groups/sampled", "sampled"],
          ["groups/kept", "kept"],
        ],
      },
      {
        title: "Groups without signal",
        unit: "a step",
        lines: [
          ["groups/all_correct", "all correct"],
          ["groups/all_wrong", "all wrong"],
        ],
      },
      {
        title: "Reserve",
        unit: "groups a step",
        lines: [
          ["groups/from_reserve", "taken from"],
          ["groups/to_reserve", "put in"],
        ],
      },
      {
        title: "Tokens",
        unit: "a step",
        lines: [
          ["tokens/generated", "generated"],
          ["tokens/trained", "trained on"],
          ["tokens/stopped", "of stopped responses"],
        ],
        band: ["tokens/generated", "tokens/trained", "not trained on"],
      },
      {
        title: "Groups not used",
        unit: "a step",
        lines: [
          ["groups/stopped", "stopped"],
          ["groups/dropped", "dropped"],
        ],
      },
      {
        title: "Groups left for later",
        unit: "a step",
        lines: [
          ["groups/carried", "carried on"],
          ["groups/resting", "resting"],
        ],
      },
    ],
  ],
  [
    "Long tail",
    [
      {
        title: "Time of a group",
        unit: "seconds",
        lines: [
          ["time/group_p50_s", "median"],
          ["time/group_p95_s", "95th percentile"],
          ["time/group_max_s", "slowest"],
        ],
        band: ["time/group_p95_s", "time/group_p50_s"],
      },
      {
        title: "Use of the engines",
        unit: "share",
        lines: [
          ["rollout/engine_busy_share", "of their time"],
          ["rollout/slot_use", "of their places"],
        ],
      },
      {
        title: "Speed of an engine",
        unit: "tokens/s",
        lines: [
          ["rollout/tokens_per_s_max", "fastest"],
          ["rollout/tokens_per_s_min", "slowest"],
        ],
      },
      {
        title: "Key-value cache",
        unit: "largest share in use",
        lines: [["rollout/kv_use_max", "in use"]],
      },
      {
        title: "Preemptions",
        unit: "responses put back",
        lines: [["rollout/preemptions", "put back"]],
      },
    ],
  ],
  [
    "Staleness",
    [
      {
        title: "Stale tokens",
        unit: "share of those trained on",
        lines: [["staleness/token_share", "stale"]],
      },
      {
        title: "Age",
        unit: "policy versions",
        lines: [
          ["staleness/mean", "mean"],
          ["staleness/max", "largest"],
        ],
      },
      {
        title: "Drift of stale tokens",
        unit: "|log-prob change|, nats",
        log: true,
        lines: [
          ["staleness/logprob_drift_max", "largest"],
          ["staleness/logprob_drift_mean", "mean"],
        ],
      },
      {
        title: "Importance weights",
        unit: "share of weighted tokens",
        lines: [
          ["staleness/weight_truncated_share", "truncated"],
          ["staleness/weight_masked_share", "masked"],
        ],
      },
    ],
  ],
  [
    "Exactness and speed",
    [
      {
        title: "Parity",
        unit: "|trainer - engine|, nats",
        log: true,
        lines: [
          ["parity/logprob_abs_max", "largest"],
          ["parity/logprob_abs_mean", "mean"],
        ],
        bound: "logprob_abs_max",
      },
      {
        title: "Parity by cause",
        unit: "largest, nats",
        log: true,
        lines: [
          ["parity/engine_abs_max", "engine"],
          ["parity/batch_shape_abs_max", "batch shape"],
        ],
      },
      {
        title: "First ratio",
        unit: "largest |ratio - 1|",
        lines: [["policy/ratio_first_max_error", "error"]],
        bound: "ratio_first_max_error",
      },
      { title: "Speed", unit: "tokens/s", lines: [["tokens_per_s", "generated"]] },
    ],
  ],
  [
    "Balance",
    [
      {
        title: "Engines",
        unit: "tokens generated",
        lines: [
          ["rollout/engine_tokens_max", "most"],
          ["rollout/engine_tokens_min", "least"],
        ],
      },
      {
        title: "Engines",
        unit: "seconds busy",
        lines: [
          ["time/engine_max_s", "longest"],
          ["time/engine_min_s", "shortest"],
        ],
      },
      {
        title: "Trainer ranks",
        unit: "tokens computed",
        lines: [
          ["train/rank_tokens_max", "most"],
          ["train/rank_tokens_min", "least"],
        ],
      },
      {
        title: "Trainer ranks",
        unit: "seconds, old log-probs",
        lines: [
          ["time/rank_logprobs_max_s", "longest"],
          ["time/rank_logprobs_min_s", "shortest"],
        ],
      },
      {
        title: "Main memory",
        unit: "MiB of a process, or of all of an engine",
        lines: [
          ["memory/engine_max_mib", "engine, most"],
          ["memory/engine_min_mib", "engine, least"],
          ["memory/rank_max_mib", "trainer rank, most"],
          ["memory/rank_min_mib", "trainer rank, least"],
          ["memory/driver_mib", "driver"],
        ],
      },
    ],
  ],
];

// The phases in the order they happen: those of time/step_s, then what comes between steps.
// Scoring runs beside the rollout, so it is a line.
const IN_STEP = [
  ["time/rollout_s", "rollout"],
  ["time/train_s", "train"],
  ["time/sync_s", "publish weights"],
];
const BETWEEN = [
  ["time/evaluate_s", "evaluate"],
  ["time/checkpoint_s", "checkpoint of the step before"],
];
const PHASES = [...IN_STEP, ...BETWEEN];
const BESIDE = ["time/reward_s", "scoring, beside the rollout"];
