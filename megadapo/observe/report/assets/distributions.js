// Heat maps: how response lengths and group accuracies are spread at every step.

function drawDistributions() {
  const node = section("distributions", "Distributions", distributionNote());
  const grid = el("div", { class: "panels wide" });
  data.saved.forEach((saved, index) => {
    if (!saved.length || !runShown[index]) return;
    const name = severalRuns ? `${data.runs[index].name}: ` : "";
    const run = data.runs[index];
    drawHeat(
      grid,
      `${name}Response length`,
      "tokens",
      saved.length,
      run.series["response_length/mean"],
      formatLength,
      "responses",
    );
    if (!saved.accuracy) return;
    drawHeat(
      grid,
      `${name}Accuracy of a group`,
      "share of its responses",
      saved.accuracy,
      run.series["accuracy/mean"],
      formatShare,
      "groups",
    );
  });
  node.append(
    grid.children.length ? grid : el("p", { class: "empty" }, "This run saved no responses."),
  );
}

function distributionNote() {
  const groups = data.saved.reduce((sum, saved) => sum + saved.num_groups, 0);
  if (!groups) return null;
  const responses = data.saved.reduce((sum, saved) => sum + saved.num_responses, 0);
  const saved = `Of ${plural(groups, "saved group")}, ${plural(responses, "response")}`;
  return `${saved}, of every kind; the line is the mean over all that were sampled. Click to read.`;
}

const formatLength = (low, high) =>
  high - low === 1 ? `${low} tokens` : `${low} to ${high - 1} tokens`;
const formatShare = (low, high) => `${Math.round(((low + high) / 2) * 100)} % correct`;

function drawHeat(grid, title, unit, heat, mean, format, noun) {
  const totals = heat.counts.map((rows) => rows.reduce((sum, count) => sum + count, 0));
  const shares = heat.counts.map((rows, i) => rows.map((count) => count / (totals[i] || 1)));
  const highest = Math.max(...shares.flat(), 1e-9);
  const bounds = columnBounds(heat.columns);
  const legend = [heatScale(highest, noun), legendItem("mean", cssColour("--heat-line"), [])];
  const box = panelBox(grid, title, unit, legend, []);
  const ramp = [cssColour("--heat-low"), cssColour("--heat-high")].map(channels);
  const paint = (plot) => {
    const { ctx } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
    ctx.clip();
    shares.forEach((rows, column) =>
      rows.forEach((share, row) => {
        if (share === 0) return;
        const [left, right] = bounds[column].map((x) => Math.round(plot.valToPos(x, "x", true)));
        const [bottom, top] = [heat.edges[row], heat.edges[row + 1]].map((y) =>
          Math.round(plot.valToPos(y, "y", true)),
        );
        ctx.fillStyle = mixed(ramp, (share / highest) ** 0.7);
        ctx.fillRect(left, top, Math.max(right - left, 1), Math.max(bottom - top, 1));
      }),
    );
    ctx.restore();
  };
  const colour = cssColour("--heat-line");
  const plot = addPlot(box, {
    // The outer bounds make the axis reach over the whole first and last column.
    table: uPlot.join([
      [
        [bounds[0][0], bounds.at(-1)[1]],
        [null, null],
      ],
      mean ? [mean.steps, mean.values] : [[], []],
    ]),
    series: [{}, { label: "mean", stroke: colour, width: 2, points: { show: false } }],
    yRange: () => [heat.edges[0], heat.edges.at(-1)],
    grid: false,
    under: [paint],
    read: (plot) => readHeat(plot, heat, bounds, format, noun),
  });
  onClick(plot, () => openStep(columnAt(plot, bounds), heat.columns));
}

/** Call back for a click that is not the end of a drag. */
function onClick(plot, callback) {
  let pressed = 0;
  plot.over.addEventListener("mousedown", (event) => (pressed = event.clientX));
  plot.over.addEventListener(
    "click",
    (event) => Math.abs(event.clientX - pressed) < 4 && callback(),
  );
}

/** Show the responses of a column, of its first step that has any on the page. */
function openStep(column, columns) {
  if (column < 0) return;
  const [first, last] = columns[column];
  const step = data.groups.map((group) => group.step).find((at) => at >= first && at <= last);
  if (step === undefined) return;
  view.step.value = String(step);
  changed();
  document.getElementById("responses").scrollIntoView();
}

function columnAt(plot, bounds) {
  const x = plot.posToVal(plot.cursor.left, "x");
  return bounds.findIndex(([left, right]) => x >= left && x < right);
}

/** Each column reaches half the way to its neighbours. */
function columnBounds(columns) {
  return columns.map(([first, last], i) => [
    i ? (columns[i - 1][1] + first) / 2 : first - 0.5,
    i < columns.length - 1 ? (last + columns[i + 1][0]) / 2 : last + 0.5,
  ]);
}

function heatScale(highest, noun) {
  const bar = el("i", { class: "ramp" });
  return el("span", {}, "0", bar, `${Math.round(highest * 100)} % of a step's ${noun}`);
}

function readHeat(plot, heat, bounds, format, noun) {
  const y = plot.posToVal(plot.cursor.top, "y");
  const column = columnAt(plot, bounds);
  const row = heat.edges.findIndex((edge, i) => y >= edge && y < heat.edges[i + 1]);
  if (column < 0 || row < 0) return [];
  const [first, last] = heat.columns[column];
  const total = heat.counts[column].reduce((sum, count) => sum + count, 0);
  return [
    el("b", {}, first === last ? `step ${first}` : `steps ${first} to ${last}`),
    el("div", {}, format(heat.edges[row], heat.edges[row + 1])),
    el("div", {}, `${heat.counts[column][row]} of ${total} ${noun}`),
  ];
}

const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const mixed = ([low, high], share) =>
  `rgb(${low.map((value, i) => Math.round(value + (high[i] - value) * share)).join(" ")})`;
