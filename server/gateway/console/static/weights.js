// The published versions, with what an administrator may do to them.

import { byId, el, setText } from "./dom.js";
import { fingerprintCell } from "./fleet.js";
import { underWay } from "./releases.js";
import { Table, clock } from "./table.js";
import { badge, served, shares, versionName } from "./versions.js";

export class WeightsView {
  constructor(dialog, diff) {
    this.dialog = dialog;
    this.diff = diff;
    this.active = null;
    this.table = new Table(byId("versions"), this.#columns(), (v) => v.version, "Nothing has been published.");
    this.rollback = byId("rollback");
    this.rollback.addEventListener("click", () => this.dialog.open({ version: this.active.previous, rollback: true }));
  }

  update({ active, versions }, release) {
    this.active = active;
    this.dialog.active = active;
    this.table.update([...versions].sort((a, b) => b.version - a.version));
    const previous = active?.previous ?? null;
    const ready = versions.some((v) => v.version === previous && v.state === "ready");
    this.rollback.disabled = !ready;
    setText(byId("rollback-note"), ready ? wayBack(previous, release) : noWayBack(active, release));
  }

  #columns() {
    return [
      { head: "Version", header: true, value: (v) => v.version, render: (v) => badge(v.version) },
      { head: "State", value: (v) => [this.#isActive(v) ? "active" : v.state, this.#share(v)].join(" ").trim() },
      { head: "Step", kind: "number", value: (v) => v.step ?? "–" },
      { head: "Published by", value: (v) => v.publisher || v.source },
      { head: "At", value: (v) => clock(v.created_at) },
      { head: "Size", kind: "number", value: (v) => size(v.nbytes) },
      { head: "Fingerprint", value: (v) => v.fingerprint, render: (v) => fingerprintCell(v.fingerprint) },
      { head: "Parts", value: (v) => (v.parts ?? []).map((part) => part.name).join(", ") || "–" },
      { head: "Do", value: (v) => `${this.active?.version} ${v.state} ${this.#share(v)}`, render: (v) => this.#actions(v) },
    ];
  }

  #isActive(version) {
    return this.active?.version === version.version;
  }

  #share(version) {
    const percent = shares(this.active).get(version.version);
    return percent === undefined ? "" : `${percent} %`;
  }

  #actions(version) {
    const { version: number, state } = version;
    const buttons = [];
    const add = (text, name, act) => {
      const button = el("button", { type: "button", "aria-label": name }, text);
      button.addEventListener("click", act);
      buttons.push(button);
    };
    const name = versionName(number);
    const ready = state === "ready";
    if (ready && (!this.#isActive(version) || this.active.split)) {
      add("Activate", `Activate ${name}`, () => this.dialog.open({ version: number, rollback: false }));
    }
    if (ready && this.active && !this.#isActive(version)) {
      add("Diff", `Diff of ${name} to the active version`, () => this.diff.open(this.active.version, number));
    }
    return buttons.length ? el("span", { class: "row" }, ...buttons) : document.createTextNode("–");
  }
}

function wayBack(previous, release) {
  const ends = underWay(release) ? `; it ends the release of ${versionName(release.version)}` : "";
  return `to ${versionName(previous)}, which served before${ends}`;
}

// The state that leaves nothing to go back to, and the action that is possible in it.
function noWayBack(active, release) {
  if (active === null) return "no version is active yet";
  if (underWay(release)) {
    const names = `${versionName(release.version)} is being released over ${versionName(release.stable)}`;
    return `${names}: “Take it back” ends that`;
  }
  const now = versionName(active.version);
  if (active.split) return `${served(active.version, active.split)}: “Activate ${now}” ends that`;
  if (active.previous === null) return `no version served before ${now}`;
  return `${versionName(active.previous)}, which served before, is no longer held: activate one that is ready`;
}

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; bytes >= 1000 && at < units.length - 1; at += 1) bytes /= 1000;
  return `${bytes.toFixed(at > 2 ? 2 : 0)} ${units[at]}`;
}
