// One chart: uPlot with our axes, a tooltip, and a crosshair that all charts share.

const PLOT_HEIGHT = 190;
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const crosshair = uPlot.sync("steps");
const plots = new Set();

const observer = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const plot = target.plot;
    if (plot && contentRect.width > 0 && plot.width !== contentRect.width)
      plot.setSize({ width: contentRect.width, height: plot.height });
  }
});

/** The steps that the charts show after a drag over one of them; null for all. */
function zoomedSteps() {
  for (const { overSteps, scales, data: [steps] } of plots) {
    const { min, max } = scales.x;
    if (overSteps && (min > steps[0] || max < steps.at(-1))) return { min, max };
  }
  return null;
}

function zoomTo(steps) {
  for (const plot of plots) if (plot.overSteps) plot.setScale("x", steps);
}

function destroyPlots() {
  for (const plot of plots) {
    observer.unobserve(plot.root.parentNode);
    crosshair.unsub(plot);
    plot.destroy();
  }
  plots.clear();
}

function axes(log, grid, overSteps) {
  const common = () => ({
    stroke: cssColour("--muted"),
    font: FONT,
    grid: { show: grid, stroke: cssColour("--grid"), width: 1 },
    ticks: { show: false },
  });
  return [
    {
      ...common(),
      grid: { show: false },
      size: 26,
      space: 56,
      values: (_, ticks) => ticks.map(overSteps ? stepTick : formatTick),
    },
    {
      ...common(),
      size: 54,
      values: (_, ticks) => ticks.map(formatTick),
      ...(log ? { filter: decades, space: 18 } : { space: 30 }),
    },
  ];
}

const stepTick = (value) => (Number.isInteger(value) ? formatTick(value) : "");

/** A logarithmic axis has lines at whole decades only. */
function decades(_, ticks) {
  const isDecade = (value) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6;
  return ticks.map((value) => (isDecade(value) ? value : null));
}

/** A range with some room, that stays put for a constant. */
function linearRange(_, low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high)
    return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, low + Math.abs(low) * 0.1];
  return uPlot.rangeNum(low, high, 0.08, true);
}

function logRange(_, low, high) {
  if (low === null || high === null) return [1e-6, 1];
  return [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high * 1.0001))];
}

/** One step to each side, so that a run of a single step is seen. */
function stepRange(_, low, high) {
  if (low === null || high === null) return [0, 1];
  return low === high ? [low - 1, high + 1] : [low, high];
}

/**
 * Draw into `box`. `series` are uPlot's, each with a label; those with `quiet` stay out of the
 * tooltip. `read(plot, index)` may give the tooltip's lines instead; `under` paints below all.
 */
function addPlot(
  box,
  {
    table,
    series,
    bands = [],
    log = false,
    yRange = null,
    grid = true,
    under = [],
    read = null,
    overSteps = true,
  },
) {
  const options = {
    width: Math.max(box.clientWidth, 120),
    height: PLOT_HEIGHT,
    padding: [8, 16, 0, 0],
    legend: { show: false },
    scales: {
      x: { time: false, range: stepRange },
      y: log ? { distr: 3, range: logRange } : { range: yRange ?? linearRange },
    },
    axes: axes(log, grid, overSteps),
    series: [{ label: "step" }, ...series],
    bands,
    cursor: {
      ...(overSteps ? { sync: { key: "steps", scales: ["x", null] } } : {}),
      points: { size: (plot, index) => (plot.series[index].quiet ? 0 : 7) },
      drag: { x: true, y: false },
      y: false,
    },
    hooks: { drawClear: under },
    plugins: [tooltip(read)],
  };
  const plot = new uPlot(options, table, box);
  box.plot = plot;
  plot.overSteps = overSteps;
  plots.add(plot);
  if (overSteps) crosshair.sub(plot);
  observer.observe(box);
  return plot;
}

function tooltip(read) {
  const node = el("div", { class: "floating chart-tip", hidden: true });
  let hovered = false;
  const hide = () => {
    hovered = false;
    node.hidden = true;
  };
  return {
    hooks: {
      init: (plot) => {
        plot.over.append(node);
        plot.over.addEventListener("mouseenter", () => (hovered = true));
        plot.over.addEventListener("mouseleave", hide);
      },
      setCursor: (plot) => {
        const { idx, left } = plot.cursor;
        const lines = hovered && idx !== null && left >= 0 ? (read ?? readSeries)(plot, idx) : [];
        node.hidden = lines.length === 0;
        if (node.hidden) return;
        node.replaceChildren(...lines);
        placeNear(node, plot.cursor, plot.over);
      },
    },
  };
}

/** Place a tooltip beside the pointer, on the side on which the window has room for it. */
function placeNear(node, { left, top }, over) {
  const box = over.getBoundingClientRect();
  const fits = box.left + left + 14 + node.offsetWidth < document.documentElement.clientWidth - 8;
  const x = fits ? left + 14 : Math.max(left - 14 - node.offsetWidth, 8 - box.left);
  const lowest = over.clientHeight - node.offsetHeight + 20;
  const y = Math.min(Math.max(top - node.offsetHeight / 2, -20), lowest);
  node.style.transform = `translate(${Math.round(x)}px, ${Math.round(y)}px)`;
}

function readSeries(plot, index) {
  const rows = plot.series.slice(1).flatMap((line, i) => {
    const value = plot.data[i + 1][index];
    if (line.quiet || value === null || value === undefined) return [];
    return [
      tipRow(
        line.mark,
        line.label,
        line.text ? line.text(value, index, plot.data[0][index]) : formatNumber(value),
      ),
    ];
  });
  if (!rows.length) return [];
  return [
    el("b", {}, `step ${formatNumber(plot.data[0][index])}`),
    el("div", { class: "tip-rows" }, ...rows),
  ];
}

function tipRow(colour, label, text) {
  const mark = el("i", { class: "swatch" });
  if (colour) mark.style.background = colour;
  return el("div", {}, mark, el("span", {}, label), el("em", {}, text));
}
