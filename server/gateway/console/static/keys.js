// The keys in the store: a list, a form that makes one, and a way to revoke one. A new key is in its dialog until that
// closes, and nowhere else.

import { FormDialog } from "./dialog.js";
import { byId, el, setText } from "./dom.js";
import { Table, day } from "./table.js";

const DAY_S = 86400;
const USUAL = { priority: 0, weight: 1 };

export class KeysView {
  constructor(api, onDone) {
    this.made = new NewKeyDialog(api, onDone);
    this.revoked = new RevokeDialog(api, onDone);
    this.table = new Table(byId("keys"), this.#columns(), (k) => k.id, "No key is in the store.");
  }

  update({ keys, inference }) {
    this.table.update([...keys].reverse());
    const open = inference === "open";
    setText(byId("keys-note"), open ? "Inference asks for no key, until one with the role infer is made." : "");
  }

  #columns() {
    return [
      { head: "Name", header: true, value: (k) => k.name },
      { head: "Id", kind: "id", value: (k) => k.id },
      { head: "Role", value: (k) => k.scopes.join(", ") },
      { head: "State", value: (k) => k.state },
      { head: "Made", value: (k) => day(k.created_at) },
      { head: "Ends", value: (k) => (k.expires_at === null ? "never" : day(k.expires_at)) },
      { head: "Limits", value: limits },
      { head: "Models", value: (k) => k.models.join(", ") || "all" },
      { head: "Do", value: (k) => k.state, render: (k) => this.#action(k) },
    ];
  }

  #action(key) {
    if (key.state === "revoked") return document.createTextNode("–");
    const button = el("button", { type: "button", "aria-label": `Revoke ${key.name}` }, "Revoke");
    button.addEventListener("click", () => this.revoked.open(key));
    return button;
  }
}

class NewKeyDialog extends FormDialog {
  constructor(api, onDone) {
    super("key", onDone);
    this.api = api;
    this.first = this.form.elements.namedItem("name");
    this.shown = byId("new-key");
    this.copy = byId("key-copy");
    this.copy.addEventListener("click", () => this.#copy());
    this.dialog.addEventListener("close", () => this.#show(""));
    const text = "Only its digest is kept. After the first key with the role infer, all inference asks for a key.";
    byId("key-make").addEventListener("click", () => this.show("Make a key", text, "Make"));
  }

  async send() {
    const body = { name: this.value("name"), scopes: [this.value("scope")] };
    const days = Number.parseFloat(this.value("days"));
    if (Number.isFinite(days)) body.expires_in_s = days * DAY_S;
    const { key } = await this.api.json("/admin/keys", { method: "POST", body });
    if (!this.dialog.open) return; // closed meanwhile: nobody sees it, so it is dropped; the list has its id
    this.#show(key);
    this.say("Keep it now: it is not shown again.", "good");
    this.form.reset();
  }

  #show(key) {
    setText(this.shown, key);
    this.copy.hidden = !key;
    setText(this.copy, "Copy");
  }

  // Without TLS a browser has no clipboard for pages: the key is selected instead.
  async #copy() {
    try {
      await navigator.clipboard.writeText(this.shown.textContent);
      setText(this.copy, "Copied");
    } catch {
      getSelection().selectAllChildren(this.shown);
      setText(this.copy, "Selected: press Ctrl+C");
    }
  }
}

class RevokeDialog extends FormDialog {
  constructor(api, onDone) {
    super("revoke", onDone);
    this.api = api;
  }

  open(key) {
    if (!this.underway) this.key = key;
    this.show(`Revoke ${this.key.name}?`, "Requests with it are refused from then on. It cannot be taken back.", "Revoke");
  }

  async send() {
    await this.api.json(`/admin/keys/${encodeURIComponent(this.key.id)}`, { method: "DELETE" });
    this.say(`${this.key.name} is revoked.`, "good");
  }
}

function limits(key) {
  const set = Object.entries(key.limits).filter(([name, limit]) => limit !== null && limit !== USUAL[name]);
  const told = set.map(([name, limit]) => `${name.replaceAll("_", " ")}: ${limit}`);
  if (key.spent) told.push(`tokens of this month: ${key.spent.tokens}`);
  return told.join(", ") || "none";
}
