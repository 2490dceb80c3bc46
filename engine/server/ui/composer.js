// The form below the chat: what to send, with which settings.

import { apiKey } from "./api.js";
import { byId } from "./dom.js";

/** What the settings say; what is empty is left to the server. */
export function settings() {
  return {
    system: byId("system").value.trim(),
    temperature: numberOf(byId("temperature")),
    max_tokens: numberOf(byId("max-tokens")),
  };
}

/** Connect the form with `chat`. `onKey`: called when the API key is another one. */
export function connectComposer(chat, onKey) {
  const prompt = byId("prompt");

  function send() {
    const text = prompt.value.trim();
    if (!text || chat.isBusy || !byId("composer").reportValidity()) return;
    prompt.value = "";
    fit(prompt);
    chat.ask(text);
  }

  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  prompt.addEventListener("input", () => fit(prompt));
  byId("chat").addEventListener("keydown", (event) => {
    if (event.key === "Escape") chat.stop();
  });
  byId("stop").addEventListener("click", () => chat.stop());
  byId("new-chat").addEventListener("click", () => {
    chat.clear();
    prompt.focus();
  });
  for (const starter of byId("starters").children) {
    starter.addEventListener("click", () => chat.ask(starter.textContent.trim()));
  }
  connectKey(onKey);
}

/** Show whether an answer is coming. */
export function showBusy(isBusy) {
  const had = document.activeElement;
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  if (had === byId("send") || had === byId("stop")) byId(isBusy ? "stop" : "prompt").focus();
}

/** Ask for the API key where people see it. */
export function askForKey() {
  byId("settings").open = true;
  byId("api-key").focus();
}

function connectKey(onKey) {
  const field = byId("api-key");
  field.value = apiKey.value;
  field.addEventListener("change", () => {
    apiKey.value = field.value.trim();
    onKey();
  });
}

/** As high as its text, within what the style allows. */
function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

function numberOf(field) {
  return field.value === "" || !Number.isFinite(field.valueAsNumber) ? undefined : field.valueAsNumber;
}
