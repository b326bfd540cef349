// One group: its prompt, and its responses side by side.

async function openGroup(index) {
  state.open = index;
  markOpen();
  const group = await loadGroup(index);
  if (state.open !== index) return;
  const hits = state.listed.find(([listed]) => listed === index)?.[1] ?? [];
  tokenCard.hidden = true;
  const { cutsTokens } = clipBounds(data.runs[data.groups[index].run]);
  if (state.mode === "clip" && !cutsTokens) state.mode = "ratio";
  view.group.replaceChildren(
    groupHead(index, group),
    modeBar(index, group),
    responseCards(index, group, hits),
  );
}

function markOpen() {
  for (const item of view.list.querySelectorAll(".group-item"))
    item.setAttribute("aria-selected", String(Number(item.dataset.group) === state.open));
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
  const list = el(
    "dl",
    { class: "facts" },
    facts.map(([label, text]) => el("div", {}, el("dt", {}, label), el("dd", {}, String(text)))),
  );
  const turns = prompt.messages.map(([role, content]) =>
    el(
      "div",
      { class: "message" },
      el("span", { class: "role" }, role),
      el("div", { class: "message-text" }, ...marked(content, query())),
    ),
  );
  const moves = el(
    "span",
    { class: "joined" },
    button("\u2039", "previous group", () => moveGroup(-1)),
    button("\u203a", "next group", () => moveGroup(1)),
  );
  const name = severalRuns ? `${data.runs[entry.run].name}, ` : "";
  return el(
    "div",
    { class: "card group-head" },
    el(
      "div",
      { class: "item-head" },
      el("h3", {}, `${name}step ${entry.step}, group ${entry.prompt_index}`),
      dispositionChip(entry),
      moves,
    ),
    list,
    ...turns,
  );
}

function modeBar(index, group) {
  const entry = data.groups[index];
  const clip = clipBounds(data.runs[entry.run]);
  const modes = Object.entries(MODES).filter(([mode]) => mode !== "clip" || clip.cutsTokens);
  const choices = modes.map(([mode, { label }]) =>
    button(label, "", () => ((state.mode = mode), openGroup(state.open)), {
      "data-mode": mode,
      "aria-pressed": String(mode === state.mode),
    }),
  );
  const { legend, title } = MODES[state.mode];
  const trained = group.responses.some((response) => response.logprobs_update);
  const needsUpdate = state.mode === "ratio" || state.mode === "clip";
  const note =
    needsUpdate && !trained
      ? "this group was not trained, so it has no ratio"
      : (title?.(clip) ?? "");
  return el(
    "div",
    { class: "mode-bar" },
    el("div", { class: "joined" }, choices),
    el("div", { class: "legend" }, legend(group), el("span", { class: "note" }, note)),
  );
}

function responseCards(index, group, hits) {
  const clip = clipBounds(data.runs[data.groups[index].run]);
  const hidden = hits.filter((hit) => !hit).length;
  const shown = group.responses
    .map((response, i) => [response, i])
    .filter(([, i]) => hits[i] || state.showOthers);
  const cards = el(
    "div",
    { class: "cards" },
    shown.map(([response, i]) => responseCard(index, group, response, i, clip)),
  );
  if (!hidden) return cards;
  const toggle = el("input", {
    type: "checkbox",
    name: "others",
    onchange: () => ((state.showOthers = !state.showOthers), openGroup(state.open)),
  });
  toggle.checked = state.showOthers;
  const label = el(
    "label",
    { class: "others" },
    toggle,
    `also show ${plural(hidden, "response")} of this group that the filters leave out`,
  );
  return el("div", {}, label, cards);
}

function responseCard(index, group, response, number, clip) {
  const entry = data.groups[index];
  const chips = [];
  if (response.correct !== null)
    chips.push(
      el(
        "span",
        { class: response.correct ? "chip good" : "chip bad" },
        response.correct ? "\u2713 correct" : "\u2715 wrong",
      ),
    );
  if (entry.truncated[number]) chips.push(el("span", { class: "chip warn" }, "truncated"));
  if (entry.disagreed[number])
    chips.push(
      el(
        "span",
        { class: "chip warn" },
        `symbolic: ${response.symbolic_correct ? "correct" : "wrong"}`,
      ),
    );
  const body = responseBody(response, group, state.mode, clip, query());
  explainTokens(body, response, group, clip);
  return el(
    "article",
    { class: `response ${response.correct === false ? "wrong" : "correct"}` },
    el(
      "div",
      { class: "item-head" },
      el("b", { class: "muted" }, String(number + 1)),
      ...chips,
      el("small", {}, plural(response.token_ids.length, "token")),
    ),
    body,
    responseFacts(response),
  );
}

const versionsText = (response) => {
  const sampled = response.policy_versions.filter(([version]) => version !== NO_VERSION);
  const runs = sampled.filter(([version], i) => i === 0 || version !== sampled[i - 1][0]);
  return runs.map(([version]) => version).join(" then ") || "none";
};

function responseFacts(response) {
  const signed = (value) =>
    value === null ? "-" : `${value > 0 ? "+" : ""}${formatNumber(value)}`;
  const shaped = response.penalty
    ? `${signed(response.reward)} ${signed(response.penalty)} = ${signed(response.shaped_reward)}`
    : signed(response.reward);
  const facts = [
    ["answer", response.answer || "none"],
    ["reward", shaped],
    ["advantage", signed(response.advantage)],
    ["version", versionsText(response)],
    ...Object.entries(response.reward_parts).map(([name, value]) => [name, formatNumber(value)]),
    ...Object.entries(response.reward_texts ?? {}),
  ];
  if (response.conversation.length) facts.push(["tokens by author", authorsText(response)]);
  if (response.branch) {
    const [parent, shared] = response.branch;
    facts.push(["branch", `of response ${parent + 1} behind ${plural(shared, "token")}`]);
  }
  return el(
    "dl",
    { class: "response-facts" },
    facts.map(([label, text]) => el("div", {}, el("dt", {}, label), el("dd", {}, text))),
  );
}
