// The pool map: a canvas with a cell for each block, or for several where there are too many.

import { byId, element, redraw, say } from "./dom.js";
import { count, many } from "./format.js";

/** The states of blocks, by the letters of the server. Later ones are painted over earlier ones in mixed cells. */
export const STATES = {
  f: { name: "free", field: "free", color: "--free" },
  i: { name: "idle", field: "idle", color: "--idle" },
  h: { name: "held", field: "held", color: "--held" },
  p: { name: "pinned", field: "pinned", color: "--pinned" },
  t: { name: "in transfer", field: "in_transfer", color: "--transfer" },
};
const SMALLEST = 4;
const LARGEST = 16;
const HEIGHT = 152;

/** "i12hf3" -> [["i", 12], ["h", 1], ["f", 3]]. */
export function runs(map) {
  return Array.from(map.matchAll(/([a-z])(\d*)/g), ([, letter, times]) => [letter, Number(times || 1)]);
}

/**
 * How `total` blocks fit into `width` x `height` CSS pixels with `ratio` device pixels each: the side of a cell in
 * device pixels, cells in a row, rows, and blocks for each cell.
 */
export function layout(total, width, height, ratio) {
  const [wide, high] = [Math.floor(width * ratio), Math.floor(height * ratio)];
  const smallest = Math.round(SMALLEST * ratio);
  let cell = Math.round(LARGEST * ratio);
  while (cell > smallest && Math.floor(wide / cell) * Math.floor(high / cell) < total) cell -= 1;
  const columns = Math.max(1, Math.floor(wide / cell));
  const room = columns * Math.max(1, Math.floor(high / cell));
  const blocks = Math.max(1, Math.ceil(total / room));
  return { cell, columns, rows: Math.ceil(total / blocks / columns), blocks };
}

/** The pool on the page. */
export class Pool {
  constructor() {
    this.canvas = byId("pool-map");
    this.hint = byId("pool-hint");
    this.states = new Uint8Array(0);
    this.marked = new Set();
    this.spot = null;
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.canvas.addEventListener("pointermove", (event) => this.point([event.offsetX, event.offsetY]));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
  }

  /** Show a cache view. */
  show(view) {
    this.blockSize = view.block_size;
    if (this.map !== view.pool.map) {
      this.map = view.pool.map;
      this.states = unpacked(view.pool);
      this.draw();
    }
    this.tell();
    const parts = Object.values(STATES).map((state) => [state, view.pool[state.field]]);
    this.canvas.setAttribute("aria-label", `Pool map: ${parts.map(([{ name }, n]) => `${n} ${name}`).join(", ")}`);
    redraw(byId("legend"), view.pool, () => parts.map(([state, n]) => legendEntry(state, n)));
  }

  /** Outline these blocks. */
  mark(ids) {
    this.marked = new Set(ids);
    this.draw();
  }

  draw() {
    const ratio = devicePixelRatio || 1;
    const width = this.canvas.parentElement.clientWidth - padding(this.canvas.parentElement);
    if (!this.states.length || width <= 0) return;
    const found = layout(this.states.length, width, HEIGHT, ratio);
    this.layout = found;
    this.canvas.width = Math.floor(width * ratio);
    this.canvas.height = found.rows * found.cell;
    this.canvas.style.height = `${this.canvas.height / ratio}px`;
    paint(this.canvas.getContext("2d"), found, this.states, colors(this.canvas), ratio);
    this.outline(found, ratio);
  }

  outline({ cell, columns, blocks }, ratio) {
    const context = this.canvas.getContext("2d");
    context.strokeStyle = getComputedStyle(this.canvas).getPropertyValue("--mark");
    context.lineWidth = 2 * ratio;
    for (const id of this.marked) {
      const place = Math.floor(id / blocks);
      context.strokeRect((place % columns) * cell, Math.floor(place / columns) * cell, cell - 1, cell - 1);
    }
  }

  /** The pointer is at this place of the canvas, or not on it. */
  point(spot) {
    this.spot = spot;
    this.tell();
  }

  /** Say what lies below the pointer, or how large all of it is. */
  tell() {
    if (!this.layout) return;
    const [first, last] = this.spot ? this.blocksAt(...this.spot) : [0, 0];
    if (first >= last) {
      say(this.hint, `${many(this.states.length, "block")} of ${many(this.blockSize, "token")}`);
      return;
    }
    const names = new Set(Array.from(this.states.subarray(first, last), nameOf));
    const which = last - first === 1 ? `block ${first}` : `blocks ${first}–${last - 1}`;
    say(this.hint, `${which}: ${[...names].join(", ")}`);
  }

  /** First and last + 1 of the blocks in the cell at a place of the canvas; none: both are the same. */
  blocksAt(x, y) {
    const { cell, columns, blocks } = this.layout;
    const side = cell / (devicePixelRatio || 1);
    const column = Math.floor(x / side);
    if (column < 0 || column >= columns || y < 0) return [0, 0];
    const first = Math.min((Math.floor(y / side) * columns + column) * blocks, this.states.length);
    return [first, Math.min(first + blocks, this.states.length)];
  }
}

function unpacked({ map, total }) {
  const states = new Uint8Array(total);
  let at = 0;
  for (const [letter, times] of runs(map)) {
    states.fill(letter.charCodeAt(0), at, at + times);
    at += times;
  }
  return states;
}

const nameOf = (code) => STATES[String.fromCharCode(code)].name;

function padding(box) {
  const style = getComputedStyle(box);
  return parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
}

/** Code of a state -> its colour in this theme, as [red, green, blue]. */
function colors(canvas) {
  const style = getComputedStyle(canvas);
  const read = ([letter, { color }]) => [letter.charCodeAt(0), parsed(style.getPropertyValue(color).trim())];
  return new Map(Object.entries(STATES).map(read));
}

const parsed = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

function paint(context, { cell, columns, blocks }, states, palette, ratio) {
  const side = cell - Math.max(1, Math.round(cell / 9));
  const paths = new Map();
  for (let place = 0; place * blocks < states.length; place += 1) {
    const color = mixed(states.subarray(place * blocks, (place + 1) * blocks), palette);
    if (!paths.has(color)) paths.set(color, new Path2D());
    paths.get(color).rect((place % columns) * cell, Math.floor(place / columns) * cell, side, side);
  }
  for (const [color, path] of paths) {
    context.fillStyle = color;
    context.fill(path);
  }
}

/** The colour of a cell: of its blocks, each as much as there is of it. */
function mixed(states, palette) {
  if (states.length === 1) return `rgb(${palette.get(states[0]).join(" ")})`;
  const sum = [0, 0, 0];
  for (const code of states) palette.get(code).forEach((part, index) => (sum[index] += part));
  return `rgb(${sum.map((part) => Math.round(part / states.length)).join(" ")})`;
}

function legendEntry({ name, field }, blocks) {
  const swatch = element("i", { class: `swatch ${field}` });
  return element("li", { "data-state": field }, swatch, `${name} `, element("b", {}, count(blocks)));
}
