// Tables of text that stand before the runs; a report without any has no such section.

function drawTables() {
  const node = document.getElementById("tables");
  if (!data.tables.length) node.remove();
  else node.replaceChildren(...data.tables.map(textTable));
}

function textTable({ title, note, head, rows }) {
  const first = (texts) => el("tr", {}, texts.map((text) => el("th", { scope: "col" }, text)));
  const line = ([name, ...cells]) =>
    el("tr", {}, el("th", { scope: "row" }, name), cells.map((text) => el("td", {}, text)));
  const table = el(
    "table",
    { class: "texts" },
    el("thead", {}, first(head)),
    el("tbody", {}, rows.map(line)),
  );
  return el(
    "div",
    { class: "card" },
    el("h3", {}, title),
    el("p", { class: "note" }, note),
    el("div", { class: "scroll" }, table),
  );
}
