// A turn: what was asked, the answer as it comes, and what it took.

import { element } from "./dom.js";
import { brief, count, figure, many, share } from "./format.js";

/** How an answer ended when it is worth saying. */
const ENDINGS = { length: "cut off at max tokens", stopped: "stopped" };

/** A turn on the page. */
export class Turn {
  /** `retry`: called when people want it once more, after it has failed. */
  constructor(question, retry) {
    this.question = question;
    this.answer = "";
    this.asked = element("div", { class: "asked" }, question);
    this.text = element("div", { class: "answer", "aria-busy": "true" });
    this.foot = element("footer", { class: "took" });
    this.root = element("article", { class: "turn" }, this.asked, this.text, this.foot);
    this.retry = retry;
  }

  /** More of the answer. */
  add(text) {
    this.answer += text;
    this.text.append(text);
  }

  /** It is over. `usage`: the server's count; null for one that was stopped. */
  end(ending, usage, times) {
    this.text.removeAttribute("aria-busy");
    this.foot.replaceChildren(...(usage ? [prefixBar(usage), ...words(usage, times)] : []));
    if (ENDINGS[ending]) this.foot.append(element("span", { class: "ending" }, ENDINGS[ending]));
  }

  /** It has failed, and is no part of the conversation. */
  fail(message) {
    this.root.classList.add("failed");
    this.text.removeAttribute("aria-busy");
    const again = element("button", { type: "button", onclick: () => this.retry(this) }, "Try again");
    this.foot.replaceChildren(element("p", { class: "problem", role: "alert" }, message, " ", again));
  }

  /** A sentence about it, for those who listen. */
  get summary() {
    return `Answer complete. ${this.foot.textContent}`;
  }
}

/** The prompt as a bar: what came from the cache, and what had to be computed. */
function prefixBar(usage) {
  const cached = usage.prompt_tokens_details.cached_tokens;
  const filled = element("i", { class: "cached" });
  filled.style.width = `${(100 * cached) / usage.prompt_tokens}%`;
  const text = `${share(cached / usage.prompt_tokens)} of the prompt came from the cache`;
  return element("span", { class: "prefix-bar", role: "img", "aria-label": text, title: text }, filled);
}

function words(usage, times) {
  const cached = usage.prompt_tokens_details.cached_tokens;
  const told = [
    [`${count(cached)} of ${many(usage.prompt_tokens, "prompt token")} cached`, "cached-tokens"],
    [`first token after ${brief(times.first)}`, "ttft"],
    [many(usage.completion_tokens, "token"), "completion"],
  ];
  if (times.rate > 0) told.push([`${figure(times.rate)} tokens/s`, "rate"]);
  return told.map(([text, name]) => element("span", { class: name }, text));
}
