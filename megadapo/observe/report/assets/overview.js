// Overview: what each run is, before and after, the oracles, the configuration.

function drawOverview() {
  const node = document.getElementById("overview");
  const isOpen = node.querySelector("details")?.open ?? false;
  node.replaceChildren(...(severalRuns ? [manyHeads()] : [oneHead(data.runs[0])]));
  const stack = (...cards) => el("div", { class: "stack" }, ...cards);
  const cards = severalRuns
    ? [oracles(), stack(beforeAfter(), costs())]
    : [stack(oracles(), costs()), beforeAfter()];
  node.append(el("div", { class: "columns" }, ...cards), configuration(isOpen));
}

function oneHead(run) {
  return el(
    "div",
    { class: "head" },
    el("h1", {}, run.name),
    el("p", { class: "subtitle" }, run.title),
    warnings(run),
  );
}

function warnings(run) {
  return run.warnings.map((text) => el("p", { class: "warning" }, text));
}

const FACTS = {
  model: "model.path",
  start: "model.init",
  prompts: "data.train",
  "held out": "data.held_out",
  "prompts a step": "sampling.prompts_per_step",
  "responses a prompt": "sampling.responses_per_prompt",
  "response tokens, at most": "rollout.max_response_tokens",
  "learning rate": "trainer.optimizer.lr",
  dtype: "model.dtype",
  placement: "cluster.placement",
  seed: "run.seed",
  TP: "trainer.tensor_parallel",
  PP: "trainer.pipeline_parallel",
  CP: "trainer.context_parallel",
  DP: "trainer.data_parallel",
};

function facts({ config }) {
  const known = Object.entries(FACTS).filter(([, key]) => (config[key] ?? null) !== null);
  const fact = ([label, key]) =>
    el("div", {}, el("dt", {}, label), el("dd", {}, configText(config[key])));
  return el("dl", { class: "facts" }, known.map(fact));
}

function manyHeads() {
  const list = el("div", { class: "run-list" });
  data.runs.forEach((run, index) => {
    list.append(
      el(
        "div",
        { class: "run-line" },
        swatch(index),
        el("b", {}, run.name),
        el("span", {}, run.title),
      ),
      ...warnings(run),
    );
  });
  return el("div", { class: "head" }, el("h1", {}, `${data.runs.length} runs`), list);
}

function swatch(index) {
  const node = el("i", { class: "swatch" });
  node.style.background = `var(--series-${(index % NUM_COLOURS) + 1})`;
  return node;
}

function runCell(index) {
  return el("th", { class: "run", scope: "row" }, swatch(index), data.runs[index].name);
}

function card(title, ...children) {
  return el("div", { class: "card" }, el("h3", {}, title), ...children);
}

function beforeAfter() {
  const title = "Before and after";
  if (severalRuns) return card(title, comparison(data.runs.map((run) => run.rows.map(arrowRow))));
  const [run] = data.runs;
  if (!run.rows.length) return card(title, el("p", { class: "note" }, "No step has ended yet."));
  const steps = [run.first_step, run.last_step].map((step) =>
    el("th", { class: "right" }, `step ${step}`),
  );
  const table = el("table", { class: "numbers" });
  table.append(
    el("thead", {}, el("tr", {}, el("th"), steps)),
    el("tbody", {}, run.rows.map(beforeAfterRow)),
  );
  return card(title, table);
}

function arrowRow([label, before, after]) {
  const plain = (text) => text.replace(/ \(step \d+\)$/, "");
  return [
    label,
    [el("span", { class: "muted" }, plain(before), " \u2192 "), el("b", {}, plain(after))],
  ];
}

function costs() {
  if (data.runs.every((run) => !run.costs.length)) return null;
  const title = "What it took, and how exact it stayed";
  if (severalRuns) return card(title, comparison(data.runs.map((run) => run.costs)));
  const rows = data.runs[0].costs.flatMap(([label, text]) => [
    el("dt", {}, label),
    el("dd", {}, text),
  ]);
  return card(title, el("dl", { class: "costs" }, rows));
}

/** A column for each run from its [label, content] rows; labels in the order they are met. */
function comparison(columns) {
  const labels = [...new Set(columns.flatMap((rows) => rows.map(([label]) => label)))];
  const cell = (rows, label) => el("td", {}, rows.find(([name]) => name === label)?.[1] ?? "-");
  const line = (label) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, label),
      columns.map((rows) => cell(rows, label)),
    );
  return el(
    "div",
    { class: "scroll" },
    el("table", { class: "comparison" }, runHead(), el("tbody", {}, labels.map(line))),
  );
}

function runHead() {
  return el(
    "thead",
    {},
    el(
      "tr",
      {},
      el("th"),
      data.runs.map((run, i) => el("th", {}, swatch(i), run.name)),
    ),
  );
}

function beforeAfterRow([label, before, after]) {
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, label),
    el("td", { class: "right muted" }, ...valueAndStep(before)),
    el("td", { class: "right strong" }, ...valueAndStep(after)),
  );
}

/** "0.309 +- 0.019 (step 0)" with the step in small print. */
function valueAndStep(text) {
  const match = text.match(/^(.*) (\(step \d+\))$/);
  return match ? [match[1], " ", el("small", {}, match[2])] : [text];
}

const ORACLE_COLUMNS = ["oracle", "bound", "worst", "at step", "over the steps", "verdict"];
const VERDICTS = {
  held: ["\u2713 held", "good"],
  broken: ["\u2715 broken", "bad"],
  "no bound": ["no bound", "idle"],
  "not measured": ["not measured", "idle"],
};

function oracles() {
  const table = el("table", { class: "oracles" });
  table.append(
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        ORACLE_COLUMNS.map((text, i) => el("th", { class: i > 0 && i < 4 ? "right" : "" }, text)),
      ),
    ),
  );
  data.runs.forEach((run, index) => {
    const body = el("tbody");
    if (severalRuns) {
      const name = runCell(index);
      name.colSpan = ORACLE_COLUMNS.length;
      body.append(el("tr", {}, name));
    }
    body.append(...run.verdicts.map(oracleRow));
    table.append(body);
  });
  const note = "Invariants that are measured on every step; a broken bound stops the run.";
  return card("Oracles", el("p", { class: "note" }, note), table);
}

function oracleRow(verdict) {
  const [text, kind] = VERDICTS[verdict.status];
  const bound = verdict.bound === null ? "-" : formatNumber(verdict.bound);
  const cells = verdict.cells.map((cell) => el("i", { class: ["idle", "bad", "good"][cell + 1] }));
  const step = verdict.worst_step === null ? "-" : formatNumber(verdict.worst_step);
  // a narrow window shows the name of a number beside it
  const numbers = [bound, verdict.worst, step].map((text, i) =>
    el("td", { class: "right", "data-name": ORACLE_COLUMNS[i + 1] }, text),
  );
  return el(
    "tr",
    { title: verdict.meaning },
    el("th", { scope: "row" }, el("code", {}, verdict.key), el("small", {}, verdict.metric)),
    ...numbers,
    el("td", {}, el("div", { class: "strip" }, cells)),
    el("td", {}, el("span", { class: `chip ${kind}` }, text)),
  );
}

function configuration(isOpen) {
  const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run.config)))];
  const differs = (key) =>
    new Set(data.runs.map((run) => JSON.stringify(run.config[key]))).size > 1;
  const different = keys.filter(differs);
  const parts = severalRuns || !keys.length ? [] : [card("Setup", facts(data.runs[0]))];
  if (severalRuns && different.length)
    parts.push(card("Where the configurations differ", configTable(different)));
  if (keys.length)
    parts.push(
      el(
        "details",
        { class: "card", open: isOpen },
        el("summary", {}, `Resolved configuration, ${plural(keys.length, "key")}`),
        configTable(keys),
      ),
    );
  return el("div", { class: "configuration" }, ...parts);
}

function configText(value) {
  const isSmall = typeof value === "number" && value !== 0 && Math.abs(value) < 1e-3;
  return isSmall ? value.toExponential() : String(value ?? "none");
}

function configTable(keys) {
  const table = el("table", { class: "config" });
  if (severalRuns) table.append(runHead());
  const cell = (run, key) => el("td", {}, key in run.config ? configText(run.config[key]) : "-");
  const rows = keys.map((key) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, el("code", {}, key)),
      data.runs.map((run) => cell(run, key)),
    ),
  );
  table.append(el("tbody", {}, rows));
  return el("div", { class: "scroll" }, table);
}
