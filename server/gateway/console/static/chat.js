// The chat: what was asked, and the answers with their weight versions, as plain text.

import { ApiError } from "./api.js";
import { byId, el, setText } from "./dom.js";
import { Legend, VersionedText, versionName } from "./versions.js";

export class Chat {
  constructor(talk, announcer) {
    this.talk = talk;
    this.announcer = announcer;
    this.form = byId("chat-form");
    this.question = byId("question");
    this.log = byId("chat-log");
    this.notice = byId("chat-notice");
    this.legend = new Legend(byId("legend"));
    this.messages = [];
    this.stopping = null; // AbortController of the answer under way
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.question.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    byId("stop").addEventListener("click", () => this.stopping?.abort());
    byId("clear").addEventListener("click", () => this.#clear());
  }

  async #send() {
    const text = this.question.value;
    if (this.stopping !== null || !text.trim()) return;
    this.question.value = "";
    this.messages.push({ role: "user", content: text });
    this.log.append(message("You", el("p", { class: "text" }, text)));
    await this.#answer();
  }

  async #answer() {
    const view = new AnswerView(this.log);
    this.#busy(new AbortController());
    let text = "";
    try {
      for await (const told of this.talk.ask(this.messages, this.#options(), this.stopping.signal)) {
        if (told.kind === "plain") this.#plain();
        else if (told.kind === "end") this.#complete(view, told);
        else {
          text += told.text;
          this.#show(view, told);
        }
      }
      this.announcer.end();
    } catch (error) {
      this.announcer.end();
      this.#failed(view, error);
    } finally {
      this.#busy(null);
    }
    if (text) this.messages.push({ role: "assistant", content: text });
    else this.messages.pop(); // nothing came of the question: the next one is not burdened with it
  }

  #complete(view, told) {
    view.end(told);
    for (const span of told.spans) this.legend.add(span.version, span.end - span.start);
  }

  #show(view, piece) {
    if (view.piece(piece)) {
      this.announcer.end();
      this.announcer.say(`From here on weight version ${piece.version} answers.`);
    }
    this.legend.add(piece.version);
    this.announcer.add(piece.text);
    view.scroll();
  }

  #failed(view, error) {
    if (error.name === "AbortError") {
      view.stopped();
      this.announcer.say("Stopped.");
      return;
    }
    const line = error instanceof ApiError ? error.line : `The console failed: ${error.message}`;
    view.failed(line);
    this.announcer.say(`The answer failed. ${line}`);
  }

  #plain() {
    setText(this.notice, "This model has no chat template: each message is continued as plain text by /generate.");
  }

  #options() {
    const value = (name) => this.form.elements.namedItem(name).value;
    const number = (name, otherwise) => (Number.isFinite(Number.parseFloat(value(name))) ? Number(value(name)) : otherwise);
    const ignoreEos = this.form.elements.namedItem("ignore_eos").checked;
    return { maxTokens: number("max_tokens", 256), temperature: number("temperature", 0.7), policy: value("policy"), ignoreEos };
  }

  #busy(stopping) {
    this.stopping = stopping;
    const stop = byId("stop");
    const wasFocused = document.activeElement === stop;
    stop.disabled = stopping === null;
    byId("send").disabled = stopping !== null;
    byId("clear").disabled = stopping !== null;
    this.log.setAttribute("aria-busy", String(stopping !== null));
    if (wasFocused && stop.disabled) this.question.focus(); // a disabled button would lose the focus
  }

  #clear() {
    this.messages = [];
    this.log.replaceChildren();
    byId("legend").replaceChildren();
    this.legend = new Legend(byId("legend"));
    setText(this.notice, "");
    this.question.focus();
  }
}

// One answer as it comes in.
class AnswerView {
  constructor(log) {
    this.text = el("p", { class: "text" });
    this.facts = el("p", { class: "facts" }, "waiting for the first token");
    this.log = log;
    log.append(message("Model", this.text, this.facts));
    this.written = new VersionedText(this.text);
    this.began = performance.now();
    this.first = this.last = 0;
    this.scroll();
  }

  // Returns whether the weights changed before this piece.
  piece({ version, text }) {
    const begins = !this.first;
    this.last = performance.now();
    this.first ||= this.last;
    const crossed = this.written.add(version, text);
    if (begins || crossed) this.#tell([]);
    return crossed;
  }

  end({ reason, tokens, spans, prompt }) {
    const more = prompt.length ? [`prompt read by ${names(prompt)}`] : [];
    if (spans.length > 1) more.push(spans.map((s) => `${versionName(s.version)}: ${s.start}–${s.end}`).join(", "));
    if (reason) more.push(`ended by ${reason}`);
    this.#tell(more, tokens);
  }

  stopped() {
    this.#tell(["stopped"]);
  }

  failed(line) {
    if (this.first) this.#tell([]);
    else setText(this.facts, "");
    this.facts.after(el("p", { class: "error" }, line));
    this.scroll();
  }

  // Keeps the newest line in view for those who are at the end already.
  scroll() {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    if (scrollHeight - scrollTop - clientHeight < 80) this.log.scrollTop = scrollHeight;
  }

  // `tokens`: as the end of the answer tells them; a piece does not say how many it has.
  #tell(more, tokens = null) {
    const facts = [...this.written.tokens.keys()].map(versionName);
    const told = [facts.length ? `written by ${facts.join(", ")}` : "nothing written"];
    if (this.first) told.push(`first token after ${Math.round(this.first - this.began)} ms`);
    if (tokens > 1 && this.last > this.first) {
      told.push(`${(((tokens - 1) * 1000) / (this.last - this.first)).toFixed(1)} tokens/s`);
    }
    if (tokens) told.push(tokens === 1 ? "1 token" : `${tokens} tokens`);
    setText(this.facts, [...told, ...more].join(" · "));
  }
}

function message(who, ...children) {
  return el("article", { class: who === "You" ? "message mine" : "message" }, el("h3", {}, who), ...children);
}

function names(spans) {
  return [...new Set(spans.map((span) => versionName(span.version)))].join(", ");
}
