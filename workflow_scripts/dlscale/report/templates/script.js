"use strict";
// The theme is the system's until the reader chooses one. A page opened from a file may have no storage.
const root = document.documentElement;
try {
  const theme = localStorage.getItem("theme");
  if (theme === "light" || theme === "dark") root.dataset.theme = theme;
} catch (error) { /* keep the system's theme */ }

// A link opens its target and all folds around it.
function reveal() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let fold = target && target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  if (target) target.scrollIntoView();
}

// A live page that reloads keeps its open plans open.
const opened = `open ${location.pathname}`;
function reopen() {
  try { for (const id of JSON.parse(sessionStorage.getItem(opened)) || []) document.getElementById(id).open = true; } catch (error) { /* leave all plans closed */ }
}
addEventListener("pagehide", () => {
  const ids = Array.from(document.querySelectorAll(".plan[open]"), (fold) => fold.id);
  try { sessionStorage.setItem(opened, JSON.stringify(ids)); } catch (error) { /* open plans are not remembered */ }
});

// Print a closed plan as its card alone: open the plan with its sections closed, and restore both afterwards.
let folded = [], sections = [];
addEventListener("beforeprint", () => {
  folded = Array.from(document.querySelectorAll('details.plan[id^="plan."]:not([open])'));
  sections = folded.flatMap((fold) => Array.from(fold.querySelectorAll("details[open]")));
  for (const section of sections) section.open = false;
  for (const fold of folded) fold.open = true;
  for (const figure of document.querySelectorAll("details.plan[open] details[open] .chart")) if (!figure.view) draw(figure);
});
addEventListener("afterprint", () => {
  for (const fold of folded) fold.open = false;
  for (const section of sections) section.open = true;
});

// A block of commands has a button that copies it.
function copyable(block) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(block.querySelector("pre")); // without clipboard access, the reader can copy the selection
    try { await navigator.clipboard.writeText(block.textContent.trim()); button.textContent = "Copied"; } catch (error) { /* the text stays selected */ }
  });
  block.append(button);
}

// A heading sorts by its column, numbers by value; empty cells stay last.
function sortable(table) {
  const body = table.tBodies[0];
  const headings = table.tHead.rows[table.tHead.rows.length - 1].cells;
  Array.from(headings).forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const up = heading.getAttribute("aria-sort") !== "ascending";
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.key;
      const compare = (a, b) => {
        if (a === "" || b === "") return (a === "") - (b === "");
        const order = isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
        return up ? order : -order;
      };
      body.append(...Array.from(body.rows).sort((a, b) => compare(key(a), key(b))));
    });
  });
}

// A table of runs has a field that filters its rows, and a checkbox for each group of its columns.
function filterable(table) {
  const box = document.createElement("p"), rows = Array.from(table.tBodies[0].rows), heads = table.tHead.rows;
  box.className = "choices";
  const add = (type, words) => {
    const label = box.appendChild(document.createElement("label")), input = document.createElement("input");
    Object.assign(input, { type, checked: true, autocomplete: "off" });
    label.append(...(type === "search" ? [words, input] : [input, words]));
    return input;
  };
  const sought = add("search", "Rows with ");
  sought.addEventListener("input", () => {
    const words = sought.value.toLowerCase().split(" ");
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  });
  let end = 0;
  for (const group of heads.length > 1 ? heads[0].cells : []) {
    const begin = end;
    end += group.colSpan;
    const last = end;
    if (begin) add("checkbox", group.textContent).addEventListener("change", (event) => {
      for (const row of [heads[1], ...rows]) for (let n = begin; n < last; n += 1) row.cells[n].hidden = !event.target.checked;
      group.hidden = !event.target.checked;
    });
  }
  table.closest(".scroll").before(box);
}

// Show the differences between two runs: settings, and figures from the table of all runs.
function compare(box) {
  const settings = JSON.parse(box.querySelector("script").textContent), body = box.querySelector("tbody");
  const all = box.parentElement.querySelector("table.sortable"), [groups, headings] = all.tHead.rows;
  const group = Array.from(groups.cells).flatMap((cell) => Array(cell.colSpan).fill(cell.textContent));
  const words = (cell) => Array.from(cell.childNodes, (node) => (node.nodeName === "SMALL" ? " " : "") + node.textContent).join("");
  function show() {
    const names = Array.from(box.querySelectorAll("select"), (select) => select.value);
    const rows = names.map((name) => Array.from(all.tBodies[0].rows).find((row) => row.querySelector("a").textContent === name));
    const lines = Object.keys(settings[names[0]]).map((key) => [key, ...names.map((name) => settings[name][key])]);
    for (let n = 1; n < headings.cells.length; n += 1) {
      lines.push([`${group[n]}: ${headings.cells[n].textContent}`, ...rows.map((row) => words(row.cells[n]))]);
    }
    body.replaceChildren();
    box.querySelectorAll("thead th").forEach((cell, n) => { if (n) cell.textContent = names[n - 1]; });
    for (const [key, one, other] of lines) {
      if (one === other) continue;
      const row = body.insertRow(), head = row.appendChild(document.createElement("th"));
      Object.assign(head, { scope: "row", textContent: key });
      for (const value of [one, other]) row.insertCell().textContent = value;
    }
  }
  box.addEventListener("change", show);
  show();
}

// Vega-Lite draws a chart when it comes into view, and again after each choice. With `ast` it interprets
// expressions, because the content security policy forbids generated code.
async function draw(figure) {
  const spec = JSON.parse(figure.querySelector("script").textContent), main = spec.layer[0], encoding = main.encoding;
  for (const choice of figure.querySelectorAll("select")) {
    if (choice.name === "scale") encoding.y.scale = { ...encoding.y.scale, type: choice.value };
    else Object.assign(encoding[choice.name], { field: choice.value, title: choice.selectedOptions[0].textContent });
  }
  const out = new Set(Array.from(figure.closest(".plan").querySelectorAll(".runs input:not(:checked)"), (box) => box.value));
  main.data.values = main.data.values.filter((row) => !out.has(row.run));
  for (const each of [encoding, ...main.layer.map((layer) => layer.encoding || {})].flatMap(Object.values)) {
    if (each.field !== "run" || !each.scale) continue;
    const kept = each.scale.domain.map((run) => !out.has(run));
    for (const key of ["domain", "range"]) each.scale[key] = each.scale[key].filter((value, place) => kept[place]);
  }
  const config = JSON.parse(document.getElementById("config").textContent);
  if (figure.view) figure.view.finalize();
  figure.view = await vegaEmbed(figure.querySelector(".drawn"), spec, { ast: true, renderer: "svg", actions: false, config });
}

// Show the values of a chart as a table, for readers who cannot see it.
function tabulate(fold) {
  const { data, encoding } = JSON.parse(fold.closest("figure").querySelector("script").textContent).layer[0], rows = data.values;
  const titles = Object.fromEntries(encoding.tooltip.map((entry) => [entry.field, entry.title]));
  const fields = Array.from(new Set(rows.flatMap(Object.keys))), table = document.createElement("table");
  table.createCaption().textContent = fold.closest("figure").getAttribute("aria-label");
  const head = table.createTHead().insertRow(), body = table.createTBody();
  for (const field of fields) {
    head.append(document.createElement("th"));
    Object.assign(head.lastChild, { scope: "col", textContent: titles[field] ?? field });
  }
  for (const row of rows) {
    const line = body.insertRow();
    for (const field of fields) line.insertCell().textContent = row[field] ?? "";
  }
  const box = document.createElement("div");
  Object.assign(box, { className: "scroll", tabIndex: 0 });
  box.append(table);
  fold.append(box);
}

function charts() {
  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) if (isIntersecting) { seen.unobserve(target); draw(target); }
  }, { rootMargin: "200px" });
  for (const figure of document.querySelectorAll(".chart")) {
    seen.observe(figure);
    figure.addEventListener("change", () => draw(figure));
    figure.querySelector(".values").addEventListener("toggle", (event) => tabulate(event.target), { once: true });
  }
  for (const runs of document.querySelectorAll(".runs")) {
    runs.addEventListener("change", () => {
      for (const figure of runs.closest(".plan").querySelectorAll(".chart")) if (figure.view) draw(figure);
    });
  }
}

document.addEventListener("DOMContentLoaded", () => {
  const button = document.getElementById("theme");
  button.hidden = false;
  button.addEventListener("click", () => {
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch (error) { /* the theme is not remembered */ }
  });
  document.querySelectorAll("table.sortable").forEach(sortable);
  document.querySelectorAll("table.sortable:has([scope=colgroup])").forEach(filterable);
  document.querySelectorAll(".compare").forEach(compare);
  document.querySelectorAll(".copy").forEach(copyable);
  charts();
  addEventListener("hashchange", reveal);
  reopen();
  reveal();
});
