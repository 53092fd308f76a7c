"use strict";
// What a browser cannot do by itself: marking a value's readers, searching rows, and the arrow keys.
const element = (id) => document.getElementById(id);
const main = element("listing"), query = element("query"), found = element("found"), card = element("card");
const rows = () => [...main.querySelectorAll(".equations :is(p, summary)[id]")];
const readers = (id) => [...main.querySelectorAll(`a[href="#${CSS.escape(id)}"]`)];
const rowOf = (node) => node?.closest?.("main :is(p, summary)");

function reveal(node, focus = true) {
  for (let box = node.closest("details"); box; box = box.parentElement.closest("details"))
    if (node !== box.firstElementChild) box.open = true;
    else if (box.parentElement.closest("details:not([open])")) continue;
  node.scrollIntoView({ block: "center" });
  if (focus) select(node);
}

// --- the row that is selected, and its line in the source -----------------------------------

function select(row) {
  for (const old of document.querySelectorAll(".sel")) old.classList.remove("sel");
  row.classList.add("sel");
  row.tabIndex = row.matches("summary") ? 0 : -1;
  row.focus({ preventScroll: true });
  const line = row.querySelector("cite a")?.hash.slice(1);
  if (row.id) history.replaceState(null, "", "#" + row.id);
  if (line) {
    element(line).classList.add("sel");
    element(line).scrollIntoView({ block: "nearest" });
  }
}

main.addEventListener("click", (event) => {
  const row = rowOf(event.target);
  if (event.target.matches("dfn")) showReaders(event.target);
  else if (row && !event.target.closest("a") && getSelection().isCollapsed) select(row);
});

// --- a value, where it is bound and where it is read ------------------------------------------

function scopeOf(row) {
  const names = row.dataset.scope ? [row.dataset.scope] : [];
  for (let box = row.closest("details"); box; box = box.parentElement.closest("details"))
    if (box.dataset.scope) names.unshift(box.dataset.scope);
    else if (box.matches(".row") && box.firstElementChild !== row) break;
  return names.join("/");
}

function showCard(lines, at) {
  card.replaceChildren(...lines.filter(Boolean).map((line) => Object.assign(document.createElement("div"), { textContent: line })));
  card.showPopover();
  const box = at.getBoundingClientRect(), size = card.getBoundingClientRect();
  const below = box.bottom + size.height + 8 < innerHeight;
  card.style.left = Math.max(4, Math.min(box.left, innerWidth - size.width - 8)) + "px";
  card.style.top = (below ? box.bottom + 4 : box.top - size.height - 4) + "px";
}

function unmark() {
  for (const old of [...document.querySelectorAll(".on")]) old.classList.remove("on");
  if (card.matches(":popover-open")) card.hidePopover();
}

function mark(event) {
  const target = event.target.closest?.("main dfn, main a[href*='v']:not(cite a), main p, main summary, aside a");
  unmark();
  if (!target) return;
  if (target.matches("aside a")) {
    for (const read of readers(target.parentElement.id)) rowOf(read).classList.add("on");
  } else if (target.matches("dfn, a")) {
    const bound = target.matches("dfn") ? target : element(target.hash.slice(1));
    if (!bound?.matches("dfn")) return;
    const uses = readers(bound.id), row = rowOf(bound), type = bound.nextElementSibling;
    for (const each of [bound, ...uses]) each.classList.add("on");
    showCard([
      bound.textContent + (type?.matches("i") ? type.textContent : ""),
      row.querySelector("b") ? "bound by " + row.querySelector("b").textContent : "an argument",
      row.querySelector("cite")?.textContent,
      scopeOf(row) && "scope " + scopeOf(row),
      uses.length === 1 ? "read once" : `read ${uses.length} times`,
    ], target);
  } else {
    const line = target.querySelector("cite a")?.hash.slice(1);
    if (line) element(line)?.classList.add("on");
    target.title = [target.querySelector("cite")?.textContent, scopeOf(target)].filter(Boolean).join("\n");
  }
}
for (const kind of ["mouseover", "focusin"]) document.addEventListener(kind, mark);

// --- searching ----------------------------------------------------------------------------------

let hits = [], current = -1;
const texts = new WeakMap();

function textOf(row) {
  const changes = ["added", "removed"].filter((change) => row.classList.contains(change));
  if (!texts.has(row)) texts.set(row, [row.textContent, scopeOf(row), ...changes].join(" ").toLowerCase());
  return texts.get(row);
}

function setHits(rows, what) {
  for (const old of hits) old.classList.remove("hit", "here");
  hits = rows;
  current = -1;
  for (const row of hits) row.classList.add("hit");
  found.value = what;
  element("previous").disabled = element("next").disabled = !hits.length;
}

function search() {
  const words = [...query.value.toLowerCase().matchAll(/"([^"]+)"|(\S+)/g)].map(([, whole, part]) =>
    whole ? new RegExp(`(?<![\\w.])${whole.replace(/\W/g, "\\$&")}(?!\\w)`) : { test: (text) => text.includes(part) });
  const matching = words.length ? rows().filter((row) => words.every((word) => word.test(textOf(row)))) : [];
  setHits(matching, words.length ? count(matching.length, "row") : "");
}

const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

function showReaders(bound) {
  setHits(readers(bound.id).map(rowOf), `${count(readers(bound.id).length, "reader")} of ${bound.textContent}`);
}

function go(step) {
  if (!hits.length) return;
  hits[current]?.classList.remove("here");
  current = (current + step + hits.length + (current < 0 && step < 0)) % hits.length;
  const row = hits[current], within = document.activeElement === query;
  row.classList.add("here");
  reveal(row, !within);
  found.value = `${(current + 1).toLocaleString("en")} of ${hits.length.toLocaleString("en")}`;
}

query.addEventListener("input", search);
query.form.addEventListener("submit", (event) => { event.preventDefault(); go(1); });
element("previous").addEventListener("click", () => go(-1));

// --- keys -----------------------------------------------------------------------------------------

function move(step) {
  const all = [...main.querySelectorAll("p, summary")].filter((row) => row.checkVisibility());
  const row = all[Math.max(0, Math.min(all.length - 1, all.indexOf(rowOf(document.activeElement)) + step))];
  select(row);
  row.scrollIntoView({ block: "nearest" });
}

function sideways(step) {
  const row = rowOf(document.activeElement), box = row?.matches("summary") && row.parentElement;
  if (!row) return;
  if (box && document.activeElement === row && box.open !== step > 0) return void (box.open = step > 0);
  const stops = [row, ...row.querySelectorAll("a")], next = stops.indexOf(document.activeElement) + step;
  if (next >= 0) stops[Math.min(next, stops.length - 1)].focus();
  else if (row.parentElement.closest("details")) select(row.closest("details:not(:has(> summary:focus))").firstElementChild);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select")) {
    if (event.target !== query) return;
    if (event.key === "Escape") { query.value = ""; search(); main.focus(); }
    else if (event.key === "Enter" && event.shiftKey) { event.preventDefault(); go(-1); }
    return;
  }
  const inside = main.contains(document.activeElement) || document.activeElement === document.body;
  const act = { "/": () => query.select(), Escape: unmark,
    ...(inside && { ArrowDown: () => move(1), ArrowUp: () => move(-1), ArrowRight: () => sideways(1), ArrowLeft: () => sideways(-1) }) }[event.key];
  if (act) { event.preventDefault(); act(); }
});

for (const open of [true, false])
  element(open ? "unfold" : "fold").addEventListener("click", () => {
    for (const box of main.querySelectorAll(".equations details")) box.open = open;
  });

// --- states before and after passes ----------------------------------------------------------------

const tabs = [...document.querySelectorAll("nav input")], kept = new Map();
let state = tabs.findIndex((tab) => tab.checked);

async function show(wanted) {
  if (wanted === state || !tabs[wanted] || tabs[wanted].disabled) return;
  kept.set(state, [...main.childNodes]);
  if (!kept.has(wanted)) {
    const bytes = Uint8Array.from(atob(element("state" + wanted).textContent), (c) => c.charCodeAt(0));
    const html = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    const holder = document.createElement("template");
    holder.innerHTML = html;
    kept.set(wanted, [...holder.content.childNodes]);
  }
  tabs[wanted].checked = true;
  state = wanted;
  setHits([], "");
  main.replaceChildren(...kept.get(wanted));
  prepare();
}

// Links are reached by the arrow keys: with the tabulator there would be thousands of stops.
function prepare() {
  const counts = new Map();
  for (const link of main.querySelectorAll("code a")) link.tabIndex = -1;
  for (const { hash } of main.querySelectorAll("cite a")) counts.set(hash, (counts.get(hash) ?? 0) + 1);
  for (const line of document.querySelectorAll("aside span:has(> a)"))
    line.querySelector("small").textContent = counts.get("#" + line.id) ?? "";
}

for (const [i, tab] of tabs.entries())
  tab.addEventListener("change", () => {
    history.replaceState(null, "", `#p${i}-`);
    show(i);
  });

// --- where the address leads ----------------------------------------------------------------------

async function follow() {
  const hash = decodeURIComponent(location.hash.slice(1)), [, number, rest] = hash.match(/^(?:p(\d+)-)?(.*)$/s);
  if (number) await show(+number);
  if (rest.startsWith("q=")) {
    query.value = rest.slice(2);
    search();
    go(1);
  } else if (element(hash)) {
    const row = rowOf(element(hash));
    if (row) reveal(row);
  }
}
addEventListener("hashchange", follow);
prepare();
follow();
