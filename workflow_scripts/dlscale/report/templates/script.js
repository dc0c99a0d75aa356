"use strict";
// The theme: the system's, until the button says otherwise. A page opened from a file may have no storage.
const root = document.documentElement;
try {
  const theme = localStorage.getItem("theme");
  if (theme === "light" || theme === "dark") root.dataset.theme = theme;
} catch (error) { /* the system's theme, then */ }

// A link to a run opens its details.
function reveal() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target && target.tagName === "DETAILS") { target.open = true; target.scrollIntoView(); }
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
  addEventListener("hashchange", reveal);
  reveal();
});
