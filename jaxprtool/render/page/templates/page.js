// Searching rows, the arrow keys, and the states of other passes. HTML does folding, links and tabs.
const query = element("query"), found = element("found");

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

main.addEventListener("click", ({ target }) => {
  const row = rowOf(target);
  if (target.matches("dfn")) showReaders(target);
  else if (row && !target.closest("a") && getSelection().isCollapsed) select(row);
});

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
  const words = wordsOf(query.value);
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
    kept.set(wanted, [...(await unpacked("state" + wanted)).childNodes]);
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

// Show the number of equations of this state at each source line. Values are reached by the arrow
// keys, since the tab key would have thousands of stops.
function prepare() {
  const counts = new Map();
  for (const { hash } of main.querySelectorAll("[id] > cite a")) counts.set(hash, (counts.get(hash) ?? 0) + 1);
  for (const line of document.querySelectorAll("aside span:has(> a)"))
    line.querySelector("small").textContent = counts.get("#" + line.id) ?? "";
  for (const link of main.querySelectorAll(".equations a, .border a")) link.tabIndex = -1;
  tabs[state]?.parentElement.scrollIntoView({ block: "nearest", inline: "nearest" });
}

// --- the target of the address --------------------------------------------------------------------

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
follow();
