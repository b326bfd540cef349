// The browser for saved responses: what it holds, and the list of groups.

const MAX_LISTED = 150;
const MAX_CACHED = 64;
const DISPOSITIONS = {
  trained: "trained",
  to_reserve: "to reserve",
  dropped: "dropped",
  all_correct: "all correct",
  all_wrong: "all wrong",
  out_of_band: "out of band",
  equal: "equal rewards",
  held_out: "held out",
};

let chunks = null;
const cache = new Map();
const state = {
  mode: "ratio",
  open: null,
  showOthers: false,
  limit: MAX_LISTED,
  search: 0,
  hits: null,
  listed: [],
};
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
  node.append(
    filterBar(),
    el(
      "div",
      { class: "browser" },
      el("div", { class: "side" }, view.count, view.list),
      view.group,
    ),
  );
  applyFilters();
}

/** Add the groups that were saved since `before`; the open one stays as it is. */
function updateResponses(before) {
  if (JSON.stringify(before) === JSON.stringify(data.groups)) return;
  if (!before.length || !data.groups.length) return drawResponses();
  const name = ({ step, prompt_index, disposition }) => `${step} ${prompt_index} ${disposition}`;
  const open = state.open === null ? null : name(before[state.open]);
  state.open = data.groups.findIndex((group) => name(group) === open);
  cache.clear();
  fillChoices();
  document.querySelector("#responses .note").textContent = leftOut();
  applyFilters({ keepsOpen: true });
}

function leftOut() {
  // those of evaluations are not counted
  const shown = data.groups.filter((group) => group.disposition !== "held_out").length;
  const saved = data.saved.reduce((sum, run) => sum + run.num_groups, 0);
  if (!saved) return null;
  if (shown === saved)
    return `All ${plural(saved, "saved group")}. Point at a token for its log-probs.`;
  const some = `${plural(shown, "group")} of ${saved.toLocaleString("en")} that were saved`;
  return `${some}: the others would make this file too large.`;
}

function drawList({ keepsOpen = false } = {}) {
  const responses = state.listed.reduce((sum, [, hits]) => sum + hits.filter(Boolean).length, 0);
  const groups = plural(state.listed.length, "group");
  view.count.textContent = `${groups}, ${plural(responses, "response")}`;
  view.list.replaceChildren(
    ...state.listed.slice(0, state.limit).map(([index, hits]) => listItem(index, hits)),
  );
  if (state.listed.length > state.limit) {
    const more = () => ((state.limit += MAX_LISTED), drawList());
    view.list.append(
      button(
        `Show ${plural(Math.min(MAX_LISTED, state.listed.length - state.limit), "more group")}`,
        "",
        more,
        { class: "more" },
      ),
    );
  }
  const stays = state.listed.some(([index]) => index === state.open);
  if (stays && keepsOpen) markOpen();
  else if (stays) openGroup(state.open);
  else if (state.listed.length) openGroup(state.listed[0][0]);
  else {
    state.open = null;
    view.group.replaceChildren(el("p", { class: "empty" }, "No response matches the filters."));
  }
}

function listItem(index, hits) {
  const group = data.groups[index];
  const dot = (correct, i) => {
    const kinds = ["dot"];
    if (correct !== null) kinds.push(correct ? "correct" : "wrong");
    if (group.truncated[i]) kinds.push("cut");
    if (!hits[i]) kinds.push("faint");
    return el("i", { class: kinds.join(" ") });
  };
  const right = group.correct.includes(null)
    ? `mean reward ${formatNumber(group.reward)}`
    : `${group.correct.filter(Boolean).length}/${group.correct.length}`;
  return el(
    "button",
    {
      type: "button",
      class: "group-item",
      role: "option",
      "data-group": index,
      onclick: () => openGroup(index),
    },
    el(
      "span",
      { class: "item-head" },
      severalRuns ? swatch(group.run) : null,
      el("b", {}, `step ${group.step}`),
      el("span", { class: "muted" }, `#${group.prompt_index}`),
      dispositionChip(group),
    ),
    el("span", { class: "excerpt" }, group.excerpt),
    el(
      "span",
      { class: "dots" },
      group.correct.map(dot),
      el("em", {}, right),
    ),
  );
}

function dispositionChip(group) {
  const disposition = DISPOSITIONS[group.disposition] ?? group.disposition;
  return el(
    "span",
    { class: group.disposition === "trained" ? "chip good" : "chip idle" },
    group.from_reserve ? "from reserve" : disposition,
  );
}
