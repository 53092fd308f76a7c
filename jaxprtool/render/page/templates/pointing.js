// For the element under the pointer: its card, the readers of a value, and the line in the source.
const main = element("listing");
const ROW = "main :is(p:not(.facts, .primitives, .changes), summary)";
const rowOf = (node) => node.closest(ROW);
const readers = (id) => [...main.querySelectorAll(`a[href="#${CSS.escape(id)}"]`)];

// The boxes in which a row is folded, the innermost first.
function* boxesOf(row) {
  for (let box = row.closest("details"); box; box = box.parentElement.closest("details"))
    if (box.firstElementChild !== row) yield box;
}

const lineOf = (row) => element(row.querySelector("cite a")?.hash.slice(1));

function scopeOf(row) {
  const names = [row.dataset.scope];
  for (const box of boxesOf(row)) names.unshift(box.dataset.scope ?? box.firstElementChild.dataset.scope);
  return names.filter(Boolean).join("/");
}

function mark(...nodes) {
  for (const old of document.querySelectorAll(".on")) old.classList.remove("on");
  for (const node of nodes) node?.classList.add("on");
  if (card.matches(":popover-open")) card.hidePopover();
}

function point({ target }) {
  if (target.closest(".icicle")) return;
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

