// One metric against another, a point for each step: uPlot's x is then no step.

function drawAgainst(grid, panel) {
  const [[metric, label]] = Object.entries(panel.lines);
  const points = data.runs.flatMap((run, index) => pointsOf(run, index, panel.against, metric));
  // uPlot wants ascending x, of which several may be equal
  points.sort((a, b) => a.x - b.x);
  const box = panelBox(grid, panel.title, panel.unit, [], [], meanings(panel));
  if (!points.length) return;
  const ofRun = (run) => points.map((point) => (point.run === run ? point.y : null));
  addPlot(box, {
    table: [points.map((point) => point.x), ...data.runs.map((_, run) => ofRun(run))],
    series: data.runs.map((_, run) => pointSeries(seriesColour(run), lineLabel(run, label))),
    overSteps: false,
    read: (_, index) => readPoint(points[index], label, panel.unit.split("against ").pop()),
  });
}

function pointsOf(run, index, xMetric, yMetric) {
  const [xs, ys] = [xMetric, yMetric].map((metric) => run.series[metric]);
  if (!xs || !ys || !runShown[index]) return [];
  const xAt = new Map(xs.steps.map((step, i) => [step, xs.values[i]]));
  return ys.steps
    .map((step, i) => ({ run: index, step, x: xAt.get(step) ?? null, y: ys.values[i] }))
    .filter(({ x, y }) => x !== null && y !== null);
}

const pointSeries = (colour, label) => ({
  label,
  mark: colour,
  stroke: colour,
  width: 0,
  paths: () => null,
  points: { show: true, size: 6, fill: colour, stroke: colour },
});

function readPoint({ run, step, x, y }, label, labelOfX) {
  const name = severalRuns ? `${data.runs[run].name}, step` : "step";
  return [
    el("b", {}, `${name} ${formatNumber(step)}`),
    el(
      "div",
      { class: "tip-rows" },
      tipRow(seriesColour(run), label, formatNumber(y)),
      tipRow(null, labelOfX, formatNumber(x)),
    ),
  ];
}
