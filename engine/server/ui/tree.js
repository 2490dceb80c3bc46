// The prefix tree: a row for each edge, with where it lies on the way of the prompt, how it begins and who found it.

import { byId, element, redraw, say } from "./dom.js";
import { count, many, oneLine, span } from "./format.js";

const HEATS = 5;
const MARKER = /(<\|[^|<>]*\|>)/;

/** Nodes in the order of the tree, with their level; those below a closed one are left out. */
export function ordered(nodes, isClosed) {
  const below = new Map();
  const shown = new Set(nodes.map((node) => node.id));
  for (const node of nodes) {
    const parent = shown.has(node.parent) ? node.parent : null;
    below.set(parent, [...(below.get(parent) ?? []), node]);
  }
  const found = [];
  const waiting = (below.get(null) ?? []).map((node) => [node, 1]).reverse();
  while (waiting.length) {
    const [node, level] = waiting.pop();
    const children = below.get(node.id) ?? [];
    found.push({ node, level, hasChildren: children.length > 0 });
    if (!isClosed(node.id)) waiting.push(...children.map((child) => [child, level + 1]).reverse());
  }
  return found;
}

/** 0 for what nobody has found yet, up to 4 for what was found most. */
export function heat(hits, most) {
  if (!hits) return 0;
  return 1 + Math.min(HEATS - 2, Math.floor(((HEATS - 1) * Math.log(hits)) / Math.log(Math.max(2, most + 1))));
}

/** The tree on the page. */
export class Tree {
  /** `onPoint`: called with the node that people look at, or null. */
  constructor(onPoint) {
    this.onPoint = onPoint;
    this.root = byId("tree");
    this.detail = byId("tree-detail");
    this.rows = new Map();
    this.closed = new Set();
    this.nodes = [];
    this.current = null;
    this.pointed = null;
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.root.addEventListener("pointerleave", () => this.point(this.nodeOf(document.activeElement)));
    this.root.addEventListener("focusout", () => this.point(null));
  }

  /** Show a cache view. */
  show(view) {
    this.nodes = view.nodes;
    const shown = new Set(view.nodes.map((node) => node.id));
    for (const id of this.closed) if (!shown.has(id)) this.closed.delete(id);
    const hidden = view.tree_blocks - view.nodes.reduce((sum, node) => sum + node.blocks, 0);
    const rest = hidden > 0 ? `, ${many(hidden, "block")} not shown` : "";
    say(byId("tree-size"), `${many(view.nodes.length, "edge")}, ${many(view.tree_blocks, "block")}${rest}`);
    this.draw();
  }

  draw() {
    const list = ordered(this.nodes, (id) => this.closed.has(id));
    const longest = Math.max(1, ...this.nodes.map((node) => node.depth));
    const most = Math.max(0, ...this.nodes.map((node) => node.hits));
    this.drop(new Set(list.map(({ node }) => node.id)));
    list.forEach((entry, index) => this.place(entry, index, longest, most));
    if (!this.rows.has(this.current)) this.current = list[0]?.node.id ?? null;
    for (const [id, row] of this.rows) row.root.tabIndex = id === this.current ? 0 : -1;
    this.root.classList.toggle("empty", !list.length);
    this.point(this.rows.get(this.pointed?.id)?.node ?? null);
    if (!list.length) say(this.detail, "Nothing is cached yet.");
  }

  /** The node whose row this is, or null. */
  nodeOf(target) {
    return this.rows.get(Number(target.dataset.id))?.node ?? null;
  }

  drop(kept) {
    for (const [id, row] of this.rows) {
      if (kept.has(id)) continue;
      row.root.remove();
      this.rows.delete(id);
    }
  }

  place(entry, index, longest, most) {
    const { id } = entry.node;
    if (!this.rows.has(id)) this.rows.set(id, new Row(this));
    const row = this.rows.get(id);
    row.show(entry, this.closed.has(id), longest, most);
    const there = this.root.children[index];
    if (there === row.root) return;
    const hadFocus = document.activeElement === row.root;
    this.root.insertBefore(row.root, there ?? null);
    if (hadFocus) row.root.focus({ preventScroll: true });
  }

  /** Somebody looks at `node`, or at none. */
  point(node) {
    const isOther = this.pointed?.id !== node?.id;
    this.pointed = node;
    say(this.detail, node ? described(node) : "");
    if (isOther) this.onPoint(node);
  }

  toggle(id, isClosed = !this.closed.has(id)) {
    if (isClosed) this.closed.add(id);
    else this.closed.delete(id);
    this.draw();
  }

  select(id) {
    this.current = id;
    for (const [each, row] of this.rows) row.root.tabIndex = each === id ? 0 : -1;
    this.rows.get(id).root.focus();
  }

  /** Keys as in the pattern for trees: https://www.w3.org/WAI/ARIA/apg/patterns/treeview/ */
  key(event) {
    const row = this.nodeOf(event.target);
    if (!row || event.ctrlKey || event.altKey || event.metaKey) return;
    const all = Array.from(this.root.children, (each) => Number(each.dataset.id));
    const at = all.indexOf(row.id);
    const isOpen = event.target.getAttribute("aria-expanded") === "true";
    const isShut = event.target.getAttribute("aria-expanded") === "false";
    const go = (id) => (id === undefined ? undefined : this.select(id));
    const moves = {
      ArrowDown: () => go(all[at + 1]),
      ArrowUp: () => go(all[at - 1]),
      Home: () => go(all[0]),
      End: () => go(all.at(-1)),
      ArrowRight: () => (isShut ? this.toggle(row.id, false) : isOpen ? go(all[at + 1]) : undefined),
      ArrowLeft: () => (isOpen ? this.toggle(row.id, true) : this.rows.has(row.parent) ? go(row.parent) : undefined),
      Enter: () => (isOpen || isShut ? this.toggle(row.id) : undefined),
      " ": () => (isOpen || isShut ? this.toggle(row.id) : undefined),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  }
}

/** An edge. */
class Row {
  constructor(tree) {
    this.turner = element("span", { class: "turner", "aria-hidden": "true" });
    this.text = element("span", { class: "text" });
    this.marks = element("span", { class: "marks" });
    this.bar = element("i");
    this.lane = element("span", { class: "lane", "aria-hidden": "true" }, this.bar);
    this.hits = element("span", { class: "count" });
    this.age = element("span", { class: "age" });
    this.root = element("div", { role: "treeitem", class: "row" });
    this.root.append(this.turner, this.text, this.marks, this.lane, this.hits, this.age);
    this.turner.addEventListener("click", () => tree.toggle(this.node.id));
    this.root.addEventListener("pointerenter", () => tree.point(this.node));
    this.root.addEventListener("focus", () => tree.point(this.node));
    this.root.addEventListener("click", () => tree.select(this.node.id));
  }

  show({ node, level, hasChildren }, isClosed, longest, most) {
    const before = this.node;
    this.node = node;
    this.root.dataset.id = node.id;
    this.root.dataset.heat = heat(node.hits, most);
    this.root.setAttribute("aria-level", level);
    if (hasChildren || isClosed) this.root.setAttribute("aria-expanded", String(!isClosed));
    else this.root.removeAttribute("aria-expanded");
    this.turner.style.marginInlineStart = `${Math.min(level - 1, 12) * 0.8}rem`;
    const text = node.text === null ? many(node.tokens, "token") : oneLine(node.text);
    redraw(this.text, text, () => text.split(MARKER).map(piece));
    this.bar.style.marginInlineStart = `${(100 * (node.depth - node.tokens)) / longest}%`;
    this.bar.style.width = `${(100 * node.tokens) / longest}%`;
    say(this.hits, `${count(node.hits)}×`);
    say(this.age, node.locks ? "in use" : span(node.idle_seconds));
    this.root.setAttribute("aria-label", `${this.text.textContent}: ${described(node)}`);
    this.mark(node);
    if (before && node.hits > before.hits) this.flash();
  }

  mark(node) {
    const told = [];
    if (node.tenant !== null) told.push(["tenant", node.tenant]);
    if (node.priority !== 0) told.push(["priority", `priority ${node.priority}`]);
    if (this.marks.textContent === told.map(([, text]) => text).join("")) return;
    this.marks.replaceChildren(...told.map(([name, text]) => element("span", { class: `mark ${name}` }, text)));
  }

  /** It was found since the last look. */
  flash() {
    this.root.classList.remove("fresh");
    void this.root.offsetWidth; // let the animation begin anew
    this.root.classList.add("fresh");
  }
}

/** What chat templates put in stands back behind what people wrote. */
const piece = (text, at) => (at % 2 ? element("span", { class: "marker" }, text) : text);

function described(node) {
  const begin = node.depth - node.tokens;
  const ids = node.first_blocks.slice(0, 6).join(", ") + (node.blocks > 6 ? ", …" : "");
  const told = [
    `tokens ${count(begin)}–${count(node.depth)} in ${many(node.blocks, "block")} (${ids})`,
    `found ${many(node.hits, "time")}`,
    node.locks ? `held by ${node.locks}` : `used ${span(node.idle_seconds)} ago`,
  ];
  if (node.children) told.push(many(node.children, "continuation"));
  return told.join(" · ");
}
