// The time of a step: its phases on top of each other, and what comes between steps.

// Phases in the order they happen. Scoring runs beside the rollout, so it is a line.
const IN_STEP = Object.keys(data.phases.in_step);
const PHASES = Object.entries({ ...data.phases.in_step, ...data.phases.between });
const [BESIDE] = Object.entries(data.phases.beside);

function drawTime() {
  const shown = data.runs.filter(
    (run) => "time/step_s" in run.series || "time/rollout_s" in run.series,
  );
  const node = section("time", "Time of a step", "Seconds of each phase, on top of each other.");
  if (!shown.length)
    return void node.append(el("p", { class: "empty" }, "No times were measured."));
  const grid = el("div", { class: "panels wide" });
  node.append(grid);
  shown.forEach((run) => runShown[data.runs.indexOf(run)] && drawPhases(grid, run));
}

function drawPhases(grid, run) {
  const phases = PHASES.filter(([metric]) => metric in run.series);
  const curve = (metric) => [run.series[metric].steps, run.series[metric].values];
  const metrics = [
    ...phases.map(([metric]) => metric),
    ...["time/step_s", BESIDE[0]].filter((m) => m in run.series),
  ];
  const [steps, ...columns] = uPlot.join(metrics.map(curve));
  const value = Object.fromEntries(metrics.map((metric, i) => [metric, columns[i]]));
  const layers = phases.map(([metric, label]) => ({
    label,
    values: steps.map((_, i) => value[metric][i] ?? 0),
  }));
  const inside = (i) => IN_STEP.reduce((sum, metric) => sum + (value[metric]?.[i] ?? 0), 0);
  const rest = steps.map((_, i) => Math.max(0, (value["time/step_s"]?.[i] ?? 0) - inside(i)));
  if (rest.some((seconds) => seconds > 0.01))
    layers.push({ label: "rest of the step", values: rest });
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
  const bands = order
    .slice(0, -1)
    .map((i, at) => ({ series: [at + 1, at + 2], fill: faded(colours[i], 0.75) }));
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
