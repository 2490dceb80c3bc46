// The page: a chat on the left, the cache that serves it on the right.

import { ask, readiness, takeTokenFromAddress } from "./api.js";
import { Cache } from "./cache.js";
import { Chat } from "./chat.js";
import { askForKey, connectComposer, settings, showBusy } from "./composer.js";
import { byId, say } from "./dom.js";
import { share } from "./format.js";

const SOON = 1000;
const LATER = 10000;

takeTokenFromAddress();
addEventListener("hashchange", () => {
  takeTokenFromAddress();
  cache.start();
});

const chat = new Chat(settings, () => {
  showBusy(chat.isBusy);
  cache.operations.showChat();
  if (!chat.isBusy) cache.soon();
});
const cache = new Cache(chat);
connectComposer(chat, showModel);
cache.start();
watch();
byId("prompt").focus({ preventScroll: true });

/** Say whether the server takes requests, again and again, more often while it does not. */
async function watch() {
  let isReady = false;
  try {
    const { status, share: done, replicas } = await readiness();
    cache.replicas.offer(replicas);
    isReady = status === "ready";
    showState(status, status === "loading" ? `loading, ${share(done)}` : status);
    if (isReady && !byId("model").textContent) await showModel();
  } catch {
    showState("away", "not reachable");
  }
  setTimeout(watch, isReady ? LATER : SOON);
}

function showState(state, words) {
  byId("state").dataset.state = state;
  say(byId("state"), words);
}

/** Say which model answers; a server with keys tells only those who have one. */
async function showModel() {
  try {
    const { data } = await ask("GET", "v1/models");
    say(byId("model"), data[0].id);
    document.title = `${data[0].id} · Octavo`;
  } catch (error) {
    if (error.status !== 401) throw error;
    say(byId("model"), "needs an API key");
    askForKey();
  }
}
