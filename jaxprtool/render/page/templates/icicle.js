// Flame graphs, drawn from the root down. A click zooms; lines of the source lead to their frames.
const graphs = [];
const percent = (part, whole) => `${((100 * part) / (whole || 1)).toFixed(1)}%`;

// The code of a source line, without the number beside it.
const codes = new Map();

function codeOf(line) {
  if (line && !codes.has(line)) {
    const shown = element(line);
    codes.set(line, shown?.closest("aside") ? shown.textContent.slice(shown.querySelector("small").textContent.length).trim() : "");
  }
  return codes.get(line) ?? "";
}

// A frame as an object, followed by the frames inside.
function framesOf([name, amount, text, line, inside], parent = null, start = 0) {
  const frame = { name, amount, text, line: line || parent?.line || "", parent, start, depth: parent ? parent.depth + 1 : 0 };
  frame.path = parent ? `${parent.path}\n${name}` : "";
  const frames = [frame];
  for (const each of inside) {
    frames.push(...framesOf(each, frame, start));
    start += each[1];
  }
  return frames;
}

function hueOf(name) {
  let hue = 0;
  for (const letter of name.replace(/[\d#:]+$/, "")) hue = (hue * 31 + letter.codePointAt(0)) % 360;
  return hue;
}

class Flames {
  constructor(figure) {
    const one = (selector) => figure.querySelector(selector);
    [this.figure, this.box, this.said, this.query, this.found, this.out] = [figure, ...[".flames", ".said", "input", "output", ".out"].map(one)];
    this.quantities = JSON.parse(one(".data").textContent);
    this.tabs = [...figure.querySelectorAll("[role=tab]")];
    for (const [i, tab] of this.tabs.entries()) tab.addEventListener("click", () => this.show(i));
    this.query.addEventListener("input", () => this.search());
    this.query.addEventListener("keydown", (event) => event.key === "Escape" && this.clear());
    this.out.addEventListener("click", () => this.zoom(this.top.parent));
    this.box.addEventListener("click", ({ target }) => this.click(this.frameOf(target)));
    this.box.addEventListener("keydown", (event) => this.key(event));
    for (const kind of ["mouseover", "focusin"]) this.box.addEventListener(kind, ({ target }) => this.point(this.frameOf(target)));
    this.box.addEventListener("mouseleave", () => this.point(null));
    new ResizeObserver(() => this.layOut()).observe(this.box);
    figure.hidden = false;
    this.show(0);
    graphs.push(this);
  }

  frameOf(target) {
    return this.frames.find((frame) => frame.node === target.closest("button"));
  }

  // --- drawing

  show(number) {
    const path = this.top?.path;
    for (const [i, tab] of this.tabs.entries()) tab.ariaSelected = String(i === number);
    const [, root, note, lines] = this.quantities[number];
    [this.note, this.frames] = [note, framesOf(root)];
    this.root = this.frames[0];
    for (const frame of this.frames) this.make(frame);
    this.box.replaceChildren(...this.frames.map((frame) => frame.node));
    if (!graphs.length || graphs.includes(this)) this.shareLines(lines);
    this.zoom(this.frames.find((frame) => frame.path === path) ?? this.root);
    this.search();
  }

  make(frame) {
    const node = (frame.node = document.createElement("button"));
    Object.assign(node, { type: "button", tabIndex: frame === this.root ? 0 : -1, role: "treeitem", ariaLevel: String(frame.depth + 1) });
    node.ariaLabel = `${frame.name}, ${frame.text}, ${percent(frame.amount, this.root.amount)}`;
    node.style.setProperty("--hue", hueOf(frame.name));
    const share = Object.assign(document.createElement("small"), { textContent: percent(frame.amount, this.root.amount) });
    const code = Object.assign(document.createElement("small"), { textContent: frame.name.includes(":") ? codeOf(frame.line) : "" });
    node.append(frame.name.replace(/^.*\/(?=[^\/]+:\d+$)/, ""), " ", share, "  ", code);
  }

  zoom(frame) {
    if (!frame) return;
    this.top = frame;
    this.out.disabled = !frame.parent;
    this.layOut();
    this.point(null);
  }

  layOut() {
    const { start, amount, depth } = this.top, width = this.box.clientWidth;
    let deepest = depth;
    for (const frame of this.frames) {
      const around = frame.depth <= depth && this.within(this.top, frame);
      const left = around ? 0 : (frame.start - start) / amount, part = around ? 1 : frame.amount / amount;
      const shown = around || (this.within(frame, this.top) && part * width > 0.7);
      frame.node.hidden = !shown;
      if (!shown) continue;
      frame.node.classList.toggle("around", around && frame !== this.top);
      Object.assign(frame.node.style, { left: `${100 * left}%`, width: `${100 * part}%`, top: `${1.7 * frame.depth}em` });
      deepest = Math.max(deepest, frame.depth);
    }
    this.box.style.height = `${1.7 * (deepest + 1)}em`;
  }

  within(frame, outer) {
    while (frame.depth > outer.depth) frame = frame.parent;
    return frame === outer;
  }

  // --- pointing

  point(frame) {
    const at = frame ?? this.top, names = [];
    for (let outer = at.parent; outer; outer = outer.parent) names.unshift(outer.name, " › ");
    const name = Object.assign(document.createElement(at.line ? "a" : "b"), { textContent: at.name });
    if (at.line) name.href = `#${at.line}`;
    const share = percent(at.amount, this.root.amount), note = frame ? "" : this.note;
    const exact = Number.isInteger(at.amount) ? ` (${at.amount.toLocaleString("en")})` : "";
    this.said.replaceChildren(names.join(""), name, ` ${at.text}${exact}, ${share}`, note && `; ${note}`);
    if (!frame) return card.matches(":popover-open") && card.hidePopover();
    const inside = this.top.parent && at.amount < this.top.amount ? `, ${percent(at.amount, this.top.amount)} of ${this.top.name}` : "";
    showCard(frame.node, at.name, `${at.text}${exact}`, `${share} of ${this.root.name}${inside}`, codeOf(at.line));
    const above = frame.node.getBoundingClientRect().top - card.offsetHeight - 4;  // not over the frames inside
    if (above > 0) card.style.top = `${above}px`;
  }

  click(frame) {
    if (!frame) return;
    this.zoom(frame === this.top && frame.parent ? frame.parent : frame);
    const line = element(frame.line);
    for (const old of document.querySelectorAll("aside .sel")) old.classList.remove("sel");
    if (!line?.closest("aside")) return;
    line.classList.add("sel");
    const pane = line.closest("aside"), box = pane.getBoundingClientRect();
    pane.scrollBy({ top: line.getBoundingClientRect().top - box.top - box.height / 3 });
  }

  key(event) {
    const frame = this.frameOf(document.activeElement), shown = this.frames.filter((other) => !other.node.hidden);
    if (!frame || event.ctrlKey || event.metaKey || event.altKey) return;
    const beside = shown.filter((other) => other.depth === frame.depth), at = beside.indexOf(frame);
    const next = {
      ArrowUp: frame.parent,
      ArrowDown: shown.find((other) => other.parent === frame),
      ArrowLeft: beside[at - 1],
      ArrowRight: beside[at + 1],
      Home: this.root,
    };
    if (event.key === "Escape") this.zoom(this.top.parent);
    else if (!(event.key in next)) return;
    event.preventDefault();
    event.stopPropagation();
    next[event.key]?.node.focus();
  }

  // --- searching

  search() {
    const words = wordsOf(this.query.value);
    this.mark(words.length ? (frame) => words.every((word) => word.test(`${frame.name} ${codeOf(frame.line)}`.toLowerCase())) : null);
  }

  clear() {
    this.query.value = "";
    this.mark(null);
  }

  // Mark frames, and count the share of the outermost ones.
  mark(matches) {
    let hits = 0, amount = 0;
    for (const frame of this.frames) {
      const hit = Boolean(matches?.(frame));
      frame.counted = hit || Boolean(frame.parent?.counted);
      if (hit) hits++;
      if (hit && !frame.parent?.counted) amount += frame.amount;
      frame.node.classList.toggle("match", hit);
    }
    this.box.classList.toggle("searched", Boolean(matches));
    this.found.value = matches ? `${count(hits, "frame")}, ${percent(amount, this.root.amount)}` : "";
  }

  // --- lines

  shareLines(amounts) {
    for (const line of document.querySelectorAll("aside pre > span")) {
      const amount = amounts[line.id] ?? 0, share = amount / this.root.amount;
      line.querySelector("small").dataset.share = share >= 0.0005 ? percent(amount, this.root.amount) : "";
      line.style.setProperty("--share", Math.min(share * 200, 100).toFixed(0));
    }
  }

  // Show the frames of a source line, and return whether there are any.
  showLine(id) {
    if (!this.figure.checkVisibility() || !this.frames.some((frame) => frame.line === id)) return false;
    this.zoom(this.root);
    this.query.value = "";
    this.mark((frame) => frame.line === id);
    this.figure.scrollIntoView({ block: "nearest" });
    return true;
  }
}

const drawGraphs = (within) => {
  for (const figure of within.querySelectorAll(".icicle[hidden]")) new Flames(figure);
};
drawGraphs(document);

document.addEventListener("click", (event) => {
  const line = event.target.closest("aside pre > span");
  const shown = line ? graphs.filter((graph) => graph.showLine(line.id)) : [];
  if (shown.length && element("view-equations")) event.preventDefault();  // stay on the summary
});
document.addEventListener("keydown", (event) => {
  const graph = graphs.find((graph) => graph.figure.checkVisibility());
  if (event.key !== "/" || !graph || event.target.matches("input") || element("query")?.checkVisibility()) return;
  event.preventDefault();
  graph.query.select();
});
