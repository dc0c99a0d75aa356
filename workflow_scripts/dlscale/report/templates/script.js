"use strict";
// The theme: the system's, until the button says otherwise. A page opened from a file may have no storage.
const root = document.documentElement;
try {
  const theme = localStorage.getItem("theme");
  if (theme === "light" || theme === "dark") root.dataset.theme = theme;
} catch (error) { /* the system's theme, then */ }

// A link opens what it leads to, and all around it.
function reveal() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let fold = target && target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  if (target) target.scrollIntoView();
}

// Paper has no folds: printing opens them, and closes them again.
let folded = [];
addEventListener("beforeprint", () => {
  folded = Array.from(document.querySelectorAll("details:not([open])"));
  for (const fold of folded) fold.open = true;
});
addEventListener("afterprint", () => { for (const fold of folded) fold.open = false; });

// A block of commands has a button that copies it.
function copyable(block) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(block.querySelector("pre")); // which a page without a clipboard leaves to copy
    try { await navigator.clipboard.writeText(block.textContent.trim()); button.textContent = "Copied"; } catch (error) { /* selected, then */ }
  });
  block.append(button);
}

// A heading sorts by its column, numbers as numbers; what has no value stays last.
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

document.addEventListener("DOMContentLoaded", () => {
  const button = document.getElementById("theme");
  button.hidden = false;
  button.addEventListener("click", () => {
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch (error) { /* for this visit only */ }
  });
  document.querySelectorAll("table.sortable").forEach(sortable);
  document.querySelectorAll(".copy").forEach(copyable);
  addEventListener("hashchange", reveal);
  reveal();
});
