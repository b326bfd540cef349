// What every part uses: the data, elements, numbers as text, colours of the present theme.
// Whatever came out of a model enters the page as text nodes only, never as markup.

let data = JSON.parse(document.getElementById("data").textContent);
const severalRuns = data.runs.length > 1;

/** Make an element; children are nodes, or strings that become text. */
function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null) node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((child) => child !== null));
  return node;
}

function section(id, title, note = null) {
  const head = el("div", { class: "section-head" }, el("h2", {}, title));
  if (note) head.append(el("p", { class: "note" }, note));
  const node = document.getElementById(id);
  node.replaceChildren(head);
  return node;
}

function formatNumber(value) {
  if (value === null || value === undefined) return "-";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e7) return Number(value.toPrecision(3)).toExponential();
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

/** Short form for axes: no more digits than a tick needs. */
function formatTick(value) {
  if (value === null || value === undefined) return null;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential().replace(/(\.\d)\d*e/, "$1e");
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  return String(Number(value.toPrecision(6)));
}

const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

const probe = document.body.appendChild(el("i", { hidden: true }));

/** A colour of the style sheet in the present theme, as #rrggbb. */
function cssColour(name) {
  probe.style.color = `var(${name})`;
  const channels = getComputedStyle(probe).color.match(/\d+/g).slice(0, 3);
  return `#${channels.map((value) => Number(value).toString(16).padStart(2, "0")).join("")}`;
}

const NUM_COLOURS = 7;
const seriesColour = (index) => cssColour(`--series-${(index % NUM_COLOURS) + 1}`);

/** Add opacity to a #rrggbb colour. */
function faded(colour, opacity) {
  return (
    colour +
    Math.round(opacity * 255)
      .toString(16)
      .padStart(2, "0")
  );
}

/** Whether each run is shown; the switches are in the bar. */
const runShown = data.runs.map(() => true);
