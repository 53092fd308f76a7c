"use strict";
// What a browser cannot do by itself: marking a value's readers, searching rows, the arrow keys, and
// unpacking the states of other passes. Folding, links and tabs are HTML's own.
const element = (id) => document.getElementById(id);
const main = element("listing"), query = element("query"), found = element("found"), card = element("card");
const ROW = "main :is(p:not(.facts, .primitives, .changes), summary)";
const rowOf = (node) => node.closest(ROW);
const readers = (id) => [...main.querySelectorAll(`a[href="#${CSS.escape(id)}"]`)];
const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

// The boxes that a row is folded in, the innermost first.
function* boxesOf(row) {
  for (let box = row.closest("details"); box; box = box.parentElement.closest("details"))
    if (box.firstElementChild !== row) yield box;
}

function reveal(row) {
  for (const box of boxesOf(row)) box.open = true;
  row.scrollIntoView({ block: "center" });
}

// --- the row that is selected, and its line in the source -----------------------------------------

function select(row) {
  for (const old of document.querySelectorAll(".sel")) old.classList.remove("sel");
  row.classList.add("sel");
  if (!row.matches("summary")) row.tabIndex = -1;
  row.focus({ preventScroll: true });
  if (row.id) history.replaceState(null, "", "#" + row.id);
  const line = lineOf(row);
  line?.classList.add("sel");
  line?.scrollIntoView({ block: "nearest" });
}

const lineOf = (row) => element(row.querySelector("cite a")?.hash.slice(1));

main.addEventListener("click", ({ target }) => {
  const row = rowOf(target);
  if (target.matches("dfn")) showReaders(target);
  else if (row && !target.closest("a") && getSelection().isCollapsed) select(row);
});

// --- what is pointed at ---------------------------------------------------------------------------

function scopeOf(row) {
  const names = [row.dataset.scope];
  for (const box of boxesOf(row)) {
    if (box.matches(".row")) break; // the scopes of a body are its own
    names.unshift(box.dataset.scope);
  }
  return names.filter(Boolean).join("/");
}

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

function mark(...nodes) {
  for (const old of document.querySelectorAll(".on")) old.classList.remove("on");
  for (const node of nodes) node?.classList.add("on");
  if (card.matches(":popover-open")) card.hidePopover();
}

function point({ target }) {
  const line = target.closest("aside span:has(> a)"), row = rowOf(target);
  if (line) return mark(line, ...readers(line.id).map(rowOf));
  if (!row) return mark();
  const link = target.closest("code a"), bound = link ? element(link.hash.slice(1)) : target.closest("dfn");
  const place = (from) => [from.querySelector("cite")?.textContent, scopeOf(from) && "scope " + scopeOf(from), from.querySelector("data")?.value];
  if (bound?.matches("dfn")) {
    const from = rowOf(bound), uses = readers(bound.id), type = bound.nextElementSibling;
    mark(bound, ...uses, lineOf(row));
    const by = from.querySelector("b")?.textContent;
    showCard(link ?? bound, bound.textContent + (type?.matches("i") ? type.textContent : ""), by && "bound by " + by,
      ...place(from), uses.length === 1 ? "read once" : `read ${uses.length.toLocaleString("en")} times`);
  } else {
    mark(lineOf(row));
    if (target.matches("b, cite, cite *, data")) showCard(target, row.querySelector("b, strong")?.textContent, ...place(row));
  }
}
for (const kind of ["mouseover", "focusin"]) document.addEventListener(kind, point);

// --- searching ------------------------------------------------------------------------------------

let hits = [], current = -1;
const texts = new WeakMap();

function textOf(row) {
  if (!texts.has(row)) {
    const changes = ["added", "removed"].filter((change) => row.classList.contains(change));
    texts.set(row, [row.textContent, scopeOf(row), ...changes].join(" ").toLowerCase());
  }
  return texts.get(row);
}

function setHits(rows, what) {
  for (const old of hits) old.classList.remove("hit", "here");
  [hits, current] = [rows, -1];
  for (const row of hits) row.classList.add("hit");
  found.value = what;
  element("previous").disabled = element("next").disabled = !hits.length;
}

function search() {
  const words = [...query.value.toLowerCase().matchAll(/"([^"]+)"|(\S+)/g)].map(([, whole, part]) =>
    whole ? new RegExp(`(?<![\\w.])${whole.replace(/\W/g, "\\$&")}(?!\\w)`) : { test: (text) => text.includes(part) });
  const rows = words.length ? [...main.querySelectorAll(".equations [id]:is(p, summary)")] : [];
  const matching = rows.filter((row) => words.every((word) => word.test(textOf(row))));
  setHits(matching, words.length ? count(matching.length, "equation") : "");
}

function showReaders(bound) {
  const rows = [...new Set(readers(bound.id).map(rowOf))];
  setHits(rows, `${count(rows.length, "reader")} of ${bound.textContent}`);
}

function go(step) {
  if (!hits.length) return;
  hits[current]?.classList.remove("here");
  current = current < 0 ? (step > 0 ? 0 : hits.length - 1) : (current + step + hits.length) % hits.length;
  const row = hits[current];
  row.classList.add("here");
  reveal(row);
  if (document.activeElement !== query) select(row);
  found.value = `${(current + 1).toLocaleString("en")} of ${hits.length.toLocaleString("en")}`;
}

query.addEventListener("input", search);
query.form.addEventListener("submit", (event) => { event.preventDefault(); go(1); });
element("previous").addEventListener("click", () => go(-1));

// --- keys -----------------------------------------------------------------------------------------

function move(step) {
  const rows = [...main.querySelectorAll(ROW)].filter((row) => row.checkVisibility());
  const at = rows.indexOf(rowOf(document.activeElement)), row = rows[Math.max(0, Math.min(rows.length - 1, at + step))];
  select(row);
  row.scrollIntoView({ block: "nearest" });
}

function sideways(step) {
  const at = document.activeElement, row = rowOf(at), box = row?.matches("summary") && row.parentElement;
  if (!row) return;
  const stops = [row, ...row.querySelectorAll("dfn, a")], next = stops[stops.indexOf(at) + step];
  if (at === row && box && box.open === step < 0) box.open = step > 0;
  else if (next) {
    next.tabIndex = -1;
    next.focus();
  } else if (step > 0 && at === row) move(1);
  else if (step < 0) for (const outer of boxesOf(row)) return select(outer.firstElementChild);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const at = document.activeElement, keys = {};
  if (at === query) {
    keys.Escape = () => { query.value = ""; search(); main.focus(); };
    if (event.shiftKey) keys.Enter = () => go(-1);
  } else {
    keys["/"] = () => query.select();
    keys.Escape = () => mark();
    if (at.matches("main dfn")) keys.Enter = () => showReaders(at);
    if (at === document.body || main.contains(at))
      Object.assign(keys, { ArrowDown: () => move(1), ArrowUp: () => move(-1), ArrowRight: () => sideways(1), ArrowLeft: () => sideways(-1) });
  }
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});

for (const open of [true, false])
  element(open ? "unfold" : "fold").addEventListener("click", () => {
    for (const box of main.querySelectorAll(".equations details")) box.open = open;
  });

// --- states before and after passes ---------------------------------------------------------------

const tabs = [...document.querySelectorAll("nav input")], kept = new Map();
let state = tabs.findIndex((tab) => tab.checked);

async function show(wanted) {
  if (wanted === state || !tabs[wanted] || tabs[wanted].disabled) return;
  kept.set(state, [...main.childNodes]);
  if (!kept.has(wanted)) {
    const bytes = Uint8Array.from(atob(element("state" + wanted).textContent), (c) => c.charCodeAt(0));
    const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const holder = document.createElement("template");
    holder.innerHTML = await new Response(unpacked).text();
    kept.set(wanted, [...holder.content.childNodes]);
  }
  tabs[wanted].checked = true;
  state = wanted;
  setHits([], "");
  main.replaceChildren(...kept.get(wanted));
  prepare();
}

for (const [i, tab] of tabs.entries())
  tab.addEventListener("change", () => {
    history.replaceState(null, "", `#p${i}-`);
    element("view-equations")?.click();
    show(i);
  });

// Of each line of the source, say how many equations this state has of it. Values are reached by the
// arrow keys: with the tabulator there would be thousands of stops.
function prepare() {
  const counts = new Map();
  for (const { hash } of main.querySelectorAll("[id] > cite a")) counts.set(hash, (counts.get(hash) ?? 0) + 1);
  for (const line of document.querySelectorAll("aside span:has(> a)"))
    line.querySelector("small").textContent = counts.get("#" + line.id) ?? "";
  for (const link of main.querySelectorAll(".equations a, .border a")) link.tabIndex = -1;
  tabs[state]?.parentElement.scrollIntoView({ block: "nearest", inline: "nearest" });
}

// --- the views of a report ------------------------------------------------------------------------

for (const button of document.querySelectorAll(".view th button"))
  button.addEventListener("click", () => {
    const head = button.parentElement, at = head.cellIndex, body = head.closest("table").tBodies[0];
    const down = head.ariaSort !== "descending";
    for (const other of head.parentElement.cells) other.ariaSort = null;
    head.ariaSort = down ? "descending" : "ascending";
    const value = (row) => row.cells[at].dataset.n ?? row.cells[at].textContent;
    const compare = (a, b) => a - b || String(a).localeCompare(b, "en", { numeric: true });
    body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b)) * (down ? -1 : 1)));
  });

// --- where the address leads ----------------------------------------------------------------------

async function follow() {
  const hash = decodeURIComponent(location.hash.slice(1)), [, number, rest] = hash.match(/^(?:p(\d+)-)?(.*)$/s);
  if (number) await show(+number);
  const row = element(hash) && rowOf(element(hash));
  if (rest.startsWith("q=") || row) element("view-equations")?.click();
  if (rest.startsWith("q=")) {
    query.value = rest.slice(2);
    search();
    go(1);
  } else if (row) {
    reveal(row);
    select(row);
  }
}
addEventListener("hashchange", follow);
prepare();
document.querySelector("aside small:not(:empty)")?.scrollIntoView({ block: "center" });
follow();
