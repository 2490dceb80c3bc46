// Which replica the cache side is about, where a gateway stands before several.

import { replica } from "./api.js";
import { byId, element, redraw } from "./dom.js";

/** The choice, on the page from two replicas on. */
export class Replicas {
  /** `onTurn`: called when it has become another one. */
  constructor(onTurn) {
    this.onTurn = onTurn;
    byId("replica").addEventListener("change", (event) => this.choose(event.target.value));
  }

  /** These are there, by name; none: what answers is no gateway. Who was chosen stays so for as long as it is there. */
  offer(names) {
    const sorted = [...names].sort();
    byId("replica-choice").hidden = sorted.length < 2;
    const options = () => sorted.map((name) => element("option", { value: name }, name));
    redraw(byId("replica"), sorted, options);
    this.choose(sorted.includes(replica.value) ? replica.value : (sorted[0] ?? ""));
  }

  choose(name) {
    byId("replica").value = name;
    if (name === replica.value) return;
    replica.value = name;
    this.onTurn();
  }
}
