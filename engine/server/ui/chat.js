// The chat: a conversation that goes to the server whole with each turn.

import { Refusal, chatChunks } from "./api.js";
import { byId, say } from "./dom.js";
import { Turn } from "./turn.js";

const NEAR_END = 80;

/** The conversation, its turns on the page and the answer that is coming. */
export class Chat {
  /** `settings`: tells system, temperature, max_tokens; `onChange`: called whenever it begins, ends or is emptied. */
  constructor(settings, onChange) {
    this.settings = settings;
    this.onChange = onChange;
    this.turns = [];
    this.coming = null;
    this.transcript = byId("transcript");
    this.status = byId("chat-status");
  }

  get isBusy() {
    return this.coming !== null;
  }

  /** The conversation so far, as the server takes it; empty before the first answer. */
  get messages() {
    if (!this.turns.length) return [];
    const spoken = this.turns.flatMap((turn) => [
      { role: "user", content: turn.question },
      { role: "assistant", content: turn.answer },
    ]);
    return [...this.opening, ...spoken];
  }

  /** Ask, and show the answer as it comes. Resolves when it is over, however it ends. */
  async ask(question) {
    if (this.isBusy) return;
    const turn = new Turn(question, (failed) => this.again(failed));
    byId("opening").hidden = true;
    this.transcript.append(turn.root);
    turn.root.scrollIntoView({ block: "end" });
    this.coming = new AbortController();
    say(this.status, "");
    this.onChange();
    try {
      await this.hear(turn, this.coming.signal);
    } finally {
      this.coming = null;
      this.onChange();
    }
  }

  /** Leave the answer that is coming: the server stops working on it. */
  stop() {
    this.coming?.abort();
  }

  /** Begin anew. */
  clear() {
    this.stop();
    for (const each of this.transcript.querySelectorAll(".turn")) each.remove();
    this.turns = [];
    byId("opening").hidden = false;
    this.onChange();
  }

  again(failed) {
    if (this.isBusy) return;
    failed.root.remove();
    this.ask(failed.question);
  }

  get opening() {
    const { system } = this.settings();
    return system ? [{ role: "system", content: system }] : [];
  }

  async hear(turn, signal) {
    const answer = new Hearing();
    try {
      for await (const chunk of chatChunks(this.request(turn.question), signal)) {
        this.write(turn, answer.read(chunk, performance.now()));
      }
      this.keep(turn, answer.ending, answer.usage, answer.times);
    } catch (error) {
      if (error.name === "AbortError") this.keep(turn, "stopped", null, null);
      else this.drop(turn, error);
    }
  }

  request(question) {
    const { temperature, max_tokens } = this.settings();
    const messages = [...(this.turns.length ? this.messages : this.opening), { role: "user", content: question }];
    return { messages, temperature, max_tokens, stream: true, stream_options: { include_usage: true } };
  }

  write(turn, text) {
    if (!text) return;
    const end = this.transcript.scrollHeight - this.transcript.clientHeight;
    const follows = end - this.transcript.scrollTop < NEAR_END;
    turn.add(text);
    if (follows) this.transcript.scrollTop = this.transcript.scrollHeight;
  }

  keep(turn, ending, usage, times) {
    if (turn.root.isConnected) this.turns.push(turn);
    turn.end(ending, usage, times);
    say(this.status, turn.summary);
    this.transcript.scrollTop = this.transcript.scrollHeight;
  }

  drop(turn, error) {
    turn.fail(error instanceof Refusal ? error.message : `Something is wrong with this page: ${error.message}`);
    this.transcript.scrollTop = this.transcript.scrollHeight;
  }
}

/** What the chunks of one answer say, and when. */
class Hearing {
  constructor() {
    this.began = performance.now();
    this.first = null;
    this.last = null;
    this.ending = null;
    this.usage = null;
  }

  /** The new text of a chunk that came at `now` (milliseconds). */
  read(chunk, now) {
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices[0];
    const text = choice?.delta.content ?? "";
    this.ending = choice?.finish_reason ?? this.ending;
    if (text) {
      this.first ??= now;
      this.last = now;
    }
    return text;
  }

  /** Seconds to the first text, and tokens per second from then on; 0 where there are too few to tell. */
  get times() {
    const first = ((this.first ?? performance.now()) - this.began) / 1000;
    const seconds = ((this.last ?? 0) - (this.first ?? 0)) / 1000;
    const rate = seconds > 0 && this.usage ? (this.usage.completion_tokens - 1) / seconds : 0;
    return { first, rate };
  }
}
