// What is told in words and bars: hit rate, tiers, evictions.

import { byId, element, redraw, say } from "./dom.js";
import { bytes, count, figure, many, share, span } from "./format.js";
import { drawSparkline } from "./sparkline.js";

/** Why blocks leave the cache: in short, and in a sentence. */
const REASONS = {
  allocate: ["for a request", "A request needed the room"],
  watermark: ["ahead of need", "To have some blocks free when a request comes"],
  call: ["on demand", "Somebody asked for it"],
  forget: ["forgotten", "Somebody had it forgotten, or its tenant erased"],
  distrust: ["not trusted", "What was in them could not be relied on"],
};

/** The hit rate since the start, and how it went. */
export function showHits({ counters }, history) {
  const { prefix_hit_tokens: hit, prefix_query_tokens: asked } = counters;
  say(byId("hit-rate"), asked ? share(hit / asked) : "–");
  say(byId("hit-words"), asked ? `${count(hit)} of ${many(asked, "prompt token")} were not computed` : "no prompts yet");
  drawSparkline(byId("sparkline"), history);
}

/** How busy the engine is. */
export function showVitals({ requests }, history) {
  byId("vitals").hidden = false;
  say(byId("running"), count(requests.running));
  say(byId("waiting"), count(requests.waiting + requests.loading));
  say(byId("speed"), figure(history.speed));
}

/** The storage tiers below the device. */
export function showTiers({ tiers }) {
  redraw(byId("tier-list"), tiers, () =>
    tiers.length ? tiers.map(tierEntry) : [element("li", { class: "hint" }, "None: what is evicted is gone.")],
  );
}

/** What left the cache last. */
export function showEvictions({ evictions, counters }) {
  const again = counters.evicted_then_wanted ? `, ${count(counters.evicted_then_wanted)} wanted again` : "";
  say(byId("evicted"), counters.evicted_blocks ? `${many(counters.evicted_blocks, "block")}${again}` : "");
  const told = evictions.map((run) => [run.blocks, run.reason, run.policy, span(run.seconds_ago)]);
  redraw(byId("eviction-list"), told, () =>
    told.length ? told.map(evictionEntry) : [element("li", { class: "hint" }, "Nothing had to go so far.")],
  );
}

function tierEntry(tier) {
  const bar = element("span", { class: "bar" });
  if (tier.capacity) {
    const filled = element("i");
    filled.style.width = `${Math.min(100, (100 * tier.bytes) / tier.capacity)}%`;
    bar.append(filled);
  }
  const room = tier.capacity ? ` of ${bytes(tier.capacity)}` : "";
  const told = [`${bytes(tier.bytes)}${room}`, many(tier.blocks, "block"), many(tier.hits, "hit")];
  if (tier.evicted) told.push(`${count(tier.evicted)} evicted`);
  if (tier.queued_bytes) told.push(`${bytes(tier.queued_bytes)} to be written`);
  const entry = element("li", { class: "tier" }, element("b", {}, tier.name), bar, element("small", {}, told.join(" · ")));
  if (!tier.healthy) entry.append(element("small", { class: "trouble" }, tier.problem || "not in use"));
  return entry;
}

function evictionEntry([blocks, reason, policy, ago]) {
  const [what, why] = REASONS[reason] ?? [reason, reason];
  return element(
    "li",
    { class: "eviction" },
    element("b", {}, many(blocks, "block")),
    element("span", { title: why }, what),
    element("small", {}, policy),
    element("time", {}, `${ago} ago`),
  );
}
