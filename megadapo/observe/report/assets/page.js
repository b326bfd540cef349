// Puts the parts on the page, and draws them again when the theme or the shown runs change.

const THEMES = ["system", "light", "dark"];
const systemDark = matchMedia("(prefers-color-scheme: dark)");

const RELOAD_MS = 3000;

function drawCharts() {
  const zoom = zoomedSteps();
  destroyPlots();
  drawCurves();
  drawTime();
  drawDistributions();
  if (zoom) zoomTo(zoom);
}

/** Ask the server of a live page for newer contents, again and again. */
async function reload() {
  const node = document.getElementById("live");
  try {
    const known = { "If-None-Match": data.live };
    const answer = await fetch("data.json", { headers: known });
    if (answer.ok) update(await answer.json());
    else if (answer.status !== 304) throw new Error(await answer.text());
    node.textContent = `live, ${new Date().toLocaleTimeString("en-GB")}`;
  } catch (error) {
    node.textContent = `not live: ${error.message}`;
  }
  setTimeout(reload, RELOAD_MS);
}

/** Draw newer contents; what the window shows stays where it is. */
function update(contents) {
  const parts = [...document.querySelectorAll("main > section")];
  const top = (part) => part.getBoundingClientRect().top;
  const shown = parts.findLast((part) => top(part) < innerHeight / 2) ?? parts[0];
  const [before, place] = [data.groups, top(shown)];
  ({ data, chunks } = contents);
  drawOverview();
  drawCharts();
  updateResponses(before);
  scrollBy(0, top(shown) - place);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = `Theme: ${theme}`;
  drawCharts();
}

function nextTheme() {
  const present = document.documentElement.dataset.theme;
  setTheme(THEMES[(THEMES.indexOf(present) + 1) % THEMES.length]);
}

function runToggle(run, index) {
  const toggle = (event) => {
    runShown[index] = !runShown[index];
    event.currentTarget.setAttribute("aria-pressed", String(runShown[index]));
    drawCharts();
    if (data.groups.length) applyFilters();
  };
  return el(
    "button",
    {
      type: "button",
      class: "run-toggle",
      "aria-pressed": "true",
      title: run.folder,
      onclick: toggle,
    },
    swatch(index),
    run.name,
  );
}

document.title = `${data.runs.map((run) => run.name).join(", ")} - megadapo report`;
if (severalRuns) document.getElementById("run-toggles").append(...data.runs.map(runToggle));
document.getElementById("theme").addEventListener("click", nextTheme);
const written = `Written by megadapo ${data.version} on ${data.written}.`;
const source = data.live ? "the run's own server" : "nothing from the network";
document.getElementById("footer").textContent = `${written} It loads ${source}.`;
systemDark.addEventListener("change", drawCharts);
drawTables();
drawOverview();
setTheme("system");
drawResponses();
if (data.live) setTimeout(reload, RELOAD_MS);
