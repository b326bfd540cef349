// The curves: every metric over the steps, all runs on one axis.

const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

function drawCurves() {
  const hint =
    "Over the steps; noisy values are pale, below their mean over the steps around. " +
    "Drag to zoom, double-click to see all steps again.";
  const node = section("curves", "Curves", `${hint} ${thinningNote()}`);
  for (const [heading, panels] of data.sections) {
    const drawn = panels.filter((panel) => !isZero(panel));
    if (!drawn.length) continue;
    const grid = el("div", { class: "panels" });
    node.append(el("h3", {}, heading), grid);
    drawn.forEach((panel) => (panel.against ? drawAgainst : drawPanel)(grid, panel));
  }
  node.append(el("p", { class: "note hidden-panels" }, hiddenPanels()));
}

/** The curves of a panel's metrics, of all runs. */
function curvesOf(panel) {
  const metrics = Object.keys(panel.lines);
  return data.runs.flatMap(({ series }) => metrics.flatMap((metric) => series[metric] ?? []));
}

/** Whether every value of a panel is 0. */
function isZero(panel) {
  const hasOthers = panel.held_out && data.runs.some((run) => run.evaluations.length);
  return !hasOthers && curvesOf(panel).every(({ values }) => values.every((v) => v === 0));
}

function hiddenPanels() {
  const zero = data.sections.flatMap(([, panels]) => panels.filter(isZero));
  const titles = [...new Set(zero.map((panel) => panel.title))].join(", ");
  const also = "Panels without any value are hidden too.";
  return titles ? `Hidden, as every value is 0: ${titles}. ${also}` : also;
}

const MIN_SMOOTHED = 20;

/** Whether a line turns often; a mean would only round the corners of another. */
function isNoisy({ values }) {
  const turns = values.filter((v, i) => (v - values[i - 1]) * (values[i + 1] - v) < 0).length;
  return values.length >= MIN_SMOOTHED && turns > values.length / 4;
}

/** The mean of a tenth of the values around each, fewer at the ends. */
function smoothed(values) {
  const most = Math.max(2, Math.round(values.length / 20));
  return values.map((_, i) => {
    const reach = Math.min(most, i, values.length - 1 - i);
    const near = values.slice(i - reach, i + reach + 1).filter((v) => v !== null);
    return near.length ? near.reduce((sum, v) => sum + v, 0) / near.length : null;
  });
}

function thinningNote() {
  const curves = data.runs.flatMap((run) => Object.values(run.series));
  const longest = Math.max(...curves.map((curve) => curve.num_measured));
  if (!curves.some((curve) => curve.num_measured > curve.steps.length)) return "";
  const steps = plural(longest, "step");
  return `Of ${steps}, only the lowest and highest value of each short stretch is drawn.`;
}

/** What the metrics of a panel mean, one line each. */
function meanings(panel) {
  const known = Object.keys(panel.lines).filter((metric) => metric in data.meanings);
  return known.map((metric) => `${metric}: ${data.meanings[metric]}`).join("\n");
}

function panelBox(grid, title, unit, legend, notes, meaning = "") {
  const box = el("div", { class: "plot" });
  const head = el(
    "div",
    { class: "panel-head", title: meaning || null },
    el("h4", {}, title),
    el("span", { class: "unit" }, unit),
  );
  const panel = el(
    "figure",
    { class: "panel" },
    head,
    el("div", { class: "legend" }, ...legend),
    box,
  );
  if (notes.length) panel.append(el("figcaption", { class: "note" }, notes.join(" ")));
  grid.append(panel);
  return box;
}

function legendItem(label, colour, dash, isPoint = false) {
  const ns = "http://www.w3.org/2000/svg";
  const icon = document.createElementNS(ns, "svg");
  icon.setAttribute("viewBox", "0 0 22 8");
  const line = document.createElementNS(ns, "line");
  const attributes = {
    x1: 0,
    y1: 4,
    x2: 22,
    y2: 4,
    stroke: colour,
    "stroke-width": 2,
    "stroke-dasharray": dash.join(" "),
  };
  for (const [key, value] of Object.entries(attributes)) line.setAttribute(key, value);
  icon.append(line);
  if (isPoint) {
    const dot = document.createElementNS(ns, "circle");
    for (const [key, value] of Object.entries({ cx: 11, cy: 4, r: 3.5, fill: colour }))
      dot.setAttribute(key, value);
    icon.append(dot);
  }
  return el("span", {}, icon, label);
}

function drawPanel(grid, panel) {
  const lines = Object.entries(panel.lines);
  // A logarithmic axis has no place for 0; without anything above it the axis is linear.
  const isPositive = ([metric]) =>
    data.runs.some((run) => run.series[metric]?.values.some((value) => value > 0));
  const log = Boolean(panel.log) && lines.some(isPositive);
  const layout = { tables: [], series: [], bands: [], legend: [], notes: [], log };
  layout.smooth = curvesOf(panel).some(isNoisy);
  lines.forEach(([metric, label], line) => addMetric(layout, metric, label, line));
  if (panel.band.length) addBand(layout, panel.band);
  if (panel.held_out) addHeldOut(layout, lines.length);
  if (panel.bound) addBound(layout, panel.bound);
  const shownLegend = layout.legend.length > 1 ? layout.legend : [];
  const box = panelBox(
    grid,
    panel.title,
    panel.unit,
    shownLegend,
    layout.notes,
    meanings(panel),
  );
  if (!layout.tables.length) return;
  addPlot(box, {
    table: uPlot.join(layout.tables),
    series: layout.series,
    bands: layout.bands,
    log,
  });
}

/** Lines are told apart by colour; with several runs colour means the run, and dashes the line. */
function lineStyle(run, line) {
  return severalRuns
    ? {
        colour: seriesColour(run),
        dash: DASHES[line % DASHES.length],
        legend: cssColour("--muted"),
      }
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
    const values = layout.log ? curve.values.map((v) => (v > 0 ? v : null)) : curve.values;
    const smooth = layout.smooth && values.length >= MIN_SMOOTHED;
    layout.tables.push([curve.steps, values]);
    layout.series.push({
      run: index,
      metric,
      label: lineLabel(index, label),
      mark: colour,
      stroke: smooth ? faded(colour, 0.35) : colour,
      width: smooth ? 1 : 1.75,
      dash: smooth ? [] : dash,
      points: { show: curve.steps.length < 3, size: 6, fill: colour },
    });
    if (smooth) {
      layout.tables.push([curve.steps, smoothed(values)]);
      const points = { show: false };
      layout.series.push({ quiet: true, stroke: colour, width: 1.75, dash, points });
    }
    layout.notes.push(...curveNotes(curve, lineLabel(index, label), layout.log));
  });
}

/** Fill between two metrics of each run that has both. */
function addBand(layout, [high, low, label]) {
  const fills = data.runs.flatMap((_, run) => {
    const at = (metric) =>
      layout.series.findIndex((line) => line.run === run && line.metric === metric);
    if (at(high) < 0 || at(low) < 0) return [];
    const fill = faded(layout.series[at(high)].mark, 0.16);
    // in uPlot's count the steps are series 0
    layout.bands.push({ series: [at(high) + 1, at(low) + 1], fill });
    return [fill];
  });
  if (!label || !fills.length) return;
  const mark = el("i", { class: "swatch" });
  mark.style.background = severalRuns ? faded(cssColour("--muted"), 0.3) : fills[0];
  layout.legend.push(el("span", {}, mark, label));
}

function curveNotes(curve, label, log) {
  const notes = [];
  if (curve.num_not_finite)
    notes.push(`${label}: ${plural(curve.num_not_finite, "value")} not finite.`);
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
    const shifted = (sign) =>
      run.evaluations.map((e) =>
        e.accuracy === null ? null : e.accuracy + sign * e.standard_error,
      );
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
      text: (accuracy, _, step) =>
        `${formatNumber(accuracy)} \u00b1 ${formatNumber(errors.get(step))}`,
    });
    layout.bands.push({ series: [first, first + 1], fill: faded(colour, 0.16) });
    [
      ["pass", [1, 3], (e) => e.pass_at?.[e.samples_per_problem] ?? null],
      ["cons", [6, 3, 1, 3], (e) => e.consensus],
    ].forEach(([what, dots, valueOf]) => {
      const samples = run.evaluations.at(-1).samples_per_problem;
      const values = run.evaluations.map(valueOf);
      if (samples === 1 || values.every((value) => value === null)) return;
      layout.tables.push([steps, values]);
      layout.series.push({
        label: lineLabel(index, `${what}@${samples}`),
        mark: colour,
        stroke: colour,
        width: 1.25,
        dash: dots,
        text: (value) => formatNumber(value),
      });
      if (index === 0) layout.legend.push(legendItem(`${what}@${samples}`, style.legend, dots));
    });
  });
}

function addBound(layout, key) {
  data.runs.forEach((run, index) => {
    const bound = run.verdicts.find((verdict) => verdict.key === key)?.bound ?? null;
    if (bound === null || !runShown[index] || (layout.log && bound <= 0)) return;
    const colour = severalRuns ? seriesColour(index) : cssColour("--bad");
    if (!layout.legend.some((item) => item.textContent === "bound"))
      layout.legend.push(legendItem("bound", severalRuns ? cssColour("--muted") : colour, [1, 3]));
    layout.tables.push([
      [run.first_step, run.last_step],
      [bound, bound],
    ]);
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
