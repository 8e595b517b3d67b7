// Begins a release: a version takes over step by step, by a policy.

import { FormDialog } from "./dialog.js";
import { byId, setText } from "./dom.js";
import { versionName } from "./versions.js";

export class ReleaseDialog extends FormDialog {
  constructor(api, onDone) {
    super("release", onDone);
    this.api = api;
    this.policies = {};
    this.first = this.form.elements.namedItem("version");
    this.policy = this.form.elements.namedItem("policy");
    this.policy.addEventListener("change", () => this.#steps());
    this.button = byId("release-start");
    this.button.addEventListener("click", () => this.#open());
  }

  update(active, versions) {
    this.active = active;
    this.versions = versions.filter((v) => v.state === "ready" && v.version !== active?.version).reverse();
    this.button.disabled = active === null || !this.versions.length;
  }

  async #open() {
    if (!this.underway) this.first.replaceChildren(...this.versions.map((v) => new Option(versionName(v.version), v.version)));
    const text = `The version takes over from ${versionName(this.active.version)} by the steps of the policy, or is taken back by its conditions.`;
    this.show("Start a release", text, "Start");
    try {
      this.policies = (await this.api.json("/admin/releases/policies")).policies;
      this.policy.replaceChildren(...Object.keys(this.policies).map((name) => new Option(name, name, false, name === "default")));
      this.#steps();
    } catch (error) {
      this.say(error.line ?? error.message, "error");
    }
  }

  #steps() {
    setText(byId("release-policy"), this.policies[this.policy.value] ?? "");
  }

  async send() {
    const body = { version: Number(this.value("version")), policy: this.value("policy") };
    const release = await this.api.json(`/admin/releases${this.because()}`, { method: "POST", body });
    if (this.waits(release)) return;
    this.say(`The release of ${versionName(release.version)} over ${versionName(release.stable)} has begun.`, "good");
  }
}
