// The server: requests, refusals, the two secrets that open it, and which of several it is.

import { events } from "./sse.js";

/** What the server, or the way to it, did not let through. */
export class Refusal extends Error {
  /** `status`: of HTTP; 0: there was no answer. */
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** A text that lasts as long as the tab. */
class Kept {
  constructor(name) {
    this.name = name;
  }

  get value() {
    return sessionStorage.getItem(this.name) ?? "";
  }

  set value(value) {
    if (value) sessionStorage.setItem(this.name, value);
    else sessionStorage.removeItem(this.name);
  }
}

export const adminToken = new Kept("octavo.admin_token");
export const apiKey = new Kept("octavo.api_key");

/** Which replica the admin token speaks to, behind a gateway; empty: there is no choice. */
export const replica = new Kept("octavo.replica");

/** Take the admin token out of the address (`#token=...`), so that it gets into no bookmark and no picture. */
export function takeTokenFromAddress() {
  const found = new URLSearchParams(location.hash.slice(1)).get("token");
  if (found === null) return;
  adminToken.value = found;
  history.replaceState(null, "", location.pathname + location.search);
}

/** Ask the server; its JSON. `secret`: whose value opens the route. */
export async function ask(method, path, { body, secret = apiKey, signal } = {}) {
  const response = await send(method, path, { body, secret, signal });
  return response.json();
}

/**
 * How far the server is, by /ready, which says so with a 503 too. A gateway is as far as the best of its `replicas`,
 * which are told by name if they can answer; a server has none.
 */
export async function readiness() {
  const response = await reached(fetch("ready"));
  const told = await response.json();
  if (!told.replicas) return { replicas: [], ...told };
  const all = Object.entries(told.replicas).filter(([, { status }]) => status); // those that could answer
  const best = ["ready", "loading"].map((wanted) => all.find(([, { status }]) => status === wanted)).find(Boolean);
  return { ...((best ?? all[0])?.[1] ?? { status: "away" }), replicas: all.map(([name]) => name) };
}

/** Stream a chat completion: its chunks. An error within the stream is raised. */
export async function* chatChunks(body, signal) {
  const response = await send("POST", "v1/chat/completions", { body, secret: apiKey, signal });
  for await (const { data } of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(chunk.error.message);
    yield chunk;
  }
  throw new Refusal("The connection was lost before the answer was complete.");
}

async function send(method, path, { body, secret, signal }) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (secret.value) headers.Authorization = `Bearer ${secret.value}`;
  if (secret === adminToken && replica.value) headers["X-Octavo-Replica"] = replica.value;
  const request = { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) };
  const response = await reached(fetch(path, request));
  if (!response.ok) throw new Refusal(await reason(response), response.status);
  return response;
}

async function reached(answer) {
  try {
    return await answer;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server cannot be reached.");
  }
}

async function reason(response) {
  const wait = response.headers.get("Retry-After");
  const later = wait && response.status !== 403 ? ` Try again in ${wait} s.` : "";
  try {
    return `${(await response.json()).error.message}.${later}`.replace(/([.!?])\.( |$)/, "$1$2");
  } catch {
    return `The server answered with status ${response.status}.${later}`;
  }
}
