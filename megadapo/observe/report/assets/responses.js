// The browser for saved responses: filters, the list of groups, and one group side by side.

const MAX_LISTED = 150;
const MAX_CACHED = 64;
const FATES = { trained: "trained", to_reserve: "to reserve", dropped: "dropped", all_correct: "all correct", all_wrong: "all wrong" };

let chunks = null;
const cache = new Map();
const state = { mode: "ratio", open: null, showOthers: false, limit: MAX_LISTED, search: 0, hits: null, listed: [] };
const view = {};

/** Unpack one group; the last few are kept. */
async function loadGroup(index) {
  if (cache.has(index)) return cache.get(index);
  chunks ??= JSON.parse(document.getElementById("chunks").textContent);
  const bytes = Uint8Array.from(atob(chunks[index]), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const group = await new Response(stream).json();
  cache.set(index, group);
  if (cache.size > MAX_CACHED) cache.delete(cache.keys().next().value);
  return group;
}

function drawResponses() {
  const node = section("responses", "Responses", leftOut());
  if (!data.groups.length) {
    const hint = "This run saved no responses (RUN/rollouts).";
    node.append(el("p", { class: "empty" }, hint));
    return;
  }
  view.list = el("div", { class: "group-list", role: "listbox", "aria-label": "groups" });
  view.group = el("div", { class: "group" });
  view.count = el("p", { class: "count", role: "status" });
  node.append(filterBar(), el("div", { class: "browser" }, el("div", { class: "side" }, view.count, view.list), view.group));
  applyFilters();
}

function leftOut() {
  const shown = data.groups.length;
  const saved = data.saved.reduce((sum, run) => sum + run.num_groups, 0);
  if (!saved) return null;
  return shown === saved
    ? `All ${plural(saved, "saved group")}. Point at a token for its log-probs.`
    : `${plural(shown, "group")} of ${saved.toLocaleString("en")} that were saved: the others would make this file too large.`;
}

function filterBar() {
  const bar = el("form", { class: "filters", onsubmit: (event) => event.preventDefault(), oninput: changed });
  const fates = [...new Set(data.groups.map((group) => group.fate))];
  view.run = select("run", "All runs", data.runs.map((run, i) => [i, run.name]));
  view.step = select("step", "All steps", [...new Set(data.groups.map((g) => g.step))].sort((a, b) => a - b).map((s) => [s, `step ${s}`]));
  view.fate = select("fate", "Any fate", fates.map((fate) => [fate, FATES[fate] ?? fate]));
  view.correct = select("correct", "Right and wrong", [["yes", "correct"], ["no", "wrong"]]);
  view.truncated = el("input", { type: "checkbox", name: "truncated" });
  view.disagreed = el("input", { type: "checkbox", name: "disagreed" });
  view.prompt = el("input", { type: "search", name: "prompt", placeholder: "Prompt id" });
  view.text = el("input", { type: "search", name: "text", placeholder: "Search the text" });
  const stepper = el("span", { class: "joined" }, button("\u2039", "previous step", () => moveStep(-1)), view.step, button("\u203a", "next step", () => moveStep(1)));
  bar.append(
    ...(severalRuns ? [view.run] : []),
    stepper,
    view.correct,
    view.fate,
    el("label", {}, view.truncated, "truncated"),
    el("label", { title: "the rule and the symbolic check differ" }, view.disagreed, "scorers disagree"),
    view.prompt,
    view.text,
    button("Reset", "show everything", () => (bar.reset(), changed())),
  );
  return bar;
}

function button(text, title, onclick, properties = {}) {
  return el("button", { type: "button", title, onclick, ...properties }, text);
}

function select(name, all, options) {
  const node = el("select", { name, "aria-label": name }, el("option", { value: "" }, all));
  node.append(...options.map(([value, label]) => el("option", { value }, label)));
  return node;
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
    (view.fate.value === "" || group.fate === view.fate.value) &&
    group.prompt_id.includes(view.prompt.value.trim())
  );
}

const query = () => view.text.value.trim().toLowerCase();

async function applyFilters() {
  const turn = ++state.search;
  const found = [];
  const text = query();
  for (const [index, group] of data.groups.entries()) {
    if (!runShown[group.run] || !passes(group)) continue;
    let hits = matches(group);
    if (text && hits.some(Boolean)) {
      if (index % 50 === 0) view.count.textContent = `Searching ${index} of ${data.groups.length} groups`;
      hits = await textHits(index, hits, text);
      if (turn !== state.search) return;
    }
    if (hits.some(Boolean)) found.push([index, hits]);
  }
  state.listed = found;
  drawList();
}

async function textHits(index, hits, text) {
  const { prompt, responses } = await loadGroup(index);
  const inPrompt = prompt.messages.some(([, content]) => content.toLowerCase().includes(text));
  return hits.map((hit, i) => hit && (inPrompt || responses[i].text.toLowerCase().includes(text)));
}

function drawList() {
  const responses = state.listed.reduce((sum, [, hits]) => sum + hits.filter(Boolean).length, 0);
  view.count.textContent = `${plural(state.listed.length, "group")}, ${plural(responses, "response")}`;
  view.list.replaceChildren(...state.listed.slice(0, state.limit).map(([index, hits]) => listItem(index, hits)));
  if (state.listed.length > state.limit) {
    const more = () => ((state.limit += MAX_LISTED), drawList());
    view.list.append(button(`Show ${plural(Math.min(MAX_LISTED, state.listed.length - state.limit), "more group")}`, "", more, { class: "more" }));
  }
  const stays = state.listed.some(([index]) => index === state.open);
  if (stays) openGroup(state.open);
  else if (state.listed.length) openGroup(state.listed[0][0]);
  else {
    state.open = null;
    view.group.replaceChildren(el("p", { class: "empty" }, "No response matches the filters."));
  }
}

function listItem(index, hits) {
  const group = data.groups[index];
  const dots = group.correct.map((correct, i) =>
    el("i", { class: `dot ${correct ? "correct" : "wrong"}${group.truncated[i] ? " cut" : ""}${hits[i] ? "" : " faint"}` }),
  );
  const right = group.correct.filter(Boolean).length;
  return el(
    "button",
    { type: "button", class: "group-item", role: "option", "data-group": index, onclick: () => openGroup(index) },
    el(
      "span",
      { class: "item-head" },
      severalRuns ? swatch(group.run) : null,
      el("b", {}, `step ${group.step}`),
      el("span", { class: "muted" }, `#${group.order}`),
      fateChip(group),
    ),
    el("span", { class: "excerpt" }, group.excerpt),
    el("span", { class: "dots" }, dots, el("em", {}, `${right}/${group.correct.length}`)),
  );
}

function fateChip(group) {
  const fate = FATES[group.fate] ?? group.fate;
  return el("span", { class: group.fate === "trained" ? "chip good" : "chip idle" }, group.from_reserve ? "from reserve" : fate);
}

async function openGroup(index) {
  state.open = index;
  for (const item of view.list.querySelectorAll(".group-item"))
    item.setAttribute("aria-selected", String(Number(item.dataset.group) === index));
  const group = await loadGroup(index);
  if (state.open !== index) return;
  const hits = state.listed.find(([listed]) => listed === index)?.[1] ?? [];
  tokenCard.hidden = true;
  view.group.replaceChildren(groupHead(index, group), modeBar(index, group), responseCards(index, group, hits));
}

function moveGroup(by) {
  const at = state.listed.findIndex(([index]) => index === state.open);
  const next = state.listed[at + by];
  if (!next) return;
  openGroup(next[0]);
  view.list.querySelector(`[data-group="${next[0]}"]`)?.scrollIntoView({ block: "nearest" });
}

function groupHead(index, { prompt }) {
  const entry = data.groups[index];
  const facts = [
    ["prompt", prompt.id],
    ["source", prompt.data_source],
    ["right answer", prompt.ground_truth],
  ];
  const list = el("dl", { class: "facts" }, facts.map(([label, text]) => el("div", {}, el("dt", {}, label), el("dd", {}, String(text)))));
  const turns = prompt.messages.map(([role, content]) =>
    el("div", { class: "message" }, el("span", { class: "role" }, role), el("div", { class: "message-text" }, ...marked(content, query()))),
  );
  const moves = el("span", { class: "joined" }, button("\u2039", "previous group", () => moveGroup(-1)), button("\u203a", "next group", () => moveGroup(1)));
  const name = severalRuns ? `${data.runs[entry.run].name}, ` : "";
  return el(
    "div",
    { class: "card group-head" },
    el("div", { class: "item-head" }, el("h3", {}, `${name}step ${entry.step}, group ${entry.order}`), fateChip(entry), moves),
    list,
    ...turns,
  );
}

function modeBar(index, group) {
  const entry = data.groups[index];
  const choices = Object.entries(MODES).map(([mode, { label }]) =>
    button(label, "", () => ((state.mode = mode), openGroup(state.open)), { "data-mode": mode, "aria-pressed": String(mode === state.mode) }),
  );
  const { legend, title } = MODES[state.mode];
  const clip = clipBounds(data.runs[entry.run]);
  const trained = group.responses.some((response) => response.logprobs_update);
  const needsUpdate = state.mode === "ratio" || state.mode === "clip";
  const note = needsUpdate && !trained ? "this group was not trained, so it has no ratio" : title?.(clip) ?? "";
  return el("div", { class: "mode-bar" }, el("div", { class: "joined" }, choices), el("div", { class: "legend" }, legend(group), el("span", { class: "note" }, note)));
}

function responseCards(index, group, hits) {
  const clip = clipBounds(data.runs[data.groups[index].run]);
  const hidden = hits.filter((hit) => !hit).length;
  const shown = group.responses.map((response, i) => [response, i]).filter(([, i]) => hits[i] || state.showOthers);
  const cards = el("div", { class: "cards" }, shown.map(([response, i]) => responseCard(index, group, response, i, clip)));
  if (!hidden) return cards;
  const toggle = el("input", { type: "checkbox", name: "others", onchange: () => ((state.showOthers = !state.showOthers), openGroup(state.open)) });
  toggle.checked = state.showOthers;
  const label = el("label", { class: "others" }, toggle, `also show ${plural(hidden, "response")} of this group that the filters leave out`);
  return el("div", {}, label, cards);
}

function responseCard(index, group, response, number, clip) {
  const entry = data.groups[index];
  const chips = [el("span", { class: response.correct ? "chip good" : "chip bad" }, response.correct ? "\u2713 correct" : "\u2715 wrong")];
  if (entry.truncated[number]) chips.push(el("span", { class: "chip warn" }, "truncated"));
  if (entry.disagreed[number]) chips.push(el("span", { class: "chip warn" }, `symbolic: ${response.symbolic_correct ? "correct" : "wrong"}`));
  const body = responseBody(response, group, state.mode, clip, query());
  explainTokens(body, response, clip);
  return el(
    "article",
    { class: `response ${response.correct ? "correct" : "wrong"}` },
    el("div", { class: "item-head" }, el("b", { class: "muted" }, String(number + 1)), ...chips, el("small", {}, plural(response.token_ids.length, "token"))),
    body,
    responseFacts(response),
  );
}

function responseFacts(response) {
  const signed = (value) => (value === null ? "-" : `${value > 0 ? "+" : ""}${formatNumber(value)}`);
  const shaped = response.penalty ? `${signed(response.reward)} ${signed(response.penalty)} = ${signed(response.shaped_reward)}` : signed(response.reward);
  const facts = [
    ["answer", response.answer || "none"],
    ["reward", shaped],
    ["advantage", signed(response.advantage)],
    ["version", String(response.policy_version)],
  ];
  return el("dl", { class: "response-facts" }, facts.map(([label, text]) => el("div", {}, el("dt", {}, label), el("dd", {}, text))));
}
