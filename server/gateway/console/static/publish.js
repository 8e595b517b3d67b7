// Publishes a checkpoint of the gateway's host as the next version, and swaps it in if so wished.

import { FormDialog } from "./dialog.js";
import { byId, setText } from "./dom.js";
import { nowServes, outcome, progress } from "./swap_dialog.js";
import { versionName } from "./versions.js";

export class PublishDialog extends FormDialog {
  constructor(api, onDone) {
    super("publish", onDone);
    this.api = api;
    this.active = null;
    this.first = this.form.elements.namedItem("path");
    byId("publish").addEventListener("click", () => {
      const text = `${nowServes(this.active)} The next version is made of a Hugging Face checkpoint.`;
      this.show("Publish a checkpoint", text, "Publish");
    });
  }

  follow(swap, instances) {
    if (!this.underway) return;
    setText(this.progress, swap?.in_flight ? progress(swap, instances) : "reading and publishing");
  }

  async send() {
    const body = { path: this.value("path"), activate: this.form.elements.namedItem("activate").checked };
    const made = await this.api.json(`/admin/weights${this.because()}`, { method: "POST", body });
    const name = versionName(made.version);
    const kept = made.kept.length ? ` Kept of the version before: ${made.kept.join(", ")}.` : "";
    if (this.waits(made)) return;
    this.say((made.swap ? `${name} is published. ${outcome(made.swap)}` : `${name} is published and ready.`) + kept, "good");
  }
}
