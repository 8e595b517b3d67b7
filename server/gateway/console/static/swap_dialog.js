// Asks before a swap, follows it, and says how it ended.

import { FormDialog } from "./dialog.js";
import { byId, setText } from "./dom.js";
import { number } from "./table.js";
import { served, shares, versionName } from "./versions.js";

const PHASES = { prepare: "staging", canary: "trying the canary", commit: "flipping", done: "done", aborted: "aborted" };

export class SwapDialog extends FormDialog {
  constructor(api, onDone) {
    super("swap", onDone);
    this.api = api;
    this.active = null;
    this.wish = null;
    this.percent = byId("swap-percent");
    this.percent.addEventListener("input", () => this.#share());
  }

  open(wish) {
    if (!this.underway) this.#ask(wish);
    const verb = this.wish.rollback ? "Roll back" : "Activate";
    const title = `${verb} ${this.wish.rollback ? "to " : ""}${versionName(this.wish.version)}?`;
    this.show(title, `${nowServes(this.active)} If the swap fails, it goes on serving.`, verb);
  }

  // What the polling sees of the swap while it is under way.
  follow(swap, instances) {
    if (this.underway && swap?.in_flight) setText(this.progress, progress(swap, instances));
  }

  async send() {
    const all = this.wish.rollback ? "rollback" : "activate";
    const path = `/admin/weights/${this.#splits() ? "split" : all}${this.because()}`;
    const report = await this.api.json(path, { method: "POST", body: this.#body() });
    if (!this.waits(report)) this.say(outcome(report), "good");
  }

  #ask(wish) {
    this.wish = wish;
    const alone = !this.active || this.active.version === wish.version;
    this.percent.disabled = alone;
    this.percent.value = alone ? 100 : (shares(this.active).get(wish.version) ?? 100);
    this.#share();
  }

  #body() {
    const wish = this.#splits() ? this.#split() : { version: this.wish.version };
    const body = { ...wish, mode: this.value("mode") };
    for (const name of ["drain_s", "deadline_s"]) {
      const value = Number.parseFloat(this.value(name));
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
}

export function nowServes(active) {
  return active ? `Now ${served(active.version, active.split)} serves.` : "Nothing serves yet.";
}

export function progress(swap, instances) {
  const staged = instances.filter((i) => i.swap_id === swap.id && ["STAGED", "COMMITTING"].includes(i.state)).length;
  const count = swap.phase === "prepare" ? `: ${staged} of ${swap.participants.length} staged` : "";
  return `${served(swap.target, swap.split)}, ${PHASES[swap.phase]}${count}`;
}

export function outcome(report) {
  const times = `prepared in ${number(report.prepare_ms)} ms, committed in ${number(report.commit_ms, 1)} ms`;
  return `${served(report.version, report.split)} serves: ${times}.`;
}
