// Which groups and responses are shown.

function filterBar() {
  const bar = el("form", {
    class: "filters",
    onsubmit: (event) => event.preventDefault(),
    oninput: changed,
  });
  view.run = select(
    "run",
    "All runs",
    data.runs.map((run, i) => [i, run.name]),
  );
  view.step = select("step", "All steps", []);
  view.disposition = select("disposition", "Any disposition", []);
  fillChoices();
  view.correct = select("correct", "Right and wrong", [
    ["yes", "correct"],
    ["no", "wrong"],
  ]);
  view.truncated = el("input", { type: "checkbox", name: "truncated" });
  view.disagreed = el("input", { type: "checkbox", name: "disagreed" });
  view.prompt = el("input", { type: "search", name: "prompt", placeholder: "Prompt id" });
  view.text = el("input", { type: "search", name: "text", placeholder: "Search the text" });
  const stepper = el(
    "span",
    { class: "joined" },
    button("\u2039", "previous step", () => moveStep(-1)),
    view.step,
    button("\u203a", "next step", () => moveStep(1)),
  );
  bar.append(
    ...(severalRuns ? [view.run] : []),
    stepper,
    view.correct,
    view.disposition,
    el("label", {}, view.truncated, "truncated"),
    el(
      "label",
      { title: "the rule and the symbolic check differ" },
      view.disagreed,
      "scorers disagree",
    ),
    view.prompt,
    view.text,
    button("Reset", "show everything", () => (bar.reset(), changed())),
  );
  return bar;
}

/** Offer the steps and dispositions of the groups; what is chosen stays. */
function fillChoices() {
  const steps = [...new Set(data.groups.map((group) => group.step))].sort((a, b) => a - b);
  const dispositions = [...new Set(data.groups.map((group) => group.disposition))];
  const choices = [
    [view.step, steps.map((step) => [step, `step ${step}`])],
    [view.disposition, dispositions.map((one) => [one, DISPOSITIONS[one] ?? one])],
  ];
  for (const [node, options] of choices) {
    const { value } = node;
    node.replaceChildren(node.options[0], ...options.map(([of, label]) => option(of, label)));
    node.value = value;
  }
}

const option = (value, label) => el("option", { value }, label);

function button(text, title, onclick, properties = {}) {
  return el("button", { type: "button", title, onclick, ...properties }, text);
}

function select(name, all, options) {
  const choices = [["", all], ...options].map(([value, label]) => option(value, label));
  return el("select", { name, "aria-label": name }, choices);
}

function moveStep(by) {
  const index = view.step.selectedIndex + by;
  if (index < 0 || index >= view.step.options.length) return;
  view.step.selectedIndex = index;
  changed();
}

let waiting = null;
function changed() {
  clearTimeout(waiting);
  state.limit = MAX_LISTED;
  waiting = setTimeout(applyFilters, 120);
}

/** Which responses of a group match the filters that need no text. */
function matches(group) {
  const flag = (node, values, i) => !node.checked || values[i];
  const wanted = view.correct.value;
  return group.correct.map(
    (correct, i) =>
      (wanted === "" || correct === (wanted === "yes")) &&
      flag(view.truncated, group.truncated, i) &&
      flag(view.disagreed, group.disagreed, i),
  );
}

function passes(group) {
  return (
    (view.run.value === "" || group.run === Number(view.run.value)) &&
    (view.step.value === "" || group.step === Number(view.step.value)) &&
    (view.disposition.value === "" || group.disposition === view.disposition.value) &&
    group.prompt_id.includes(view.prompt.value.trim())
  );
}

const query = () => view.text.value.trim().toLowerCase();

async function applyFilters(how) {
  const turn = ++state.search;
  const found = [];
  const text = query();
  for (const [index, group] of data.groups.entries()) {
    if (!runShown[group.run] || !passes(group)) continue;
    let hits = matches(group);
    if (text && hits.some(Boolean)) {
      if (index % 50 === 0)
        view.count.textContent = `Searching ${index} of ${data.groups.length} groups`;
      hits = await textHits(index, hits, text);
      if (turn !== state.search) return;
    }
    if (hits.some(Boolean)) found.push([index, hits]);
  }
  state.listed = found;
  drawList(how);
}

async function textHits(index, hits, text) {
  const { prompt, responses } = await loadGroup(index);
  const inPrompt = prompt.messages.some(([, content]) => content.toLowerCase().includes(text));
  return hits.map((hit, i) => hit && (inPrompt || responses[i].text.toLowerCase().includes(text)));
}
