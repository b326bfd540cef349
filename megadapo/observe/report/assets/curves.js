// The curves: every metric over the steps, all runs on one axis; and the time of a step.

// [heading, panels]; a panel: title, unit, lines [metric, label], and how it is drawn.
const CURVES = [
  [
    "Learning",
    [
      { title: "Accuracy", unit: "share of responses", lines: [["accuracy/mean", "training"]], heldOut: true },
      {
        title: "Reward",
        unit: "mean of a response",
        lines: [
          ["reward/mean", "rule"],
          ["reward/shaped_mean", "shaped"],
          ["reward/overlong_penalty_mean", "overlong penalty"],
        ],
      },
      {
        title: "Response length",
        unit: "tokens",
        lines: [["response_length/mean", "mean"], ["response_length/p95", "95th percentile"]],
      },
      { title: "Truncated", unit: "share of responses", lines: [["response_length/truncated_fraction", "truncated"]] },
    ],
  ],
  [
    "Policy",
    [
      { title: "Entropy", unit: "nats a token", lines: [["policy/entropy", "entropy"]] },
      { title: "Token probability", unit: "mean", lines: [["policy/token_probability_mean", "probability"]] },
      {
        title: "Clipped",
        unit: "share of tokens",
        lines: [["policy/clip_high_fraction", "high"], ["policy/clip_low_fraction", "low"]],
      },
      { title: "Ratio", unit: "mean", lines: [["policy/ratio_mean", "ratio"]] },
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
      { title: "Groups", unit: "a step", lines: [["groups/sampled", "sampled"], ["groups/kept", "kept"]] },
      {
        title: "Groups without signal",
        unit: "a step",
        lines: [["groups/all_correct", "all correct"], ["groups/all_wrong", "all wrong"]],
      },
      {
        title: "Reserve",
        unit: "groups a step",
        lines: [["groups/from_reserve", "taken from"], ["groups/to_reserve", "put in"]],
      },
      {
        title: "Tokens",
        unit: "a step",
        lines: [["tokens/generated", "generated"], ["tokens/trained", "trained on"]],
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
        lines: [["parity/logprob_abs_max", "largest"], ["parity/logprob_abs_mean", "mean"]],
        bound: "logprob_abs_max",
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
        lines: [["rollout/engine_tokens_max", "most"], ["rollout/engine_tokens_min", "least"]],
      },
      {
        title: "Engines",
        unit: "seconds busy",
        lines: [["time/engine_max_s", "longest"], ["time/engine_min_s", "shortest"]],
      },
      {
        title: "Trainer ranks",
        unit: "tokens computed",
        lines: [["train/rank_tokens_max", "most"], ["train/rank_tokens_min", "least"]],
      },
      {
        title: "Trainer ranks",
        unit: "seconds, old log-probs",
        lines: [["time/rank_logprobs_max_s", "longest"], ["time/rank_logprobs_min_s", "shortest"]],
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
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

function drawCurves() {
  const hint = `Over the steps. Drag to zoom, double-click to see all steps again. ${thinningNote()}`;
  const node = section("curves", "Curves", hint);
  for (const [heading, panels] of [...CURVES, ["Other metrics", otherPanels()]]) {
    const shown = panels.filter(isMeasured);
    if (!shown.length) continue;
    const grid = el("div", { class: "panels" });
    node.append(el("h3", {}, heading), grid);
    shown.forEach((panel) => drawPanel(grid, panel));
  }
}

function thinningNote() {
  const curves = data.runs.flatMap((run) => Object.values(run.series));
  const longest = Math.max(...curves.map((curve) => curve.num_measured));
  if (!curves.some((curve) => curve.num_measured > curve.steps.length)) return "";
  return `Of ${plural(longest, "step")}, only the lowest and highest value of each short stretch is drawn.`;
}

const isMeasured = (panel) =>
  data.runs.some((run) => panel.lines.some(([metric]) => metric in run.series) || (panel.heldOut && run.evaluations.length));

/** Metrics that no panel above names: each gets its own. */
function otherPanels() {
  const named = new Set(CURVES.flatMap(([, panels]) => panels.flatMap((panel) => panel.lines.map(([metric]) => metric))));
  for (const [metric] of [...PHASES, BESIDE, ["time/step_s"]]) named.add(metric);
  const metrics = new Set(data.runs.flatMap((run) => Object.keys(run.series)));
  return [...metrics].filter((metric) => !named.has(metric)).map((metric) => ({ title: metric, unit: "", lines: [[metric, metric]] }));
}

function panelBox(grid, title, unit, legend, notes) {
  const box = el("div", { class: "plot" });
  const head = el("div", { class: "panel-head" }, el("h4", {}, title), el("span", { class: "unit" }, unit));
  const panel = el("figure", { class: "panel" }, head, el("div", { class: "legend" }, ...legend), box);
  if (notes.length) panel.append(el("figcaption", { class: "note" }, notes.join(" ")));
  grid.append(panel);
  return box;
}

function legendItem(label, colour, dash, isPoint = false) {
  const ns = "http://www.w3.org/2000/svg";
  const icon = document.createElementNS(ns, "svg");
  icon.setAttribute("viewBox", "0 0 22 8");
  const line = document.createElementNS(ns, "line");
  const attributes = { x1: 0, y1: 4, x2: 22, y2: 4, stroke: colour, "stroke-width": 2, "stroke-dasharray": dash.join(" ") };
  for (const [key, value] of Object.entries(attributes)) line.setAttribute(key, value);
  icon.append(line);
  if (isPoint) {
    const dot = document.createElementNS(ns, "circle");
    for (const [key, value] of Object.entries({ cx: 11, cy: 4, r: 3.5, fill: colour })) dot.setAttribute(key, value);
    icon.append(dot);
  }
  return el("span", {}, icon, label);
}

function drawPanel(grid, panel) {
  const present = panel.lines.filter(([metric]) => data.runs.some((run) => metric in run.series));
  // A logarithmic axis has no place for 0; without anything above it the axis is linear.
  const isPositive = ([metric]) => data.runs.some((run) => run.series[metric]?.values.some((value) => value > 0));
  const log = Boolean(panel.log) && present.some(isPositive);
  const layout = { tables: [], series: [], bands: [], legend: [], notes: [], log };
  present.forEach(([metric, label], line) => addMetric(layout, metric, label, line));
  if (panel.heldOut) addHeldOut(layout, present.length);
  if (panel.bound) addBound(layout, panel.bound);
  const shownLegend = layout.legend.length > 1 ? layout.legend : [];
  const box = panelBox(grid, panel.title, panel.unit, shownLegend, layout.notes);
  if (!layout.tables.length) return;
  addPlot(box, { table: uPlot.join(layout.tables), series: layout.series, bands: layout.bands, log });
}

/** Lines are told apart by colour; with several runs colour means the run, and dashes the line. */
function lineStyle(run, line) {
  return severalRuns
    ? { colour: seriesColour(run), dash: DASHES[line % DASHES.length], legend: cssColour("--muted") }
    : { colour: seriesColour(line), dash: [], legend: seriesColour(line) };
}

const lineLabel = (run, label) => (severalRuns ? `${data.runs[run].name}, ${label}` : label);

function addMetric(layout, metric, label, line) {
  const style = lineStyle(0, line);
  layout.legend.push(legendItem(label, style.legend, style.dash));
  data.runs.forEach((run, index) => {
    const curve = run.series[metric];
    if (!curve || !runShown[index]) return;
    const { colour, dash } = lineStyle(index, line);
    layout.tables.push([curve.steps, layout.log ? curve.values.map((v) => (v > 0 ? v : null)) : curve.values]);
    layout.series.push({
      label: lineLabel(index, label),
      mark: colour,
      stroke: colour,
      width: 1.75,
      dash,
      points: { show: curve.steps.length < 3, size: 6, fill: colour },
    });
    layout.notes.push(...curveNotes(curve, lineLabel(index, label), layout.log));
  });
}

function curveNotes(curve, label, log) {
  const notes = [];
  if (curve.num_not_finite) notes.push(`${label}: ${plural(curve.num_not_finite, "value")} not finite.`);
  if (log && curve.values.some((value) => value === 0)) notes.push(`${label}: 0 is not shown.`);
  return notes;
}

function addHeldOut(layout, line) {
  const style = lineStyle(0, line);
  if (data.runs.some((run) => run.evaluations.length))
    layout.legend.push(legendItem("held out \u00b1 s.e.", style.legend, style.dash, true));
  data.runs.forEach((run, index) => {
    if (!run.evaluations.length || !runShown[index]) return;
    const { colour, dash } = lineStyle(index, line);
    const steps = run.evaluations.map((e) => e.step);
    const shifted = (sign) => run.evaluations.map((e) => (e.accuracy === null ? null : e.accuracy + sign * e.standard_error));
    const errors = new Map(run.evaluations.map((e) => [e.step, e.standard_error]));
    const first = layout.series.length + 1;
    layout.tables.push([steps, shifted(1)], [steps, shifted(-1)], [steps, shifted(0)]);
    const edge = { quiet: true, stroke: "transparent", width: 0, points: { show: false } };
    layout.series.push({ ...edge }, { ...edge });
    layout.series.push({
      label: lineLabel(index, "held out"),
      mark: colour,
      stroke: colour,
      width: 1.75,
      dash,
      points: { show: true, size: 7, fill: colour, stroke: colour },
      text: (accuracy, _, step) => `${formatNumber(accuracy)} \u00b1 ${formatNumber(errors.get(step))}`,
    });
    layout.bands.push({ series: [first, first + 1], fill: faded(colour, 0.16) });
  });
}

function addBound(layout, key) {
  data.runs.forEach((run, index) => {
    const bound = run.verdicts.find((verdict) => verdict.key === key)?.bound ?? null;
    if (bound === null || !runShown[index] || (layout.log && bound <= 0)) return;
    const colour = severalRuns ? seriesColour(index) : cssColour("--bad");
    if (!layout.legend.some((item) => item.textContent === "bound"))
      layout.legend.push(legendItem("bound", severalRuns ? cssColour("--muted") : colour, [1, 3]));
    layout.tables.push([[run.first_step, run.last_step], [bound, bound]]);
    layout.series.push({
      label: lineLabel(index, "bound"),
      mark: colour,
      stroke: colour,
      width: 1.25,
      dash: [1, 3],
      points: { show: false },
    });
  });
}

function drawTime() {
  const shown = data.runs.filter((run) => "time/step_s" in run.series || "time/rollout_s" in run.series);
  const node = section("time", "Time of a step", "Seconds of each phase, on top of each other.");
  if (!shown.length) return void node.append(el("p", { class: "empty" }, "No times were measured."));
  const grid = el("div", { class: "panels wide" });
  node.append(grid);
  shown.forEach((run) => runShown[data.runs.indexOf(run)] && drawPhases(grid, run));
}

function drawPhases(grid, run) {
  const phases = PHASES.filter(([metric]) => metric in run.series);
  const curve = (metric) => [run.series[metric].steps, run.series[metric].values];
  const metrics = [...phases.map(([metric]) => metric), ...["time/step_s", BESIDE[0]].filter((m) => m in run.series)];
  const [steps, ...columns] = uPlot.join(metrics.map(curve));
  const value = Object.fromEntries(metrics.map((metric, i) => [metric, columns[i]]));
  const layers = phases.map(([metric, label]) => ({ label, values: steps.map((_, i) => value[metric][i] ?? 0) }));
  const inside = (i) => IN_STEP.reduce((sum, [metric]) => sum + (value[metric]?.[i] ?? 0), 0);
  const rest = steps.map((_, i) => Math.max(0, (value["time/step_s"]?.[i] ?? 0) - inside(i)));
  if (rest.some((seconds) => seconds > 0.01)) layers.push({ label: "rest of the step", values: rest });
  drawStack(grid, run, steps, layers, value[BESIDE[0]]);
}

function drawStack(grid, run, steps, layers, beside) {
  const colours = layers.map((_, i) => seriesColour(i));
  const tops = [];
  layers.forEach((layer, i) => tops.push(layer.values.map((v, s) => v + (i ? tops[i - 1][s] : 0))));
  // The highest sum is drawn first, so that each area covers only its own layer's band.
  const order = layers.map((_, i) => layers.length - 1 - i);
  const series = order.map((i) => ({
    label: layers[i].label,
    mark: colours[i],
    stroke: colours[i],
    width: 1,
    fill: i === 0 ? faded(colours[i], 0.75) : undefined,
    points: { show: steps.length < 3 },
    text: (_, index) => `${formatNumber(layers[i].values[index])} s`,
  }));
  const bands = order.slice(0, -1).map((i, at) => ({ series: [at + 1, at + 2], fill: faded(colours[i], 0.75) }));
  const table = [steps, ...order.map((i) => tops[i])];
  const legend = layers.map((layer, i) => legendItem(layer.label, colours[i], []));
  if (beside) {
    table.push(beside);
    const ink = cssColour("--ink");
    series.push({
      label: BESIDE[1],
      mark: ink,
      stroke: ink,
      width: 1.5,
      dash: [4, 3],
      points: { show: false },
      text: (seconds) => `${formatNumber(seconds)} s`,
    });
    legend.push(legendItem(BESIDE[1], ink, [4, 3]));
  }
  const box = panelBox(grid, severalRuns ? run.name : "Phases", "seconds", legend, []);
  const yRange = (_, low, high) => [0, (high || 1) * 1.08];
  addPlot(box, { table, series, bands, yRange });
}
