// The right side: asks for the cache view once a second while somebody looks, and has it drawn.

import { adminToken, ask } from "./api.js";
import { byId, say } from "./dom.js";
import { Operations } from "./operations.js";
import { Replicas } from "./replicas.js";
import { showEvictions, showHits, showTiers, showVitals } from "./panels.js";
import { Pool } from "./pool.js";
import { HitHistory } from "./sparkline.js";
import { Tree } from "./tree.js";

const PERIOD = 1000;
const LAZY = 4;
const PATH = "admin/cache?nodes=200&text=true";

/** The cache on the page. */
export class Cache {
  constructor(chat) {
    this.history = new HitHistory();
    this.pool = new Pool();
    this.tree = new Tree((node) => this.pool.mark(node?.first_blocks ?? []));
    this.operations = new Operations(chat, () => this.soon());
    this.replicas = new Replicas(() => this.turn());
    this.timer = null;
    byId("door").addEventListener("submit", (event) => {
      event.preventDefault();
      adminToken.value = byId("token").value.trim();
      this.start();
    });
    byId("leave").addEventListener("click", () => {
      adminToken.value = "";
      this.start();
    });
    document.addEventListener("visibilitychange", () => this.start());
  }

  /** Begin to look, with the token that there is now. */
  start() {
    clearTimeout(this.timer);
    this.run = {};
    if (document.hidden) return;
    if (adminToken.value) this.look(this.run);
    else this.showDoor();
  }

  /** Something has changed: look at once. */
  soon() {
    if (adminToken.value && !byId("live").hidden) this.start();
  }

  /** It is another replica's cache now. */
  turn() {
    this.history = new HitHistory();
    this.operations.forget();
    if (adminToken.value) this.start();
  }

  async look(run) {
    const began = performance.now();
    try {
      const view = await ask("GET", PATH, { secret: adminToken });
      if (run !== this.run) return; // another look has begun meanwhile
      if (view.replicas) this.replicas.offer(Object.keys(view.replicas)); // a gateway that has asked all: one will do
      if (run !== this.run) return;
      this.show(view);
      await this.operations.show(view);
    } catch (error) {
      if (run !== this.run) return;
      if (error.status === 403) {
        adminToken.value = "";
        this.showDoor(error.message);
        return;
      }
      this.showProblem(error.message);
    }
    const pause = Math.max(PERIOD, LAZY * (performance.now() - began)); // a server that is slow is asked less
    if (run === this.run) this.timer = setTimeout(() => this.look(run), pause);
  }

  show(view) {
    byId("door").hidden = true;
    byId("live").hidden = false;
    this.showProblem("");
    this.history.add(view);
    showVitals(view, this.history);
    showHits(view, this.history);
    this.pool.show(view);
    this.tree.show(view);
    showTiers(view);
    showEvictions(view);
  }

  showDoor(reason) {
    byId("live").hidden = true;
    byId("vitals").hidden = true;
    byId("door").hidden = false;
    byId("token").value = "";
    this.showProblem("");
    if (reason) say(byId("door-reason"), reason);
  }

  showProblem(text) {
    byId("problem").hidden = !text;
    say(byId("problem"), text);
    byId("live").classList.toggle("stale", Boolean(text));
  }
}
