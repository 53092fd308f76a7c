"use strict";
// Shared by pages: packed parts, the words of a query, sortable tables, and the card of an element.
const element = (id) => document.getElementById(id), card = element("card");
const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

// The words of a query, each with a test; those in quotes are whole words.
const wordsOf = (query) =>
  [...query.toLowerCase().matchAll(/"([^"]+)"|(\S+)/g)].map(([, whole, part]) =>
    whole ? new RegExp(`(?<![\\w.])${whole.replace(/\W/g, "\\$&")}(?!\\w)`) : { test: (text) => text.includes(part) });

async function unpacked(id) {
  const bytes = Uint8Array.from(atob(element(id).textContent), (c) => c.charCodeAt(0));
  const text = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const holder = document.createElement("template");
  holder.innerHTML = await new Response(text).text();
  return holder.content;
}

// Sort rows, or table bodies if each row is in its own body.
function sortBy(button) {
  const head = button.parentElement, at = head.cellIndex, table = head.closest("table");
  const down = head.ariaSort !== "descending";
  for (const other of head.parentElement.cells) other.ariaSort = null;
  head.ariaSort = down ? "descending" : "ascending";
  const several = table.tBodies.length > 1, units = several ? [...table.tBodies] : [...table.tBodies[0].rows];
  const value = (unit) => {
    const cell = (several ? unit.rows[0] : unit).cells[at];
    return cell.dataset.n ?? cell.textContent;
  };
  const compare = (a, b) => a - b || String(a).localeCompare(b, "en", { numeric: true });
  units.sort((a, b) => compare(value(a), value(b)) * (down ? -1 : 1));
  (several ? table : table.tBodies[0]).append(...units);
}

document.addEventListener("click", ({ target }) => {
  if (target.matches(".view th button")) sortBy(target);
});

function showCard(at, ...lines) {
  const boxes = lines.filter(Boolean).map((line) => Object.assign(document.createElement("div"), { textContent: line }));
  card.replaceChildren(...boxes);
  card.showPopover();
  at.setAttribute("aria-describedby", "card");
  const box = at.getBoundingClientRect(), size = card.getBoundingClientRect();
  const below = box.bottom + size.height + 8 < innerHeight;
  card.style.left = Math.max(4, Math.min(box.left, innerWidth - size.width - 8)) + "px";
  card.style.top = (below ? box.bottom + 4 : box.top - size.height - 4) + "px";
}

document.querySelector("aside small:not(:empty)")?.scrollIntoView({ block: "center" });
