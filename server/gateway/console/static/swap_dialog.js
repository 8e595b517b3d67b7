// Asks before a swap, follows it, and says how it ended. Closing the dialog does not stop a swap that was asked for.

import { ApiError } from "./api.js";
import { byId, setText } from "./dom.js";
import { number } from "./table.js";
import { served, shares, versionName } from "./versions.js";

const PHASES = { prepare: "staging", canary: "trying the canary", commit: "flipping", done: "done", aborted: "aborted" };

export class SwapDialog {
  constructor(api, onDone) {
    this.api = api;
    this.onDone = onDone;
    this.active = null;
    this.wish = null;
    this.underway = false;
    this.dialog = byId("swap-dialog");
    this.form = byId("swap-form");
    this.go = byId("swap-go");
    this.shut = byId("swap-close");
    this.percent = byId("swap-percent");
    this.percent.addEventListener("input", () => this.#share());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#swap();
    });
    this.shut.addEventListener("click", () => this.dialog.close());
  }

  open(wish) {
    if (this.dialog.open) return;
    if (!this.underway) this.#ask(wish);
    this.opener = document.activeElement;
    this.dialog.showModal();
    this.shut.focus(); // Enter by mistake swaps nothing
    this.dialog.addEventListener("close", () => this.opener?.focus(), { once: true });
  }

  // What the polling sees of the swap while it is under way.
  follow(swap, instances) {
    if (!this.underway || !swap?.in_flight) return;
    const staged = instances.filter((i) => i.swap_id === swap.id && ["STAGED", "COMMITTING"].includes(i.state)).length;
    const of = swap.participants.length;
    const count = swap.phase === "prepare" ? `: ${staged} of ${of} staged` : "";
    setText(byId("swap-progress"), `${served(swap.target, swap.split)}, ${PHASES[swap.phase]}${count}`);
  }

  #ask(wish) {
    this.wish = wish;
    const now = this.active ? `Now ${served(this.active.version, this.active.split)} serves.` : "Nothing serves yet.";
    const verb = wish.rollback ? "Roll back" : "Activate";
    setText(byId("swap-dialog-title"), `${verb} ${wish.rollback ? "to " : ""}${versionName(wish.version)}?`);
    setText(byId("swap-dialog-text"), `${now} If the swap fails, it goes on serving.`);
    setText(this.go, verb);
    const alone = !this.active || this.active.version === wish.version;
    this.percent.disabled = alone;
    this.percent.value = alone ? 100 : (shares(this.active).get(wish.version) ?? 100);
    this.#share();
    setText(byId("swap-progress"), "");
    this.#result("", "");
    this.#busy(false);
    setText(this.shut, "Cancel");
  }

  async #swap() {
    if (this.underway) return;
    this.#busy(true);
    setText(byId("swap-progress"), "asked for");
    try {
      const all = this.wish.rollback ? "rollback" : "activate";
      const reason = encodeURIComponent(this.form.elements.namedItem("reason").value);
      const path = `/admin/weights/${this.#splits() ? "split" : all}?reason=${reason}`;
      this.#done(await this.api.json(path, { method: "POST", body: this.#body() }));
    } catch (error) {
      this.#result(error instanceof ApiError ? error.line : error.message, "error");
    }
    setText(byId("swap-progress"), "");
    this.underway = false;
    this.go.hidden = true;
    setText(this.shut, "Close");
    if (this.dialog.open) this.shut.focus();
    this.onDone();
  }

  #body() {
    const wish = this.#splits() ? this.#split() : { version: this.wish.version };
    const body = { ...wish, mode: this.form.elements.namedItem("mode").value };
    for (const name of ["drain_s", "deadline_s"]) {
      const value = Number.parseFloat(this.form.elements.namedItem(name).value);
      if (Number.isFinite(value)) body[name] = value;
    }
    return body;
  }

  #splits() {
    return Number(this.percent.value) < 100;
  }

  // The rest of the requests goes to the active version; other shares end.
  #split() {
    const percent = Number(this.percent.value);
    const rest = { version: this.active.version, percent: 100 - percent };
    const { sticky = "", minimum = 1 } = this.active.split ?? {};
    return { shares: [rest, { version: this.wish.version, percent }], sticky, minimum };
  }

  #share() {
    setText(byId("swap-share"), `${this.percent.value} %`);
  }

  #done(report) {
    if (report.pending) return this.#result(`It waits for approval by somebody else: hotswap approve ${report.pending.id}`, "");
    const times = `prepared in ${number(report.prepare_ms)} ms, committed in ${number(report.commit_ms, 1)} ms`;
    this.#result(`${served(report.version, report.split)} serves: ${times}.`, "good");
  }

  #result(text, kind) {
    const line = byId("swap-result");
    line.className = kind;
    setText(line, text);
  }

  #busy(underway) {
    this.underway = underway;
    this.go.hidden = false;
    this.go.disabled = underway;
    setText(this.shut, "Close");
  }
}
