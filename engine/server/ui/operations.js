// What operators can do: another policy, a snapshot, and to pin or evict the chat on the page.

import { adminToken, ask } from "./api.js";
import { byId, element, redraw, say } from "./dom.js";
import { many, span } from "./format.js";

/** The card with the buttons. */
export class Operations {
  /** `chat`: whose messages are pinned or evicted. `onDone`: called when the cache may be another one. */
  constructor(chat, onDone) {
    this.chat = chat;
    this.onDone = onDone;
    this.pinned = null;
    this.installed = [];
    byId("policy").addEventListener("change", (event) => this.run(() => this.switchPolicy(event.target.value)));
    byId("snapshot").addEventListener("click", () => this.run(() => this.snapshot()));
    byId("pin").addEventListener("click", () => this.run(() => this.pin()));
    byId("evict").addEventListener("click", () => this.run(() => this.evict()));
  }

  /** What is known is of another engine. */
  forget() {
    this.pinned = null;
    this.installed = [];
  }

  /** Show a cache view. */
  async show(view) {
    byId("snapshot").hidden = !view.takes_snapshots;
    this.showTenants(new Set(view.nodes.map((node) => node.tenant)));
    this.showChat();
    if (!this.installed.length) this.installed = (await this.admin("GET", "policy")).installed;
    this.showPolicy(view.eviction_policy);
    if (this.pinned !== view.pool.pinned) await this.showPins();
    this.pinned = view.pool.pinned;
  }

  /** Whether there is a chat to do something with. */
  showChat() {
    for (const id of ["pin", "evict"]) byId(id).disabled = this.chat.isBusy || !this.chat.messages.length;
  }

  admin(method, path, body) {
    return ask(method, `admin/${path}`, { body, secret: adminToken });
  }

  /** Do something, and say what came of it. */
  async run(action) {
    try {
      say(byId("told"), await action());
    } catch (error) {
      say(byId("told"), error.message);
    }
    this.onDone();
  }

  async switchPolicy(name) {
    const { eviction_policy: now, before } = await this.admin("PUT", "policy", { eviction_policy: name });
    return `${now} decides now what goes; until now it was ${before}.`;
  }

  async snapshot() {
    const name = `page-${new Date().toISOString().replace(/[:.]/g, "-")}`;
    const { blocks } = await this.admin("POST", "snapshots", { name });
    return `${many(blocks, "block")} are in the snapshot ${name}.`;
  }

  async pin() {
    const kept = await this.admin("POST", "pins", this.conversation);
    await this.showPins();
    return `${many(kept.tokens, "token")} of this chat stay until they are unpinned.`;
  }

  async unpin(id) {
    await this.admin("DELETE", `pins/${id}`);
    await this.showPins();
    return "Unpinned.";
  }

  async evict() {
    const gone = await this.admin("POST", "evict", this.conversation);
    return `${many(gone.device_blocks, "block")} left the device, ${many(gone.tier_blocks, "block")} the tiers.`;
  }

  get conversation() {
    const tenant = byId("tenant").value;
    return { messages: this.chat.messages, tenant: tenant === "" ? null : tenant };
  }

  showPolicy(inCharge) {
    const select = byId("policy");
    const current = this.installed.find((name) => plain(name) === plain(inCharge));
    const names = current ? this.installed : [...this.installed, inCharge];
    redraw(select, names, () =>
      names.map((name) => element("option", { value: name, disabled: name === inCharge && !current }, name)),
    );
    if (document.activeElement !== select) select.value = current ?? inCharge;
  }

  showTenants(tenants) {
    const names = [...tenants].filter((tenant) => tenant !== null).sort();
    byId("tenant-choice").hidden = !names.length;
    const select = byId("tenant");
    const chosen = select.value;
    const made = redraw(select, names, () => [
      element("option", { value: "" }, "none"),
      ...names.map((name) => element("option", { value: name }, name)),
    ]);
    if (made && names.includes(chosen)) select.value = chosen;
  }

  async showPins() {
    const { pins } = await this.admin("GET", "pins");
    redraw(byId("pin-list"), pins, () => pins.map((pin) => this.pinEntry(pin)));
  }

  pinEntry({ id, tokens, seconds_left: left, tenant }) {
    const told = [`${many(tokens, "token")} pinned`];
    if (tenant !== null) told.push(`tenant ${tenant}`);
    if (left !== null) told.push(`for ${span(left)}`);
    const button = element("button", { type: "button", onclick: () => this.run(() => this.unpin(id)) }, "Unpin");
    return element("li", {}, element("span", {}, told.join(" · ")), button);
  }
}

/** The name of a policy as its class and its entry point share it: "WTinyLfu" and "w_tinylfu" -> "wtinylfu". */
const plain = (name) => name.replaceAll("_", "").toLowerCase();
