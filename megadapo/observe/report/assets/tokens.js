// One response as text whose tokens carry colours, and the card that explains a token.

const MAX_TOKENS = 1200;
/** In the place of a policy version: a tool or an environment wrote the token. */
const NO_VERSION = -1;

const MODES = {
  text: { label: "Text", legend: () => [] },
  ratio: {
    label: "Ratio",
    legend: () => [key("below 1", "--ratio-low"), key("1", null), key("above 1", "--ratio-high")],
    title: (clip) => `updated over old policy; full colour at 1 - ${clip.low} and 1 + ${clip.high}`,
  },
  clip: {
    label: "Clip",
    legend: () => [
      key("clipped low", "--clip-low"),
      key("clipped high", "--clip-high"),
      key("inside", null),
    ],
    title: () => "clipped tokens give no gradient",
  },
  probability: {
    label: "Probability",
    legend: () => [key("likely", null), key("unlikely", "--unlikely")],
    title: () => "of the token when it was sampled",
  },
  version: {
    label: "Policy version",
    legend: (group) => versionKeys(group),
    title: () => "weights that sampled the response",
  },
};

function key(label, variable) {
  const mark = el("i", { class: variable ? "swatch" : "swatch empty-swatch" });
  if (variable) mark.style.background = `var(${variable})`;
  return el("span", {}, mark, label);
}

const versionsOf = (group) =>
  [...new Set(group.responses.flatMap((r) => r.policy_versions.map(([version]) => version)))].sort(
    (a, b) => b - a,
  );
const versionVariable = (group, version) =>
  `--series-${(versionsOf(group).indexOf(version) % NUM_COLOURS) + 1}`;
/** Which version sampled each token of a response, from its runs. */
const tokenVersions = (response) =>
  response.policy_versions.flatMap(([version, count]) => Array(count).fill(version));
const versionKeys = (group) =>
  versionsOf(group).map((version) =>
    key(version === NO_VERSION ? "not sampled" : `version ${version}`, versionVariable(group, version)),
  );

/** The bounds of the ratio in a run's configuration, or DAPO's; whether they cut single tokens. */
function clipBounds(run) {
  const find = (name, fallback) => {
    const found = Object.keys(run.config).find((path) => path.endsWith(`objective.${name}`));
    return found && run.config[found] !== null ? run.config[found] : fallback;
  };
  const cutsTokens = find("ratio", "token") === "token" && find("gate", "clip") === "clip";
  return { low: find("clip_low", 0.2), high: find("clip_high", 0.28), cutsTokens };
}

/** What is known of token `index`: log-probs, ratio, and whether the objective clipped it. */
function tokenFacts(response, index, clip) {
  const at = (values) => values?.[index] ?? null;
  const [sampled, old, updated] = [
    response.logprobs_rollout,
    response.logprobs_old,
    response.logprobs_update,
  ].map(at);
  const ratio = old === null || updated === null ? null : Math.exp(updated - old);
  let clipped = clip.cutsTokens ? null : undefined;
  const advantage = response.advantages ? at(response.advantages) : response.advantage;
  if (clip.cutsTokens && ratio !== null && advantage !== null) {
    clipped = "inside";
    if (advantage < 0 && ratio < 1 - clip.low) clipped = "low";
    if (advantage > 0 && ratio > 1 + clip.high) clipped = "high";
  }
  return { sampled, old, updated, ratio, clipped, advantage };
}

/** [colour variable, percent] behind a token, or null. */
function tokenShade(mode, facts, clip) {
  if (mode === "ratio" && facts.ratio !== null) {
    const low = facts.ratio < 1;
    const share = low ? (1 - facts.ratio) / (clip.low || 1) : (facts.ratio - 1) / (clip.high || 1);
    return [low ? "--ratio-low" : "--ratio-high", 85 * Math.min(share, 1)];
  }
  if (mode === "clip" && (facts.clipped === "low" || facts.clipped === "high"))
    return [`--clip-${facts.clipped}`, 85];
  const logprob = facts.sampled ?? facts.old;
  if (mode === "probability" && logprob !== null)
    return ["--unlikely", 85 * (1 - Math.exp(logprob))];
  return null;
}

/** The body of a response: plain text with the search marked, or a span for each token. */
function responseBody(response, group, mode, clip, query) {
  const body = el("div", { class: "response-text", tabindex: 0 });
  if (mode !== "text" && response.tokens?.length) {
    fillTokens(body, response, group, mode, clip, MAX_TOKENS);
  } else if (response.conversation.length) {
    const text = (start, end) => textNodes(response, group, start, end, query);
    body.append(...conversationNodes(response, response.tokens.length, text));
  } else body.append(...marked(response.text, query));
  return body;
}

const controlToken = (response, group, index) =>
  response.tokens[index] === "" ? (group.control_tokens[response.token_ids[index]] ?? null) : null;

/** The text of some tokens with the search marked, and the names of control tokens in it. */
function textNodes(response, group, start, end, query) {
  const nodes = [];
  let text = "";
  for (let index = start; index < end; index++) {
    text += response.tokens[index];
    const name = controlToken(response, group, index);
    if (name === null && index < end - 1) continue;
    nodes.push(...marked(text, query));
    text = "";
    if (name !== null) nodes.push(el("span", { class: "control", "data-name": name }));
  }
  return nodes;
}

function fillTokens(body, response, group, mode, clip, limit) {
  const versions = tokenVersions(response);
  const spans = response.tokens.slice(0, limit).map((token, index) => {
    const name = controlToken(response, group, index);
    const kinds = ["token"];
    if (token.includes("\n")) kinds.push("line-end");
    if (versions[index] === NO_VERSION) kinds.push("tool-output");
    if (name !== null) kinds.push("control");
    const facts = { class: kinds.join(" "), "data-index": index, "data-name": name };
    const span = el("span", facts, token);
    const shade =
      mode === "version"
        ? [versionVariable(group, versions[index]), 40]
        : tokenShade(mode, tokenFacts(response, index, clip), clip);
    if (shade && shade[1] >= 1) span.style.backgroundColor = mixedIn(...shade);
    return span;
  });
  const nodes = (start, end) => spans.slice(start, end);
  body.replaceChildren(
    ...(response.conversation.length ? conversationNodes(response, spans.length, nodes) : spans),
  );
  const rest = response.tokens.length - limit;
  if (rest > 0) {
    const more = () => fillTokens(body, response, group, mode, clip, response.tokens.length);
    body.append(
      el(
        "button",
        { type: "button", class: "more", onclick: more },
        `Show ${plural(rest, "more token")}`,
      ),
    );
  }
}

const mixedIn = (variable, percent) =>
  `color-mix(in srgb, var(${variable}) ${percent.toFixed(0)}%, transparent)`;

function marked(text, query) {
  if (!query) return [text];
  const parts = [];
  const lower = text.toLowerCase();
  let from = 0;
  // Lower case may change a text's length; then positions do not fit, and nothing is marked.
  let at = lower.length === text.length ? lower.indexOf(query) : -1;
  while (at >= 0) {
    parts.push(text.slice(from, at), el("mark", {}, text.slice(at, at + query.length)));
    from = at + query.length;
    at = lower.indexOf(query, from);
  }
  return [...parts, text.slice(from)];
}

const tokenCard = document.getElementById("token-card");

/** Explain the token under the pointer. */
function explainTokens(body, response, group, clip) {
  body.addEventListener("mouseover", (event) => {
    const span = event.target.closest(".token");
    if (!span) return;
    const index = Number(span.dataset.index);
    const facts = tokenFacts(response, index, clip);
    tokenCard.replaceChildren(...tokenLines(response, group, index, facts));
    tokenCard.hidden = false;
    const place = span.getBoundingClientRect();
    const below = place.bottom + tokenCard.offsetHeight + 8 < window.innerHeight;
    const rightmost = window.innerWidth - tokenCard.offsetWidth - 12;
    tokenCard.style.left = `${Math.max(8, Math.min(place.left, rightmost))}px`;
    tokenCard.style.top = `${below ? place.bottom + 6 : place.top - tokenCard.offsetHeight - 6}px`;
  });
  body.addEventListener("mouseleave", () => (tokenCard.hidden = true));
}

function tokenLines(response, group, index, facts) {
  const probability = facts.sampled === null ? null : Math.exp(facts.sampled);
  const lines = [
    ["log-prob, engine", formatNumber(facts.sampled)],
    ["log-prob, old policy", formatNumber(facts.old)],
    ["log-prob, updated", formatNumber(facts.updated)],
    ["probability", formatNumber(probability)],
    ["ratio", formatNumber(facts.ratio)],
    ...(facts.clipped === undefined ? [] : [["clip", facts.clipped ?? "not trained"]]),
    ["advantage", formatNumber(facts.advantage)],
  ];
  const step = response.steps?.findIndex(([end]) => index < end) ?? -1;
  if (step >= 0)
    lines.push([
      `score of step ${step + 1} of ${response.steps.length}`,
      formatNumber(response.steps[step][1]),
    ]);
  const name = controlToken(response, group, index);
  return [
    el("b", {}, el("code", {}, name ?? JSON.stringify(response.tokens[index]))),
    el(
      "small",
      {},
      `token ${index + 1} of ${response.tokens.length}, id ${response.token_ids[index]}`,
    ),
    el(
      "div",
      { class: "tip-rows" },
      lines.map(([label, text]) => el("div", {}, el("span", {}, label), el("em", {}, text))),
    ),
  ];
}
