// Puts the parts on the page, and draws them again when the theme or the shown runs change.

const THEMES = ["system", "light", "dark"];
const systemDark = matchMedia("(prefers-color-scheme: dark)");

function drawCharts() {
  destroyPlots();
  drawCurves();
  drawTime();
  drawDistributions();
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
document.getElementById("footer").textContent = `${written} It loads nothing from the network.`;
systemDark.addEventListener("change", drawCharts);
drawTables();
drawOverview();
setTheme("system");
drawResponses();
