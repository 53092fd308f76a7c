// A recorded run: rows that open, the filter, and the visible part of the timeline.
const query = element("query"), found = element("found"), end = Number(main.dataset.end);
const rows = [...document.querySelectorAll("#functions tbody")];

// --- what is below a row --------------------------------------------------------------------------

async function open(row, wanted = true) {
  const button = row.querySelector(".open");
  button.ariaExpanded = String(wanted);
  if (wanted && row.rows.length === 1) {
    const below = row.insertRow(), cell = below.insertCell();
    below.className = "detail";
    cell.colSpan = row.rows[0].cells.length;
    cell.append(await unpacked("part" + row.id.slice(2)));
    for (const box of cell.querySelectorAll(".compilation[open]")) await fill(box);
  } else if (row.rows.length > 1) row.rows[1].hidden = !wanted;
}

// The listing of a program is made when its compilation is opened for the first time.
async function fill(box) {
  const holder = box.querySelector("[data-program]");
  if (!holder) return;
  const number = holder.dataset.program;
  holder.removeAttribute("data-program");
  holder.replaceChildren(await unpacked("program" + number));
  drawGraphs(holder);
}

document.addEventListener("toggle", ({ target }) => {
  if (target.matches?.(".compilation[open]")) fill(target);
}, true);

document.addEventListener("click", ({ target }) => {
  if (target.matches(".open")) open(target.closest("tbody"), target.ariaExpanded !== "true");
});

// --- the filter -----------------------------------------------------------------------------------

const texts = new Map();

function textOf(row) {
  if (!texts.has(row)) {
    const own = row.matches("tbody") ? row.rows[0] : row;
    texts.set(row, [own.textContent, row.dataset.find].join(" ").toLowerCase());
  }
  return texts.get(row);
}

function filter() {
  const words = wordsOf(query.value), off = new Set();
  const matches = (row) => words.every((word) => word.test(textOf(row)));
  for (const row of rows) {
    row.hidden = !matches(row);
    if (row.hidden) off.add("#" + row.id);
  }
  for (const row of document.querySelectorAll(".view:not(#functions) > table > tbody > tr")) row.hidden = !matches(row);
  for (const bar of document.querySelectorAll(".lane a")) bar.classList.toggle("off", off.has(bar.getAttribute("href")));
  found.value = words.length ? count(rows.length - off.size, "function") : "";
}

query.addEventListener("input", filter);
query.form.addEventListener("submit", (event) => {
  event.preventDefault();
  const first = rows.find((row) => !row.hidden);
  if (first) show(first);
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && document.activeElement === query) {
    query.value = "";
    filter();
  } else if (event.key === "Escape") zoom(0, end);
  else if (event.key === "/" && document.activeElement !== query) {
    event.preventDefault();
    query.select();
  }
});

// --- the timeline ---------------------------------------------------------------------------------

// The overview always shows the whole run, and marks the part that the rows show.
const lanes = [...document.querySelectorAll(".lane .bars")], overview = document.querySelector(".timeline");
overview?.style.setProperty("--from", 0);
overview?.style.setProperty("--to", end);
const seconds = (time, step) => (step >= 1 || !time ? `${time.toFixed(0)} s` : step >= 1e-3 ? `${(time * 1e3).toFixed(0)} ms` : `${(time * 1e6).toFixed(0)} µs`);

function ticks(axis, from, to, most) {
  const rough = (to - from) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const marks = [];
  for (let i = Math.ceil(from / step); i * step < to - step / 3; i++) {
    const tick = Object.assign(document.createElement("span"), { textContent: seconds(i * step, step) });
    tick.style.left = ((i * step - from) / (to - from)) * 100 + "%";
    marks.push(tick);
  }
  axis.replaceChildren(...marks);
}

function zoom(from, to) {
  main.style.setProperty("--from", from);
  main.style.setProperty("--to", to);
  const part = from > 0 || to < end;
  main.classList.toggle("zoomed", part);
  if (!overview) return;
  element("whole").hidden = !part;
  for (const lane of lanes) {
    lane.querySelector(".window")?.remove();
    if (part) lane.append(frame(from / end, to / end));
  }
  ticks(document.querySelector(".when .axis"), from, to, 3);
}

function frame(left, right) {
  const box = Object.assign(document.createElement("div"), { className: "window" });
  box.style.left = left * 100 + "%";
  box.style.right = (1 - right) * 100 + "%";
  return box;
}

for (const lane of lanes) {
  let start = null;
  const at = (event) => Math.min(1, Math.max(0, (event.clientX - lane.getBoundingClientRect().left) / lane.clientWidth));
  lane.addEventListener("pointerdown", (event) => { if (event.button === 0) start = at(event); });
  lane.addEventListener("pointermove", (event) => {
    if (start === null || Math.abs(at(event) - start) * lane.clientWidth < 5) return;
    lane.setPointerCapture(event.pointerId);
    const [left, right] = [start, at(event)].sort((a, b) => a - b);
    zoom(left * end, right * end);
  });
  for (const kind of ["pointerup", "pointercancel"]) lane.addEventListener(kind, () => { start = null; });
}
element("whole")?.addEventListener("click", () => zoom(0, end));
if (overview) {
  ticks(overview.querySelector(":scope > .axis"), 0, end, 8);
  zoom(0, end);
}

// --- the target of the address --------------------------------------------------------------------

async function show(row) {
  row.hidden = false;
  await open(row);
  row.scrollIntoView({ block: "start" });
  row.querySelector(".open").focus({ preventScroll: true });
}

function follow() {
  const hash = decodeURIComponent(location.hash.slice(1));
  if (hash.startsWith("q=")) {
    query.value = hash.slice(2);
    filter();
    rows.find((row) => !row.hidden)?.scrollIntoView({ block: "nearest" });
  } else if (element(hash)?.matches("#functions tbody")) show(element(hash));
}
addEventListener("hashchange", follow);
// Clicking the current compilation leads to its function again.
document.addEventListener("click", ({ target }) => {
  if (target.matches("a[href^='#fn']") && target.hash === location.hash) follow();
});
follow();
