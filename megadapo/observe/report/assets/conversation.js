// A response with turns: each turn of the model, what answered it, and what that cost and earned.

const authorOf = (response) => response.environment ?? "tool";

/** How many tokens the model and its environment wrote. */
function authorsText(response) {
  let sampled = 0;
  for (const [start, end, answer] of response.conversation) if (!answer) sampled += end - start;
  const others = response.tokens.length - sampled;
  return `model ${formatNumber(sampled)}, ${authorOf(response)} ${formatNumber(others)}`;
}

/** The parts among the first `limit` tokens; `nodes` returns what shows a span of tokens. */
function conversationNodes(response, limit, nodes) {
  const whole = limit === response.tokens.length;
  let turn = 0;
  return response.conversation
    .filter(([start]) => whole || start < limit)
    .map(([start, end, answer]) => {
      const author = answer ? authorOf(response) : `turn ${(turn += 1)}`;
      const facts = [plural(end - start, "token"), ...(answer ? costOf(response, answer) : [])];
      return el(
        "div",
        { class: answer ? "turn answer" : "turn" },
        el("div", { class: "turn-head" }, el("b", {}, author), el("span", {}, facts.join(", "))),
        el("div", { class: "turn-text" }, nodes(start, Math.min(end, limit))),
      );
    });
}

/** What an answer of an environment earned and took; a tool's does neither. */
function costOf(response, [reward, seconds]) {
  if (response.environment === null) return [];
  return [`reward ${reward > 0 ? "+" : ""}${formatNumber(reward)}`, `${formatNumber(seconds)} s`];
}
