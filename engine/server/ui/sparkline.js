// The hit rate over the last two minutes: a line, over bars that show how many prompt tokens there were.

import { share } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const SAMPLES = 120;
const WINDOW = 8;

/** Samples of the counters of cache views, and what happened between them. */
export class HitHistory {
  constructor() {
    this.steps = [];
    this.last = null;
  }

  /** Another view has come. Counters that went back are those of another server: begin anew. */
  add({ time, counters }) {
    const now = { time, ...counters };
    if (this.last && now.prefix_query_tokens < this.last.prefix_query_tokens) this.steps = [];
    else if (this.last) this.steps.push(between(this.last, now));
    const newest = this.steps.at(-1);
    if (newest) newest.rate = newest.asked ? this.rate : (this.steps.at(-2)?.rate ?? null);
    this.last = now;
    this.steps.splice(0, this.steps.length - SAMPLES);
  }

  /** Generated tokens per second over the last few views. */
  get speed() {
    const recent = this.steps.slice(-3);
    const seconds = recent.reduce((sum, step) => sum + step.seconds, 0);
    return seconds > 0 ? recent.reduce((sum, step) => sum + step.generated, 0) / seconds : 0;
  }

  /** Hit rate of the last few steps in which anything was asked. */
  get rate() {
    const window = this.steps.filter((step) => step.asked).slice(-WINDOW);
    const asked = window.reduce((sum, step) => sum + step.asked, 0);
    return window.reduce((sum, step) => sum + step.hit, 0) / asked;
  }
}

/** Draw a history. */
export function drawSparkline(svg, { steps }) {
  const rates = steps.map((step) => step.rate);
  const most = Math.max(1, ...steps.map((step) => step.asked));
  const shift = SAMPLES - steps.length;
  const bars = steps.map(({ asked, hit }, at) => bar(at + shift, asked / most, hit / most)).join("");
  svg.setAttribute("viewBox", `0 0 ${SAMPLES} 100`);
  svg.replaceChildren(
    path("asked", bars),
    path("hit", steps.map(({ hit }, at) => bar(at + shift, hit / most, 0)).join("")),
    path("rate", line(rates, shift)),
  );
  const known = rates.filter((rate) => rate !== null);
  const words = known.length ? `Hit rate now ${share(known.at(-1))}` : "No prompts";
  svg.setAttribute("aria-label", `${words}, in the last two minutes`);
}

function between(before, now) {
  return {
    seconds: now.time - before.time,
    asked: now.prefix_query_tokens - before.prefix_query_tokens,
    hit: now.prefix_hit_tokens - before.prefix_hit_tokens,
    generated: now.generated_tokens - before.generated_tokens,
  };
}

/** From `base` up to `height`, both shares. */
function bar(at, height, base) {
  if (height <= base) return "";
  return `M${at + 0.15} ${100 - 100 * base}h.7V${100 - 100 * height}h-.7z`;
}

function line(rates, shift) {
  let command = "M";
  let found = "";
  rates.forEach((rate, at) => {
    if (rate !== null) found += `${command}${at + shift + 0.5} ${97 - 94 * rate}`;
    command = rate === null ? "M" : "L";
  });
  return found;
}

function path(name, shape) {
  const made = document.createElementNS(SVG, "path");
  made.setAttribute("class", name);
  made.setAttribute("d", shape);
  return made;
}
